"""NVIDIA's tests on the CPU kernels: how they are found, drawn, run within limits and reported, on a small checkout."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lab.nvidia_tests import checkout, command, measure, plugin
from lab.nvidia_tests.checkout import Job
from lab.nvidia_tests.measure import Collected, Limits, Outcome, Portion
from parity.user_error import UserError

SCRIPT = """
: ${TE_PATH:=/opt/transformerengine}
export NVTE_FLASH_ATTN_V2=1
: ${FEATURES:=$TE_PATH/transformer_engine/debug/features}
    python3 $TE_PATH/tests/pytorch/test_one.py --save all || error_exit "no files"
NVTE_ONE=1 python3 -m pytest --tb=auto --junitxml=$LOGS/a.xml $TE_PATH/tests/pytorch/test_one.py || test_fail "one"
NVTE_ONE=2 python3 -m pytest -v -s --junitxml=$LOGS/a.xml $TE_PATH/tests/pytorch/test_one.py || test_fail "one again"
pytest -v -s --junitxml=$LOGS/b.xml $TE_PATH/tests/pytorch/folder --features=$FEATURES || test_fail "folder"
"""
ONE = """
    import os, time
    import pytest, torch
    import transformer_engine.pytorch as te

    if __name__ == "__main__":
        open("saved", "w").write(" ".join(__import__("sys").argv[1:]))

    def test_passes():
        assert open("saved").read() == "--save all"
        assert os.environ["NVTE_ONE"] in "12" and os.environ["NVTE_FLASH_ATTN_V2"] == "1"
        assert torch.ones(1, device="cuda").is_cuda and te.Linear(16, 16)(torch.ones(16, 16).cuda()).shape == (16, 16)

    def test_fp32_products_are_rounded_to_tf32_forward_and_backward():
        a, b = (torch.full((16, 16), 1 + 2**-20, requires_grad=True) for _ in range(2))
        (a @ b).sum().backward()
        assert (a @ b == 16).all() and (a.grad == 16).all()
        torch.backends.cuda.matmul.allow_tf32 = False
        assert (a @ b != 16).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_scaled_products_are_those_of_te(dtype):
        import transformer_engine.pytorch.cpp_extensions as extensions
        torch.manual_seed(0)
        quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cuda")
        a, b = (quantizer(torch.randn(64, 1024, dtype=dtype)) for _ in range(2))
        codes = [each._data.view(torch.float8_e4m3fn) for each in (a, b)]
        scales = dict(scale_a=a._scale_inv, scale_b=b._scale_inv)
        product = torch._scaled_mm(codes[0], codes[1].t(), out_dtype=dtype, use_fast_accum=True, **scales)
        assert torch.equal(product, extensions.general_gemm(b, a, out_dtype=dtype)[0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_layer_norms_add_their_gradients_in_fp32_by_blocks(dtype):
        torch.manual_seed(0)
        norm = torch.nn.LayerNorm(64).to(dtype)
        given, passed = torch.randn(4096, 64).to(dtype), torch.randn(4096, 64).to(dtype)
        exact, grads = torch.nn.LayerNorm(64).double(), {}
        for module, kind in ((norm, dtype), (exact, torch.float64)):
            values = given.clone().to(kind).requires_grad_()
            module(values).backward(passed.to(kind))
            grads[module] = [values.grad, module.weight.grad, module.bias.grad]
        for grad, right in zip(grads[norm], grads[exact]):
            assert (grad - right).norm() / right.norm() < 2 * torch.finfo(dtype).eps

    def test_attention_keeps_its_scores_in_fp32():
        q, k, v = torch.randn(3, 1, 2, 64, 16).to(torch.bfloat16)
        attend = torch.nn.functional.scaled_dot_product_attention
        right = attend(*(each.float() for each in (q, k, v)), is_causal=True)
        assert torch.equal(attend(q, k, v, is_causal=True), right.to(torch.bfloat16))

    def test_cross_entropy_adds_losses_in_fp32():
        torch.manual_seed(0)
        logits, target = torch.randn(4096, 8).to(torch.bfloat16), torch.randint(8, (4096,))
        given = logits.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(given, target)
        loss.backward()
        right = torch.nn.functional.cross_entropy(logits.double(), target)
        assert (loss - right).abs() / right < torch.finfo(torch.bfloat16).eps
        assert given.grad.dtype == torch.bfloat16 and given.grad.abs().sum() > 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_norms_are_added_by_blocks(dtype):
        values = torch.full((2048, 1024), 0.7).to(dtype)
        for order in (1, 2):
            right = torch.linalg.vector_norm(values.double(), order)
            assert (torch.norm(values, p=order) - right).abs() / right < torch.finfo(dtype).eps
        assert torch.linalg.vector_norm(values, 1, 0, True).shape == (1, 1024)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
    def test_autocast_takes_fp32(dtype):
        given = torch.ones(16, 16, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast(device_type="cuda", dtype=dtype):
            product = given @ given
        product.sum().backward()
        assert product.dtype == (dtype or torch.bfloat16) and given.grad.dtype == torch.bfloat16

    def test_memory_is_what_tensors_hold_that_are_not_pinned():
        given = torch.ones(1024, device="cuda", requires_grad=True)
        pinned = torch.empty(4096, pin_memory=True)
        norm = te.LayerNorm(1024)(given.view(1, -1))
        torch.cuda.reset_peak_memory_stats()
        kept = torch.cuda.memory_allocated()
        assert kept == 4 * (1024 + 1024 + 2 * 1024 + 2)  # input, output, weight and bias, statistics
        torch.ones(2048, device="cuda")
        del norm
        assert torch.cuda.max_memory_allocated() == kept + 4 * 2048
        assert torch.cuda.memory_allocated() == 4 * 1024

    def test_leaves_something_behind():
        torch.left_behind = True

    def test_finds_nothing_left_behind():
        assert not hasattr(torch, "left_behind"), "something was left behind"

    def test_a_program_is_forked_where_te_is_imported(tmp_path):
        import subprocess, sys
        program = tmp_path / "program.py"
        program.write_text(
            "import os, sys, torch; print(os.getppid(), sys.argv[1:], os.environ['MORE'], os.getcwd(), input());"
            "print(torch.ones(1, device='cuda').is_cuda); sys.exit(3)"
        )
        begin = [sys.executable, str(program), "--one", "2"]
        variables = {**os.environ, "MORE": "more"}
        ended = subprocess.run(begin, cwd=tmp_path, env=variables, input="said", capture_output=True, text=True)
        assert ended.returncode == 3, ended.stderr
        parent, rest = ended.stdout.split(" ", 1)
        assert rest == f"['--one', '2'] more {tmp_path} said\\nTrue\\n"
        assert int(parent) == os.getppid()

    def test_a_program_is_not_forked_where_te_was_imported_under_other_variables(monkeypatch):
        from lab.nvidia_tests.host import _forked_by_host
        monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
        assert _forked_by_host(os.environ["PARITY_NVIDIA_TESTS_HOST"], ("program.py",)) is None

    def test_a_program_that_is_killed_ends_where_it_was_forked(tmp_path):
        import subprocess, sys
        (tmp_path / "program.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
        begun = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True)
        number = int(begun.stdout.readline())
        begun.kill()
        assert begun.stdout.read() == "" and begun.wait() == -9
        with pytest.raises(ProcessLookupError):
            while True:
                os.kill(number, 0)

    def test_fails():
        torch.testing.assert_close(torch.zeros(2), torch.ones(2))

    @pytest.mark.skipif(True, reason="needs another GPU")
    def test_is_skipped(): ...

    def test_hangs():
        time.sleep(1000)

    def test_eats():
        eaten = torch.ones(2**29)
        time.sleep(1000)

    def test_dies():
        os._exit(3)

    def test_comes_last(): ...
"""
BECOMES = {
    "test_passes": ("passed", ""),
    "test_a_program_is_forked_where_te_is_imported": ("passed", ""),
    "test_a_program_is_not_forked_where_te_was_imported_under_other_variables": ("passed", ""),
    "test_a_program_that_is_killed_ends_where_it_was_forked": ("passed", ""),
    "test_fp32_products_are_rounded_to_tf32_forward_and_backward": ("passed", ""),
    "test_scaled_products_are_those_of_te[dtype0]": ("passed", ""),
    "test_scaled_products_are_those_of_te[dtype1]": ("passed", ""),
    "test_layer_norms_add_their_gradients_in_fp32_by_blocks[dtype0]": ("passed", ""),
    "test_layer_norms_add_their_gradients_in_fp32_by_blocks[dtype1]": ("passed", ""),
    "test_attention_keeps_its_scores_in_fp32": ("passed", ""),
    "test_cross_entropy_adds_losses_in_fp32": ("passed", ""),
    "test_norms_are_added_by_blocks[dtype0]": ("passed", ""),
    "test_norms_are_added_by_blocks[dtype1]": ("passed", ""),
    "test_autocast_takes_fp32[dtype0]": ("passed", ""),
    "test_autocast_takes_fp32[dtype1]": ("passed", ""),
    "test_autocast_takes_fp32[None]": ("passed", ""),
    "test_memory_is_what_tensors_hold_that_are_not_pinned": ("passed", ""),
    "test_leaves_something_behind": ("passed", ""),
    "test_finds_nothing_left_behind": ("passed", ""),
    "test_fails": ("failed", "Tensor-likes are not close"),
    "test_is_skipped": ("skipped", "needs another GPU"),
    "test_hangs": ("beyond", "stood still for"),
    "test_eats": ("beyond", "GiB"),
    "test_dies": ("failed", "the process ended with code 3"),
    "test_comes_last": ("passed", ""),
}


@pytest.fixture
def small_checkout(tmp_path: Path) -> Path:
    root = tmp_path / "TE"
    files = {
        "qa/L0_pytorch_unittest/test.sh": SCRIPT,
        "tests/pytorch/test_one.py": ONE.replace("\n    ", "\n"),
        "tests/pytorch/folder/test_two.py": "def test_two(): ...",
        "tests/pytorch/test_forgotten.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_jobs_are_those_of_nvidias_scripts_with_their_variables_and_arguments(small_checkout: Path) -> None:
    jobs = checkout.jobs(small_checkout, Path("/installed"))
    assert [job.name for job in jobs] == ["test_one.py", "test_one.py (NVTE_ONE=2)", "folder/test_two.py"]
    assert jobs[0].variables == (("NVTE_FLASH_ATTN_V2", "1"), ("NVTE_ONE", "1"))
    assert jobs[2].arguments == ("--features=/installed/debug/features",)
    assert checkout.unnamed(small_checkout, jobs) == ["test_forgotten.py"]


@pytest.mark.parametrize(
    ("place", "said"), [(None, "set TE_TESTS to a checkout"), ("", "set TE_TESTS"), (".", "no folder")]
)
def test_a_missing_checkout_is_told(place: str | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        checkout.find(str(tmp_path) if place == "." else place)


def test_each_test_has_its_outcome_and_a_run_goes_on_where_it_stopped(small_checkout: Path, tmp_path: Path) -> None:
    folder, report_file = tmp_path / "kept", tmp_path / "report.md"

    def run(sample: int | None, **options: Any) -> list[dict[str, Any]]:
        limits = Limits(seconds=10, gibibytes=1.5)  # filling 2 GiB takes a slow machine seconds
        command.run(
            str(small_checkout), folder, report_file, ["hopper"], sample, 0, 1, limits, "^test_one.py$", {}, **options
        )
        lines = (folder / "outcomes.jsonl").read_text().splitlines()
        return [one for line in lines for one in json.loads(line)["result"]]

    outcomes = run(None)
    found = {one["test"].partition("::")[2]: (one["outcome"], one["why"]) for one in outcomes}
    assert found.keys() == BECOMES.keys()
    for name, (outcome, why) in BECOMES.items():
        assert found[name][0] == outcome, name
        assert why in found[name][1]
    assert sum(one["seconds"] for one in outcomes if one["outcome"] == "passed") > 0
    assert "| hopper | 25 | 0 | 25 | 20 | 2 | 1 | 2 | 90.9 % | 90.9 % |" in " ".join(report_file.read_text().split())
    assert [one["test"] for one in outcomes if one["after_others"]] == ["test_one.py::test_finds_nothing_left_behind"]
    assert "something was left behind" in report_file.read_text()
    assert run(None) == outcomes
    assert run(1, report_only=True) == outcomes
    assert "1 of the processes that run tests of a file are still to come" in report_file.read_text()
    sampled = run(1)[len(outcomes) :]
    assert sum(one["outcome"] != "skipped" for one in sampled) == 1


def test_a_sample_is_drawn_by_names_and_has_tests_of_each_file() -> None:
    tests = tuple(f"a::test[{index}]" for index in range(4000))
    files = {"a": tests, "b": ("b::one", "b::two", "b::three"), "c": ()}
    collected = [Collected(gpu, Job(file), names) for gpu in ("hopper", "blackwell") for file, names in files.items()]

    def drawn(sample: int | None, seed: int = 0) -> dict[tuple[str, str], Portion]:
        portions = measure.drawn(collected, {("b", "b::one"): "why"}, sample, seed, Limits())
        return {(portion.gpu, portion.job.file): portion for portion in portions}

    hundred = drawn(100)
    assert hundred.keys() == {(gpu, file) for gpu in ("hopper", "blackwell") for file in "ab"}
    assert sum(portion.wanted for portion in hundred.values()) == 100  # one of each file, and 48 more of each long file
    assert set(hundred["hopper", "b"].tests) == {"b::two", "b::three"}
    a = hundred["hopper", "a"]
    assert len(a.tests) > 10 * a.wanted
    assert a.tests == hundred["blackwell", "a"].tests
    assert a.tests[:100] == drawn(50)["hopper", "a"].tests[:100] != drawn(100, seed=1)["hopper", "a"].tests[:100]
    every = measure.drawn(collected, {}, None, 0, Limits())
    assert sum(portion.wanted for portion in every) == 2 * 4003


@pytest.mark.parametrize(
    ("sizes", "smaller"),
    [
        ((1, 2048, 2048, 4, 4), None),
        ((2, 8192, 8192, 128, 8), "batch 2, 512 x 512 tokens, 32 heads in 2 groups"),
        ((8, 2048, 4096, 6, 6), "batch 2, 1024 x 1024 tokens, 3 heads in 3 groups"),
    ],
)
def test_attention_that_would_take_too_long_is_made_smaller_and_keeps_its_kind(
    sizes: tuple[int, ...], smaller: str | None
) -> None:
    names = ("batch_size", "max_seqlen_q", "max_seqlen_kv", "num_heads", "num_gqa_groups")
    config = types.SimpleNamespace(**dict(zip(names, sizes, strict=True)), head_dim_qk=64, head_dim_v=64)
    done = plugin.shrink({"table": {"large": config}})
    assert plugin._scores(config) <= plugin.MOST_SCORES
    assert done.get("large", "").endswith(smaller or "")
    assert bool(done) == (smaller is not None)


@pytest.mark.parametrize(
    ("told", "runs"),
    [
        (["torchrun", "--nproc_per_node=2", "a.py", "-m"], "THIS LAUNCHER --nproc_per_node=2 CHILD a.py -m"),
        (["python", "-m", "torch.distributed.run", "a.py"], "python LAUNCHER CHILD a.py"),
        (["torchrun", "-m", "pytest", "a.py", "-k", "b"], "THIS LAUNCHER CHILD -m pytest a.py -k b"),
        (["python", "-u", "a.py"], "python -u CHILD a.py"),
        (["nvidia-smi"], "nvidia-smi"),
    ],
)
def test_processes_that_tests_start_run_on_the_cpu_kernels(told: list[str], runs: str) -> None:
    words = {
        "THIS": sys.executable,
        "LAUNCHER": "CHILD -m torch.distributed.run",
        "CHILD": "-m lab.nvidia_tests.host",
    }
    for word, meant in words.items():
        runs = runs.replace(word, meant)
    assert plugin.on_the_cpu(told) == runs.split()


def test_a_failure_without_a_row_is_not_explained() -> None:
    table = [{"tests": "^blackwell .*test_a", "said": "differ", "cause": "order of sums", "source": "x.cu:3"}]
    one = Outcome("blackwell", "f.py", "f.py::test_a", "failed", "they differ")
    assert command.cause_of(one, table) == "order of sums (x.cu:3)"
    for other in (
        Outcome("hopper", *("f.py", "f.py::test_a", "failed", "they differ")),
        Outcome("blackwell", "f", "test_a", "failed", "no"),
    ):
        assert command.cause_of(other, table) == "not explained"


def test_a_failure_on_a_real_gpu_as_well_is_told_so() -> None:
    said = "head\ntest_one.py::test_a[x y-1] FAILED [ 3%]\ntest_one.py::test_b PASSED [ 4%]\ntest_one.py::test_c "
    real = {"hopper": command.outcomes_on_gpu(said)}
    assert real["hopper"] == {"test_one.py::test_a[x y-1]": "failed", "test_one.py::test_b": "passed"}
    job = Job("test_one.py")
    names = ("test_one.py::test_a[x y-1]", "test_one.py::test_b")
    collected = [Collected(gpu, job, names) for gpu in ("hopper", "blackwell")]
    outcomes = [Outcome(gpu, job.name, name, "failed", "no") for gpu in ("hopper", "blackwell") for name in names]
    text = command.draw("", collected, {}, outcomes, [], Limits(), None, real=real)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "| hopper | test_one.py::test_a[x y-1] | it fails on a real Hopper as well |" in lines
    assert "| hopper | failed | passed | 1 |" in lines
    assert "| hopper | test_one.py::test_a | 1 |" in lines
    assert "| blackwell | test_one.py::test_a[x y-1] | not explained: no |" in lines
    without = command.draw("", collected, {}, outcomes, [], Limits(), None, real={})
    assert "so it says nothing about one" in without
    assert "ailures on a real GPU" not in without
