"""The claims of the study ``fp8_recipes`` at small sizes, and resuming the study."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupted import run_again

pytest.importorskip("matplotlib")
from lab.studies import catalogue
from lab.studies.fp8_recipes import report as claims
from lab.studies.fp8_recipes import study as study
from lab.studies.fp8_recipes.study import (
    BLOCKS,
    PLAIN,
    RECIPES,
    ROTATED,
    ROTATED_BLOCKS,
    AttentionRun,
    Change,
    ModuleRun,
    Settings,
    Side,
    Steps,
    StepsRun,
    TensorLoss,
    TensorRun,
    runs,
)
from parity.numerics.formats import OperandPart
from parity.te import Kernels
from parity.user_error import UserError

BEFORE = 8
FP8 = [name for name in RECIPES if name != "nvfp4"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed PyTorch's random numbers, with which NVFP4 rounds gradients and which other tests draw from as well."""
    torch.manual_seed(0)


def tensor(kernels: Kernels, distribution: str, role: OperandPart, recipe: str) -> TensorLoss:
    return study.measure_tensor(TensorRun(distribution, role, recipe, size=128, earlier=4, seed=0), kernels)


def steps(
    kernels: Kernels, recipe: str, change: Change, factor: float, side: Side = "input", history: int = 0, after: int = 4
) -> Steps:
    return study.measure_steps(StepsRun(recipe, history, side, change, factor, BEFORE, after, 32, 0), kernels)


@pytest.mark.parametrize("recipe", FP8)
def test_e4m3_has_the_sqnr_of_its_four_significand_bits_whatever_shares_a_scale(recipe: str, kernels: Kernels) -> None:
    assert tensor(kernels, "normal", "inputs", recipe).te == pytest.approx(31.5, abs=0.5)


def test_e5m2_costs_gradients_six_decibels(kernels: Kernels) -> None:
    wide, fine = (tensor(kernels, "normal", "gradients", recipe).te for recipe in ("fp8_current", "mxfp8"))
    assert fine - wide == pytest.approx(6.0, abs=0.5)


@pytest.mark.parametrize("recipe", [name for name in FP8 if name != "fp8_delayed"])
@pytest.mark.parametrize("distribution", ["heavy_tailed", "outliers"])
def test_outliers_hardly_cost_fp8_anything(recipe: str, distribution: str, kernels: Kernels) -> None:
    assert tensor(kernels, distribution, "inputs", recipe).te > 30


def test_outliers_cost_the_weights_of_nvfp4_decibels(kernels: Kernels) -> None:
    plain, tailed, outlying = (
        tensor(kernels, name, "weights", "nvfp4").te for name in ("normal", "heavy_tailed", "outliers")
    )
    assert plain - tailed > 2
    assert plain - outlying > 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("role", study.ROLES)
def test_the_rounding_model_predicts_te_s_quantizers(recipe: str, role: OperandPart, kernels: Kernels) -> None:
    loss = tensor(kernels, "normal", role, recipe)
    assert loss.te == pytest.approx(loss.model, abs=0.3)


def test_a_module_s_gradients_are_finer_where_they_are_e4m3(kernels: Kernels) -> None:
    wide, fine = (
        study.measure_module(ModuleRun("linear", "outliers", recipe, 128, 32, 0), kernels).te
        for recipe in ("fp8_current", "mxfp8")
    )
    assert fine["input gradient"] - wide["input gradient"] > 2
    assert fine["output"] == pytest.approx(wide["output"], abs=1)


@pytest.mark.parametrize("side", study.SIDES)
def test_delayed_scaling_clips_a_jump_and_knows_it_in_the_next_step(side: Side, kernels: Kernels) -> None:
    jumped = steps(kernels, "fp8_delayed", "up", 64.0, side, history=16)
    assert jumped.sqnr_db[BEFORE] < 2
    assert jumped.clipped[0] > 0.9
    assert jumped.clipped[1] < 0.01
    # The history then holds one amax of the new size; a draw with a larger one is still clipped a little.
    assert jumped.recovered_after(BEFORE) in (1, 2)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp8_delayed"])
def test_a_recipe_that_scales_by_the_tensor_at_hand_does_not_notice(recipe: str, kernels: Kernels) -> None:
    assert steps(kernels, recipe, "up", 4096.0).recovered_after(BEFORE) == 0


def test_a_spike_stays_in_the_scale_as_long_as_it_is_remembered(kernels: Kernels) -> None:
    remembered = {
        history: steps(kernels, "fp8_delayed", "spike", 65536.0, history=history, after=history + 4)
        for history in (4, 8)
    }
    assert {history: spiked.recovered_after(BEFORE) for history, spiked in remembered.items()} == {4: 5, 8: 9}
    assert remembered[8].flushed[1] > 0.2


def test_e5m2_s_range_takes_the_same_spike(kernels: Kernels) -> None:
    assert steps(kernels, "fp8_delayed", "spike", 65536.0, "gradient", history=8).recovered_after(BEFORE) == 1


def test_steps_that_never_recover_are_told_from_those_that_do() -> None:
    def recovered(*sqnr: float) -> int | None:
        return Steps((30.0, 30.0, *sqnr), (), (), "").recovered_after(2)

    assert recovered(30.0, 30.0) == 0
    assert recovered(3.0, 30.0) == 1
    assert recovered(30.0, 3.0, 30.0) == 2
    assert recovered(3.0, 3.0) is None


def test_a_rotation_helps_fp8_attention_against_outliers_and_block_scales_do_not() -> None:
    errors = [study.measure_attention(AttentionRun("outliers", 1024, 128, seed)).rmse for seed in range(3)]
    plain, block, rotated, both = (
        sum(rmse[way] for rmse in errors) for way in (PLAIN, BLOCKS, ROTATED, ROTATED_BLOCKS)
    )
    assert plain > 1.5 * rotated
    assert plain > 1.5 * both
    assert plain < 1.3 * block


def test_without_outliers_a_rotation_changes_nothing() -> None:
    rmse = study.measure_attention(AttentionRun("normal", 512, 128, 0)).rmse
    assert rmse[PLAIN] == pytest.approx(rmse[ROTATED], rel=0.1)


TINY = Settings(
    recipes=("fp8_delayed", "mxfp8"),
    distributions=("normal", "outliers"),
    size=32,
    earlier=1,
    modules=("linear",),
    hidden=128,
    seq=32,
    histories=(1,),
    factors=(64.0,),
    attention_seq=64,
    head_dim=16,
    seeds=1,
)


def test_a_study_goes_on_where_it_stopped_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(catalogue.run, "fp8_recipes", TINY, tmp_path)
    made, page = run_again(monkeypatch, study, "measure", run, after=5)
    report = page.read_text()
    assert sorted(map(str, made)) == sorted(map(str, runs(TINY)))
    assert "On an emulated Hopper: `fp8_delayed`. On an emulated Blackwell: `mxfp8`." in report
    for picture in ("fp8_recipes_sqnr.png", "fp8_recipes_steps.png"):
        assert (tmp_path / picture).stat().st_size > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dataclasses.replace(TINY, recipes=("bf16",)), "recipes: unknown name 'bf16'"),
        (dataclasses.replace(TINY, distributions=("cauchy",)), "distributions: unknown name 'cauchy'"),
        (dataclasses.replace(TINY, modules=("conv",)), "modules: unknown name 'conv'"),
        (dataclasses.replace(TINY, size=40), "40 is not a multiple of 32"),
        (dataclasses.replace(TINY, head_dim=96), "96 is not a power of two"),
        (dataclasses.replace(TINY, histories=(0,)), "must be at least 1"),
    ],
)
def test_settings_that_cannot_be_run_are_told(settings: Settings, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.run("fp8_recipes", settings, tmp_path)


@pytest.mark.parametrize(("both", "agrees"), [(0.4, "yes"), (0.9, "in direction"), (1e6, "no")])
def test_flash_attention_3_s_factor_is_compared_with_what_was_measured(
    both: float, agrees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {PLAIN: 1.0, BLOCKS: 1.0, ROTATED: 0.5, ROTATED_BLOCKS: both}
    monkeypatch.setattr(claims, "attention_rmse", lambda found, distribution, way: errors[way])
    settings = Settings(distributions=("outliers",), recipes=("nvfp4",))
    assert next(claims.claims({}, settings)).agrees == agrees
