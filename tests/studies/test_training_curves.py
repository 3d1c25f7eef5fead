"""The study ``training_curves`` at small sizes: a faithful port follows the plain model, a wrong one does not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
from lab.studies import catalogue
from lab.studies.training import ARCHITECTURES, Schedule, Size, batches, plain_pass, train
from lab.studies.training_curves import study as study
from lab.studies.training_curves.study import Run, Settings, outcomes
from parity.case.weight_map import WeightMap, stack
from parity.measuring import record
from parity.te import Kernels
from parity.user_error import UserError

SMALL = Settings(
    models=("llama",), precisions=("bf16", "fp8_current", "fp8_delayed"), steps=8, draws=6, batch=2, seq=32,
    hidden=64, layers=1, heads=2, groups=1, warmup=4, final=3,
)  # fmt: skip
Losses = dict[Run, dict[str, Any] | None]


def _result(run: Run, kernels: Kernels) -> dict[str, Any]:
    return {"losses": study.losses_of(run, SMALL, kernels), "gpu": "emulated"}


KEY, VALUE = "layers.0.attention.k_proj.weight", "layers.0.attention.v_proj.weight"
GATE, UP = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"


def keys_and_values_exchanged(weight_map: dict[Any, Any]) -> WeightMap:
    return weight_map | {KEY: weight_map[VALUE], VALUE: weight_map[KEY]}


def gate_and_up_exchanged(weight_map: dict[Any, Any]) -> WeightMap:
    fused = weight_map.pop(stack(GATE, UP))
    return weight_map | {stack(UP, GATE): fused}


def margins_with(
    mistake: Callable[[dict[Any, Any]], WeightMap], found: Losses, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Return the margins of the small study if TE's model is ported with a mistake."""
    faithful = ARCHITECTURES["llama"]
    mistaken = dataclasses.replace(faithful, weight_map=lambda size: mistake(dict(faithful.weight_map(size))))
    runs = [Run("llama", "te", precision) for precision in SMALL.precisions]
    with monkeypatch.context() as patch:
        patch.setitem(ARCHITECTURES, "llama", mistaken)
        return [outcome.margin for outcome in outcomes(SMALL, found | {run: _result(run, kernels) for run in runs})]


def test_te_follows_the_plain_model_within_the_expectation_and_wrong_ports_do_not(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Losses = {run: _result(run, kernels) for run in study._runs(SMALL)}
    by_precision = {outcome.run.precision: outcome for outcome in outcomes(SMALL, found)}
    assert set(by_precision) == set(SMALL.precisions)
    for outcome in by_precision.values():
        assert outcome.margin <= 1
        assert outcome.final_margin <= 1
        assert outcome.te != outcome.plain
        assert outcome.plain[-1] < outcome.plain[0] - 0.5  # it learns
    widths = {
        name: sum(high - low for low, high in zip(outcome.band.low, outcome.band.high, strict=True))
        for name, outcome in by_precision.items()
    }
    assert widths["fp8_current"] > 1.5 * widths["bf16"]

    twice = Run("llama", "te", "fp8_delayed")
    assert _result(twice, kernels) == found[twice]

    assert min(margins_with(keys_and_values_exchanged, found, kernels, monkeypatch)) > 1
    # The rounding of FP8 hides exchanged gate and up.
    bf16, *fp8 = margins_with(gate_and_up_exchanged, found, kernels, monkeypatch)
    assert bf16 > 1
    assert max(fp8) <= 1


def constant_gradient(module: torch.nn.Module, tokens: torch.Tensor) -> float:
    assert isinstance(module, torch.nn.Linear)
    module.weight.grad = torch.ones_like(module.weight)
    return module.weight.item()


def test_masters_keep_steps_that_bf16_parameters_would_lose() -> None:
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    model.weight.data.fill_(1.0)
    seen = train(model, Schedule(5e-4, 1), [torch.zeros(1)] * 9, constant_gradient, torch.bfloat16)
    assert seen[:4] == [1.0] * 4  # three steps of 0.0005 are less than half an ulp below 1, which is 0.002
    assert seen[-1] < 1.0


def test_the_learning_rate_grows_linearly_during_warmup() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    seen = train(model, Schedule(0.4, 4), [torch.zeros(1)] * 6, constant_gradient, torch.float32)
    steps = [before - after for before, after in itertools.pairwise(seen)]
    assert steps == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4], rel=1e-2)


def test_a_study_trains_only_what_its_record_lacks(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = dataclasses.replace(SMALL, precisions=("bf16",), steps=3, draws=2, final=1)
    report = catalogue.run("training_curves", tiny, tmp_path).read_text()
    assert "1 of 1 runs follow" in report or "0 of 1 runs follow" in report
    assert (tmp_path / "training_curves_llama.png").stat().st_size > 0
    trained: list[Run] = []
    faithful = study.losses_of

    def noted(run: Run, settings: Settings, kernels: Kernels) -> list[float]:
        trained.append(run)
        return faithful(run, settings, kernels)

    monkeypatch.setattr(study, "losses_of", noted)
    study.results(dataclasses.replace(tiny, draws=3), tmp_path, kernels)
    assert trained == [Run("llama", "rounded", "bf16", 3)]
    assert catalogue.run("training_curves", tiny, tmp_path).read_text() == report


def test_a_run_on_other_data_is_not_taken_for_a_recorded_one(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = dataclasses.replace(SMALL, precisions=("bf16",), steps=2, draws=2, final=1)
    study.results(tiny, tmp_path, kernels)
    runs = len(record.read(tmp_path / study.RECORD))
    monkeypatch.setattr(study, "batches", lambda seed, *sizes: batches(seed + 100, *sizes))
    study._fingerprint.cache_clear()
    study.results(tiny, tmp_path, kernels)
    study._fingerprint.cache_clear()
    assert len(record.read(tmp_path / study.RECORD)) == 2 * runs


def test_recipes_that_differ_in_when_they_scale_share_their_expectation() -> None:
    runs = list(study._runs(SMALL))
    assert {run.precision for run in runs if run.kind == "te"} == set(SMALL.precisions)
    assert {run.precision for run in runs if run.kind == "rounded"} == {"bf16", "fp8_delayed"}


def test_a_precision_that_the_emulated_gpu_lacks_is_reported_with_te_s_reason(tmp_path: Path) -> None:
    tiny = dataclasses.replace(SMALL, precisions=("bf16", "mxfp8"), steps=2, draws=2, final=1)
    report = catalogue.run("training_curves", tiny, tmp_path).read_text()
    assert "`mxfp8` did not run: Device compute capability 10.0 or higher" in report


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (dataclasses.replace(SMALL, models=("bert",)), "models"),
        (dataclasses.replace(SMALL, precisions=("bert",)), "precisions"),
    ],
)
def test_names_that_there_are_not_are_told(tmp_path: Path, settings: Settings, field: str) -> None:
    with pytest.raises(UserError, match=f"{field}: unknown name 'bert'"):
        catalogue.run("training_curves", settings, tmp_path)


def test_one_draw_is_too_few_for_a_spread(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 2 to estimate a spread, not 1"):
        catalogue.run("training_curves", dataclasses.replace(SMALL, draws=1), tmp_path)


def test_a_plain_pass_leaves_the_gradients_of_the_mean_cross_entropy() -> None:
    size = Size(256, 8, 16, 1, 2, 1, 16)
    model = ARCHITECTURES["gpt"].reference(size)
    tokens = torch.randint(256, (2, 9))
    loss = plain_pass(model, tokens)
    assert loss == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=1.0)
    assert all(parameter.grad is not None for parameter in model.parameters())
