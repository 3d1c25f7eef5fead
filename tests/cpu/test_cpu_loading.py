"""Test how TE's Python and users' scripts are rewritten for the CPU, and which GPU TE believes it runs on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from emulated_gpu import emulated
from packaging.version import Version

from parity import te
from te_on_cpu import cuda, extension, versions
from te_on_cpu.enums import DType
from te_on_cpu.loading.loader import _StandIns, cached
from te_on_cpu.loading.words import cuda_means_cpu, normalize_devices
from te_on_cpu.versions import UnsupportedTEVersion

# How TE's Python and users' scripts are rewritten for the CPU, and for which versions of TE.


# By transformation: what is written and what is read in its place, or what stays.
READ: dict[Callable[[ast.Module], ast.AST], list[str | tuple[str, str]]] = {
    cuda_means_cpu: [
        ("f(device='cuda')", "f(device='cpu')"),
        ("x.device.type == 'cuda'", "x.device.type == 'cpu'"),
        ("torch.cuda.current_stream()", "__parity_cuda__.current_stream()"),
        ("torch.version.cuda", "__parity_cuda__.CUDA_VERSION"),
        ("torch.device('cuda', torch.cuda.current_device())", "torch.device('cpu')"),
        ("x.is_cuda", "x.is_cpu"),
        ("x.cuda()", "x.cpu()"),
        ("torch.ones(2, pin_memory=x)", "__parity_cuda__.pinned(torch.ones(2), x)"),
        ("from torch.cuda import _lazy_call", "from te_on_cpu.cuda import _lazy_call"),
        ("from torch.cuda.random import seed", "from te_on_cpu.cuda import seed"),
        ("import torch.cuda as c", "import te_on_cpu.cuda as c"),
        ("from torch import cuda, nn", "from torch import nn\nfrom te_on_cpu import cuda"),
        ("torch.distributed.barrier()", "__parity_distributed__.barrier()"),
        ("import torch.distributed as dist", "import te_on_cpu.distributed as dist"),
        ("from torch import distributed as dist", "from te_on_cpu import distributed as dist"),
        ("from torch.distributed import isend", "from te_on_cpu.distributed import isend"),
        *("x = 'cuda graphs'", "cuda = 1", "module.cuda", "x.cuda(device)", "torch.cudagraph", "torch.compile(f)"),
        *("import torch.cuda", "import torch.distributed", "from torch.distributed.fsdp import fully_shard"),
        *("from .distributed import isend", "from . import cuda"),
    ],
    normalize_devices: [
        ("x.to('cuda:0')", "x.to('cuda')"),
        ("x.to(f'cuda:{rank}')", "x.to('cuda')"),
        ("x.cuda(rank, non_blocking=True)", "x.cuda()"),
        ("torch.device('cuda:1')", "torch.device('cuda')"),
        ("torch.device('cuda', rank)", "torch.device('cuda')"),
        ("x.to(rank, copy=True)", "x.to(__parity_cuda__.placed(rank), copy=True)"),
        ("f(device='cuda:' + rank)", "f(device=__parity_cuda__.placed('cuda:' + rank))"),
        ("x.pin_memory()", "__parity_cuda__.pinned(x)"),
        ("x.record_stream(s)", "__parity_cuda__.record_stream(x, s)"),
        ("DDP(model, device_ids=[0], output_device=0)", "DDP(model)"),
        ("x.type() == 'torch.cuda.HalfTensor'", "x.type() == 'torch.HalfTensor'"),
        *("x = 'cuda: out of memory'", "print(f'cuda:{rank} is ready')", "torch.cuda(1)"),
    ],
    _StandIns().visit: [
        ("torch.compile(f)", "__parity_compile__(f)"),
        ("torch.baddbmm(s, q, k, beta=0.0)", "__parity_baddbmm__(s, q, k, beta=0.0)"),
        ("torch.bmm(p, v)", "__parity_bmm__(p, v)"),
        ("import triton.language as tl", "import te_on_cpu.loading.triton as tl"),
        ("from triton import jit", "from te_on_cpu.loading.triton import jit"),
        ("from importlib.metadata import version as v", "from te_on_cpu.loading.stand_ins import version as v"),
        "from .triton import permutation",  # of TE's own package
    ],
}


@pytest.mark.parametrize(
    ("transform", "written", "read"),
    [(of, *((row, row) if isinstance(row, str) else row)) for of, rows in READ.items() for row in rows],
)
def test_sources_are_read_as_meant_for_one_cpu_and_other_words_stay(transform, written, read):
    assert ast.unparse(transform(ast.parse(written))) == read


@pytest.mark.parametrize(
    ("place", "meant"),
    [
        (1, torch.device("cpu")),
        ("cuda:1", "cpu"),
        (torch.device("cuda", 1), torch.device("cpu")),
        *((other, other) for other in ("meta", torch.device("meta"), torch.float16, None, True)),
    ],
)
def test_a_place_is_the_cpu_if_it_is_a_gpu(place, meant):
    assert cuda.placed(place) == meant


TE = te.kernels("cpu").te
SOURCE = b"answer = 42"


def code_of(source, path="module.py", calls=None):
    """Return the compiled source, and note in ``calls`` if that takes a compiler's call."""

    def compile_source():
        if calls is not None:
            calls.append(source)
        return compile(source, "module.py", "exec")

    return cached(source, path, compile_source)


def value(code):
    namespace = {}
    exec(code, namespace)
    return namespace["answer"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "parity" / "transformer_engine"


@pytest.mark.usefixtures("folder")
def test_a_source_is_compiled_once():
    calls = []
    assert [value(code_of(SOURCE, calls=calls)) for _ in range(2)] == [42, 42]
    assert calls == [SOURCE]


def test_a_changed_source_is_compiled_again_and_takes_the_place_of_the_other(folder):
    code_of(SOURCE)
    changed = b"answer = 43"
    assert value(code_of(changed)) == 43
    assert len(list(folder.iterdir())) == 1


def test_the_same_source_at_another_path_is_another_entry(folder):
    for path in ("one.py", "two.py"):
        code_of(SOURCE, path)
    assert len(list(folder.iterdir())) == 2


def test_a_broken_entry_is_replaced(folder):
    code_of(SOURCE)
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-5])
    assert value(code_of(SOURCE)) == 42


def test_nothing_is_written_where_python_is_to_write_no_bytecode(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert value(code_of(SOURCE)) == 42
    assert not folder.exists()


@pytest.mark.usefixtures("folder")
def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert value(code_of(SOURCE)) == 42


IS_NEWEST = versions.installed_version().release[:2] >= versions.NEWEST.release
BESIDE_OTHERS = """
import torch
from importlib.metadata import version; print(version("flash-attn"))
from parity import te; print(te.kernels("cpu").te.Linear(32, 16)(torch.ones(8, 32)).shape)
from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils
print(FlashAttentionUtils.is_installed)
"""


@pytest.fixture(scope="module")
def beside_others(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Load TE on an Ada with FlashAttention installed; the newest TE claims to be a later version."""
    folder = tmp_path_factory.mktemp("installed")
    for name, version in [("flash-attn", "2.8.3"), *[("transformer_engine", "2.99.0")] * IS_NEWEST]:
        installed = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = os.pathsep.join(filter(None, [str(folder), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": path, "PARITY_EMULATED_GPU": "ada"}
    command = [sys.executable, "-c", BESIDE_OTHERS]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200)


def test_a_flash_attention_that_is_installed_is_not_called_with_tensors_on_the_cpu(beside_others):
    version, _, is_installed = beside_others.stdout.splitlines()
    assert (version, is_installed) == ("2.8.3", "False")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Return a function that pretends that a version of TransformerEngine is installed, or none."""

    def pretend(version: str | None) -> None:
        def answer(name: str) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", answer)

    return pretend


def test_a_version_that_is_too_old_is_refused_by_name(installed) -> None:
    installed("2.13.4")
    with pytest.raises(UnsupportedTEVersion, match=r"2\.13\.4 is older than 2\.14"):
        versions.installed_version()


def test_without_transformer_engine_the_error_says_how_to_install_it(installed) -> None:
    installed(None)
    with pytest.raises(UnsupportedTEVersion, match="pip install transformer-engine"):
        versions.installed_version()


@pytest.mark.parametrize("version", ["2.14", "2.14.1", "2.16.1", "2.18.0", "2.19.0", "2.20.2", "2.20.7+cu13"])
def test_versions_that_were_tried_are_taken_without_a_word(installed, version: str) -> None:
    installed(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions.installed_version() == Version(version)


def test_a_newer_version_is_warned_of_once(installed) -> None:
    installed("2.98.0")
    with pytest.warns(UserWarning, match=r"2\.98\.0 is newer than 2\.20"):
        versions.installed_version()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions.installed_version() == Version("2.98.0")


@pytest.mark.skipif(not IS_NEWEST, reason="only the newest TransformerEngine can pass for a later one")
def test_a_newer_version_is_tried(beside_others) -> None:
    assert "torch.Size([8, 16])" in beside_others.stdout
    assert beside_others.stderr.count("2.99.0 is newer than") == 1


def test_before_2_16_the_fused_attention_for_short_sequences_has_a_name() -> None:
    name = "NVTE_F16_max512_seqlen"
    assert hasattr(extension.build(Version("2.14.1")).NVTE_Fused_Attn_Backend, name)
    assert not hasattr(extension.build(Version("2.16.1")).NVTE_Fused_Attn_Backend, name)


def test_adapting_to_an_old_version_leaves_the_kernels_of_new_ones_as_they_are() -> None:
    def public_names(version: str) -> dict[str, object]:
        return {name: value for name, value in vars(extension.build(Version(version))).items() if name[0] != "_"}

    before = public_names("2.20.2")
    extension.build(Version("2.14.1"))
    assert {**public_names("2.20.2"), "version": None} == {**before, "version": None}


TRAIN = """
    import argparse
    import sys

    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    from blocks.mlp import Block

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    rank = 0
    torch.cuda.set_device(rank)
    torch.cuda.manual_seed_all(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else None
    model = torch.nn.Sequential(Block(32), te.Linear(32, 16)).cuda(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(64, 32, device=device), torch.randn(64, 16).to(f"cuda:{rank}")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    losses = []
    for _ in range(parser.parse_args().steps):
        optimizer.zero_grad()
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ended.record()
    torch.cuda.synchronize()
    assert began.elapsed_time(ended) > 0
    assert x.is_cuda
    if __name__ == "__main__":
        print("losses", *losses)
        sys.exit(7)
"""
BLOCK = """
    import torch
    import transformer_engine.pytorch as te

    class Block(torch.nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.mlp = te.LayerNormMLP(hidden, 2 * hidden, device="cuda")

        def forward(self, x):
            return x + self.mlp(x)
"""


OF_PARITY = ("parity", "exec")
BOTH = pytest.mark.parametrize("command", [OF_PARITY, ("te_on_cpu",)], ids=" ".join)


def execute(folder: Path, *arguments: str, command: tuple[str, ...] = OF_PARITY) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return forked.run("-m", *command, *arguments, folder=folder, environment=environment)


@pytest.fixture
def write(tmp_path: Path):
    def to_file(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))

    return to_file


def test_a_training_script_for_a_gpu_trains_and_ends_with_its_own_exit_code(write, tmp_path: Path) -> None:
    write("scripts/train.py", TRAIN)
    (tmp_path / "scripts/blocks").mkdir()
    write("scripts/blocks/mlp.py", BLOCK)
    ran = execute(tmp_path, "scripts/train.py", "--steps", "5")
    assert ran.returncode == 7, ran.stderr
    losses = [float(word) for word in ran.stdout.split()[1:]]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_an_installed_package_that_means_a_gpu_computes_on_the_cpu(write, tmp_path: Path) -> None:
    (tmp_path / "site-packages/trainer").mkdir(parents=True)
    write("site-packages/trainer/__init__.py", "import torch\n\ndef make():\n    return torch.ones(2, device='cuda:1')")
    write("script.py", "import sys; sys.path.append('site-packages')\nfrom trainer import make\nprint(make().device)")
    for _ in ("compiled", "from the cache"):
        ran = execute(tmp_path, "script.py")
        assert (ran.stdout, ran.returncode) == ("cpu\n", 0), ran.stderr


@BOTH
def test_arguments_that_look_like_parity_s_own_are_the_script_s(
    write, tmp_path: Path, command: tuple[str, ...]
) -> None:
    write("show.py", "import sys; print(sys.argv)")
    ran = execute(tmp_path, "show.py", "--help", "-x", "1", command=command)
    assert ran.stdout.strip() == "['show.py', '--help', '-x', '1']"


def frames(traceback: str) -> list[str]:
    """Return the files and lines of a traceback, such as ``fails.py:3``."""
    return [f"{Path(file).name}:{line}" for file, line in re.findall(r'File "(.*)", line (\d+)', traceback)]


CAUSED = "try:\n    import not_there\nexcept ImportError as error:\n    raise ValueError(1) from error"
# Scripts that fail, what they import, the frames that are shown, and the last line.
FAILING = [
    ("x = 1\n\nraise ValueError('mine')", "", ["fails.py:3"], "ValueError: mine"),
    ("import broken", CAUSED, ["broken.py:2", "fails.py:1", "broken.py:4"], "ValueError: 1"),
    ("import broken", "x = = 1", ["fails.py:1", "broken.py:1"], "SyntaxError: invalid syntax"),
]


@pytest.mark.parametrize(("script", "module", "shown", "last"), FAILING)
def test_an_exception_shows_the_script_s_own_lines_and_causes_and_no_others(
    write, tmp_path: Path, script: str, module: str, shown: list[str], last: str
) -> None:
    write("fails.py", script)
    write("broken.py", module)
    ran = execute(tmp_path, "fails.py")
    assert (ran.returncode, frames(ran.stderr)) == (1, shown)
    assert ran.stderr.strip().endswith(last)


def test_a_hook_that_the_script_sets_for_exceptions_is_called(write, tmp_path: Path) -> None:
    write("fails.py", "import sys\nsys.excepthook = lambda *raised: print('seen', raised[1])\nraise ValueError('mine')")
    ran = execute(tmp_path, "fails.py")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "seen mine\n", "")


@BOTH
def test_a_script_that_is_not_there_is_named(tmp_path: Path, command: tuple[str, ...]) -> None:
    ran = execute(tmp_path, "nothing.py", command=command)
    assert ran.returncode == 2
    assert ran.stderr == f"{command[0]}: there is no script nothing.py\n"


@BOTH
def test_a_gpu_that_cannot_be_emulated_is_named_without_a_traceback(write, tmp_path: Path, command) -> None:
    write("port.py", "import transformer_engine.pytorch")
    environment = {**os.environ, "PARITY_EMULATED_GPU": "volta"}  # read once by a process, so this one must be new
    asked = [sys.executable, "-m", *command, "port.py"]
    ran = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"{command[0]}: PARITY_EMULATED_GPU='volta' is not a GPU that can be emulated")


def test_a_module_runs_as_python_s_own_option_runs_it(write, tmp_path: Path) -> None:
    write("port.py", "import sys, torch; print(torch.ones(2, device='cuda').device, sys.argv[1:])")
    for command in (OF_PARITY, ("te_on_cpu",)):
        assert execute(tmp_path, "-m", "port", "-m", command=command).stdout == "cpu ['-m']\n"


def test_without_a_script_the_usage_is_told(tmp_path: Path) -> None:
    ran = execute(tmp_path, command=("te_on_cpu",))
    assert ran.returncode == 2
    assert ran.stdout.startswith("usage: python -m te_on_cpu [-m] SCRIPT")


# The GPU that TE believes it runs on, and what TE says is available there.


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    cuda.environment_gpu.cache_clear()
    yield
    cuda.environment_gpu.cache_clear()


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize(
    ("name", "capability"), [("ada", (8, 9)), ("hopper", (9, 0)), ("Blackwell", (10, 0)), (None, (9, 0))]
)
def test_the_environment_names_the_gpu_once_and_it_is_a_hopper_unless_named(
    name: str | None, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARITY_EMULATED_GPU", raising=False)
    if name is not None:
        monkeypatch.setenv("PARITY_EMULATED_GPU", name)
    assert (name or "hopper").lower() in cuda.get_device_name().lower()
    for _ in ("named", "named otherwise"):
        properties = cuda.get_device_properties()
        assert cuda.get_device_capability() == (properties.major, properties.minor) == capability
        monkeypatch.setenv("PARITY_EMULATED_GPU", "ada")


@pytest.mark.usefixtures("fresh_choice")
def test_an_unknown_gpu_is_refused_with_the_known_ones_when_te_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_EMULATED_GPU", "volta")
    with pytest.raises(ValueError, match=r"PARITY_EMULATED_GPU='volta'.*ada, hopper, blackwell"):
        extension.build(Version(te.version()))


@pytest.fixture
def fresh_versions() -> Iterator[None]:
    for version in (cuda.cublaslt_version, cuda.cudnn_version):
        version.cache_clear()
    yield
    for version in (cuda.cublaslt_version, cuda.cudnn_version):
        version.cache_clear()


@pytest.mark.usefixtures("fresh_versions")
@pytest.mark.parametrize(
    ("library", "value", "version"),
    [
        ("cublasLt", None, 130200),
        ("cublasLt", "130600", 130600),
        ("cudnn", None, 91500),
        ("cudnn", "92100", 92100),
    ],
)
def test_the_environment_sets_the_versions_of_libraries(
    library: str, value: str | None, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(f"PARITY_EMULATED_{library.upper()}", raising=False)
    if value is not None:
        monkeypatch.setenv(f"PARITY_EMULATED_{library.upper()}", value)
    assert getattr(extension.build(Version(te.version())), f"get_{library}_version")() == version


@pytest.mark.usefixtures("fresh_versions")
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CUBLASLT", "13.6", r"'13\.6' is not a version of cuBLASLt; write 130600 for 13\.6\.0"),
        ("CUDNN", "9.21", r"'9\.21' is not a version of cuDNN 9; write 92100 for 9\.21\.0"),
    ],
)
def test_what_is_no_version_is_refused_when_te_is_loaded(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PARITY_EMULATED_{variable}", value)
    with pytest.raises(ValueError, match=message):
        extension.build(Version(te.version()))


AVAILABLE = {
    "is_fp8_available": {*cuda.GPUS.values()},
    "is_fp8_block_scaling_available": {*cuda.GPUS.values()} - {cuda.ADA},
    "is_mxfp8_available": {cuda.BLACKWELL},
    "is_nvfp4_available": {cuda.BLACKWELL, cuda.RTX_BLACKWELL},
}


@pytest.mark.parametrize("question", AVAILABLE)
@pytest.mark.parametrize("gpu", cuda.GPUS.values(), ids=cuda.GPUS)
def test_te_offers_what_the_gpu_has(question: str, gpu: cuda.DeviceProperties) -> None:
    with emulated(gpu):
        assert getattr(TE, question)() == (gpu in AVAILABLE[question])


def test_te_refuses_a_recipe_that_the_gpu_lacks() -> None:
    from transformer_engine.common.recipe import MXFP8BlockScaling

    with emulated(cuda.HOPPER):
        module = TE.Linear(32, 32, device="cpu", params_dtype=torch.bfloat16)
        with (
            pytest.raises((RuntimeError, AssertionError), match=r"compute capability 10\.0 or higher"),
            TE.autocast(enabled=True, recipe=MXFP8BlockScaling()),
        ):
            module(torch.ones(32, 32, dtype=torch.bfloat16))


def float8_tensor(**usages: bool) -> Any:
    quantizer = TE.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3, **usages)
    return quantizer(torch.arange(32.0).view(2, 16))


def test_a_hopper_keeps_a_transpose_of_per_tensor_fp8_and_a_blackwell_does_not() -> None:
    with emulated(cuda.HOPPER):
        tensor = float8_tensor(rowwise=True, columnwise=True)
        assert torch.equal(tensor._transpose, tensor._data.t())
    with emulated(cuda.BLACKWELL):
        tensor = float8_tensor(rowwise=True, columnwise=True)
        assert tensor._transpose is None
        tensor = float8_tensor(rowwise=False, columnwise=True)
        assert tensor._data is not None


@pytest.mark.parametrize("recipe_name", ["DelayedScaling", "Float8CurrentScaling"])
def test_per_tensor_fp8_is_the_same_on_a_hopper_and_on_a_blackwell(recipe_name: str) -> None:
    from transformer_engine.common import recipe

    results = []
    for gpu in (cuda.HOPPER, cuda.BLACKWELL):
        with emulated(gpu):
            torch.manual_seed(0)
            module = TE.LayerNormMLP(64, 128, device="cpu", params_dtype=torch.bfloat16)
            x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
            with TE.autocast(enabled=True, recipe=getattr(recipe, recipe_name)()):
                y = module(x)
            y.backward(torch.randn_like(y))
            results.append([y, x.grad, *(parameter.grad for parameter in module.parameters())])
    assert all(torch.equal(hopper, blackwell) for hopper, blackwell in zip(*results, strict=True))
