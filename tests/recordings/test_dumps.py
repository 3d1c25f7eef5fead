"""What other tools dump of a training is read: TE's DumpTensors is judged layer by layer, SGLang's dumper is compared.

TE's own ``DumpTensors`` writes the dumps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import parity
from parity import te
from parity.cli import app
from parity.recordings.dumps import find_files, judge_files
from parity.stages.judge import is_flagged
from tests.recordings import pairs

KERNELS = te.kernels("cpu")
CPU = torch.device("cpu")
GEMMS = 11  # of four layers; LayerNormMLP does not show the gradient between its two
TENSORS = ("activation", "gradient", "weight", "output", "wgrad", "dgrad")
ASKED = dict(high_precision_tensor=True, quantized_tensor=True)


@contextmanager
def inspecting(path: Path, asked: dict[str, bool]) -> Iterator[Callable[[], None]]:
    """Let TE's modules hand every tensor to ``DumpTensors``; yields what ends a step."""
    debug_api = pytest.importorskip("nvdlfw_inspect.api", reason="TE's DumpTensors needs nvdlfw_inspect")
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    dumped = [{"tensor": name, "freq": 1, **asked} for name in TENSORS]
    features = {"DumpTensors": {"enabled": True, "tensors_struct": dumped}}
    config = {"all": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": features}}
    TEDebugState._reset()
    folder = str(Path(KERNELS.te.__file__).parents[1] / "debug" / "features")
    debug_api.initialize(config_file=config, feature_dirs=[folder], log_dir=str(path))
    try:
        yield debug_api.step
    finally:
        debug_api.end_debug()
        TEDebugState._reset()


def dump(path: Path, recipe: str = "", steps: int = 1, scale: float = 1.0, **asked: bool) -> Path:
    """Run some steps of TE's modules and return the folder that TE has dumped to."""
    with inspecting(path, asked or ASKED) as end_step:
        torch.manual_seed(1)
        modules = [
            KERNELS.te.Linear(64, 96, name="first.fc"),
            KERNELS.te.LayerNormLinear(96, 64, bias=False, name="second"),
            KERNELS.te.LayerNormMLP(64, 128, name="third"),
        ]
        import transformer_engine.common.recipe as recipes

        for _ in range(steps):
            x = torch.randn(4, 16, 64, dtype=torch.bfloat16, requires_grad=True)
            with KERNELS.te.autocast(enabled=True, recipe=getattr(recipes, recipe)()) if recipe else nullcontext():
                for module in modules:
                    x = module.to(torch.bfloat16)(x)
                    x = scale * x if module is modules[1] else x
            (1e-6 * x.float().square().sum()).backward()  # too small for FP8 without a scale
            end_step()
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(tmp_path_factory.mktemp("quantized"), "Float8CurrentScaling")


def copied(path: Path, to: Path) -> Path:
    for file in path.rglob("*.pt"):
        target = to / file.relative_to(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return to


def edit(path: Path, name: str, change: Callable[[dict[str, Tensor]], Any]) -> None:
    (file,) = path.rglob(f"{name}.pt")
    held = torch.load(file, weights_only=True)
    torch.save(change(held), file)


def flagged(path: Path, precision: str = "") -> list[str]:
    judged, _ = judge_files(find_files(path), CPU, precision)
    return [f"{one.stage.watched} of {one.stage.end[0].split()[0]}" for one in judged if is_flagged(one)]


@pytest.mark.parametrize(
    ("recipe", "precision", "quantized"),
    [("", "bf16", 0), ("Float8CurrentScaling", "fp8_current", 24), ("Float8BlockScaling", "fp8_block", 24)],
)
def test_right_layers_are_right(recipe: str, precision: str, quantized: int, tmp_path: Path):
    judged, left = judge_files(find_files(dump(tmp_path, recipe)), CPU)
    assert {one.stage.end[0].split(" at ")[1] for one in judged} == {precision}
    assert len(judged) == GEMMS + quantized
    assert not left
    assert flagged(tmp_path) == []


@pytest.mark.parametrize("asked", [dict(high_precision_tensor=True), dict(quantized_tensor=True)])
def test_one_kind_of_tensor_is_enough_for_the_gemms(asked: dict[str, bool], tmp_path: Path):
    dump(tmp_path, "Float8CurrentScaling", **{"high_precision_tensor": False, "quantized_tensor": False, **asked})
    if "high_precision_tensor" in asked:
        assert flagged(tmp_path, "fp8_current") == []
        assert len(flagged(tmp_path, "bf16")) == GEMMS  # nothing in it says that a recipe was used
    else:  # results of GEMMs are not quantized, and so not in it
        with pytest.raises(parity.UserError, match="nothing of this dump can be judged"):
            flagged(tmp_path)


def test_a_scale_of_delayed_scaling_that_does_not_fit_yet_is_told(tmp_path: Path):
    assert "quantized gradient for dgrad of third_fc2" in flagged(dump(tmp_path, "DelayedScaling"))


WRONG: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any]]] = {
    "output of second": ("second_output", lambda held: {"high_precision": held["high_precision"] * 1.02}),
    "wgrad of third_fc1": ("third_fc1_wgrad", lambda held: {"high_precision": held["high_precision"].roll(1, 0)}),
    "dgrad of first_fc": ("first_fc_dgrad", lambda held: {"high_precision": torch.zeros_like(held["high_precision"])}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_of_a_gemm_is_told(wrong: str, quantized: Path, tmp_path: Path):
    name, change = WRONG[wrong]
    edit(copied(quantized, tmp_path), name, change)
    assert flagged(tmp_path) == [wrong]


def test_a_quantized_tensor_of_other_values_is_told(quantized: Path, tmp_path: Path):
    edit(
        copied(quantized, tmp_path),
        "second_weight",
        lambda held: {**held, "high_precision": held["high_precision"] * 1.1},
    )
    assert flagged(tmp_path) == ["quantized weight for output of second", "quantized weight for dgrad of second"]


def test_a_result_that_was_gathered_over_ranks_is_left_out(plain: Path, tmp_path: Path):
    edit(
        copied(plain, tmp_path),
        "second_output",
        lambda held: {"high_precision": held["high_precision"].repeat(2, 1, 1)},
    )
    judged, left = judge_files(find_files(tmp_path), CPU)
    assert len(judged) == GEMMS - 1
    assert "ranks may have gathered a sequence" in left[0]


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-200]), "is damaged, or holds more than"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged, or holds more than"),
    "another tensor": (lambda path: path.rename(path.with_name("second_bias.pt")), "is no file that TE"),
    "other content": (lambda path: torch.save({"tensor": torch.ones(3)}, path), "does not hold what TE"),
    "another dtype": (
        lambda path: torch.save(
            {"high_precision": torch.ones(3, 3, dtype=torch.float64)}, path.with_name("x_output.pt")
        ),
        "holds tensors of torch.float64: name the precision",
    ),
    "code": (lambda path: torch.save({"quantized": Path("x")}, path), "holds more than tensors and numbers"),
    "nothing": (lambda path: [one.unlink() for one in path.parent.iterdir()], "nothing of this dump can be judged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_dump_is_an_error_that_says_what_is_wrong(fault: str, plain: Path, tmp_path: Path):
    damage, told = FAULTS[fault]
    (path,) = copied(plain, tmp_path).rglob("second_output.pt")
    damage(path)
    with pytest.raises(parity.UserError, match=told):
        flagged(tmp_path)


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--backend", "cpu"])
    return done.exit_code, done.output + str(done.exception or "")


def test_parity_judge_needs_no_reference_for_it(quantized: Path, tmp_path: Path):
    code, told = run("judge", quantized, "--reference", f"{pairs.__file__}::model")
    assert code == 0, told
    assert "35 of 35 GEMMs and quantized tensors are as right as" in told
    assert "so that no reference can compute the same" in told
    edit(copied(quantized, tmp_path), *WRONG["output of second"])
    code, told = run("judge", tmp_path)
    assert code == 1, told
    assert "✗ the output of second in step 0 on rank 0 at fp8_current: the error is 0.02" in told
    code, told = run("judge", tmp_path, "--step", 3)
    assert "nothing of this dump can be judged" in told


def test_parity_bisect_names_the_first_tensor_that_differs(plain: Path, tmp_path: Path):
    dump(tmp_path, scale=1.5)
    code, told = run("bisect", plain, plain)
    assert code == 0, told
    assert "the dumps: equal to the bit" in told
    code, told = run("bisect", plain, tmp_path)
    assert code == 0, told
    assert "forward: first differs the dumped high_precision activation third_fc1 in step 0 on rank 0" in told
    assert "backward: first differs the dumped high_precision gradient third_fc2" in told
    next(tmp_path.rglob("third_fc2_output.pt")).unlink()
    code, told = run("bisect", plain, tmp_path)
    assert "only one of them has output third_fc2 in step 0" in told
    code, told = run("bisect", plain, tmp_path.parent)
    assert code == 1, told


# SGLang's dumper.


def save_as_sglang(path: Path, tensors: dict[str, Any]) -> Path:
    """Write tensors as ``_dump_single`` in ``python/sglang/srt/debug_utils/dumper.py`` (00d3554) does."""
    path.mkdir(exist_ok=True)
    for order, (name, value) in enumerate(tensors.items(), 1):
        tags = dict(step=0, rank=0, dump_index=order, name=name, recompute_status="disabled", layer_id=order % 2)
        held = {"value": value, "meta": {**tags, "world_rank": 0, "world_size": 1}}
        torch.save(held, path / ("___".join(f"{key}={one}" for key, one in tags.items()) + ".pt"))
    return path


def test_sglang_dumps_are_compared_and_not_judged(tmp_path: Path):
    tensors = {f"layer__{name}": torch.randn(8, 16, dtype=torch.bfloat16) for name in "abcdefghijkl"}
    tensors |= {"grad__x": torch.randn(8), "input_ids": torch.arange(8), "count": 3}
    one = save_as_sglang(tmp_path / "one", tensors)
    changed = {name: 1.01 * x if name in ("layer__c", "layer__k") else x for name, x in tensors.items()}
    other = save_as_sglang(
        tmp_path / "other", {**changed, "grad__x": tensors["grad__x"] + 1, "input_ids": torch.ones(8)}
    )
    code, told = run("bisect", one, one)
    assert "the dumps: equal to the bit" in told
    code, told = run("bisect", one, other)
    assert code == 0, told
    assert "forward: first differs the dumped value named layer__c, recompute_status=disabled, layer_id=1" in told
    assert "backward: first differs the dumped value named grad__x" in told
    code, told = run("bisect", one, save_as_sglang(tmp_path / "wide", {"layer__a": torch.ones(8, 17)}))
    assert code == 1
    assert "compare runs of the same model" in told
    code, told = run("judge", one)
    assert code == 1
    assert "does not say what a tensor was computed from" in told
    next(one.iterdir()).rename(one / "x___y.pt")
    code, told = run("bisect", one, other)
    assert "is no file that SGLang's dumper writes" in told
