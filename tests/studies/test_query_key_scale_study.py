"""The claims of the study ``query_key_scale`` at small sizes, and resuming the study."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupted import run_again
from pydantic import TypeAdapter

pytest.importorskip("matplotlib")
from hypothesis import given
from hypothesis import strategies as st

from lab.studies import catalogue, te_modules
from lab.studies.query_key_scale import study as study
from lab.studies.query_key_scale.study import (
    KEPT,
    PLACEMENTS,
    TE_WAYS,
    WAYS,
    Outcome,
    Run,
    Settings,
    attend,
    error,
    frontier,
    outcome_of,
    overflows,
    runs,
    scores,
    ways,
)
from parity.case.case import Rng
from parity.te import Kernels
from parity.user_error import UserError

SMALL = Settings(head_dims=(64, 128, 256), magnitudes=(0, 4), seq=32, seeds=1)
Outcomes = dict[Run, Outcome]
SIXTEENTH = 2.0 ** (1 / 16)


@pytest.fixture(scope="module")
def found(kernels: Kernels) -> Outcomes:
    return {each: outcome_of(each, SMALL, kernels) for each in runs(SMALL)}


def edge(found: Outcomes, way: str, distribution: str = "normal", head_dim: int = 128, dtype: str = "fp16") -> float:
    return frontier(found, dtype, distribution, head_dim, way)


@pytest.mark.parametrize("distribution", SMALL.distributions)
def test_fp16_overflows_after_the_product_long_before_the_inputs_do(found: Outcomes, distribution: str) -> None:
    assert 100 * edge(found, "after, stored", distribution) < edge(found, "inputs", distribution)


@pytest.mark.parametrize("way", ways("bf16"))
def test_bf16_does_not_overflow_where_any_model_computes(found: Outcomes, way: str) -> None:
    assert edge(found, way, dtype="bf16") > 1e18


@pytest.mark.parametrize("way", ["query, FP32", "both, FP32", "query, half", "both, half", "TE unfused"])
def test_alpha_in_fp32_reaches_as_far_as_scaling_before_the_product(found: Outcomes, way: str) -> None:
    assert 1 / SIXTEENTH <= edge(found, way) / edge(found, "after, FP32") <= SIXTEENTH


@pytest.mark.parametrize("way", ["after, stored", "after, half"])
@pytest.mark.parametrize("head_dim", SMALL.head_dims)
def test_a_product_kept_in_fp16_overflows_sooner_by_the_fourth_root_of_the_width(
    found: Outcomes, way: str, head_dim: int
) -> None:
    gain = edge(found, "after, FP32", head_dim=head_dim) / edge(found, way, head_dim=head_dim)
    assert math.isclose(gain, head_dim**0.25, rel_tol=SIXTEENTH**2 - 1)


@pytest.mark.parametrize(("scaled", "plain"), [("layer, FP32", "after, FP32"), ("TE unfused, layer", "TE unfused")])
def test_layer_scaling_reaches_further_by_the_root_of_the_layer_s_number(
    found: Outcomes, scaled: str, plain: str
) -> None:
    gain = edge(found, scaled) / edge(found, plain)
    assert math.isclose(gain, SMALL.layer**0.5, rel_tol=SIXTEENTH**2 - 1)


def test_layer_scaling_does_not_help_where_the_product_is_stored_first(found: Outcomes) -> None:
    assert edge(found, "layer, stored") == edge(found, "after, stored")


def test_te_s_fused_attention_overflows_only_with_its_inputs(found: Outcomes) -> None:
    assert edge(found, "TE fused") == edge(found, "inputs")


def test_scaling_both_by_the_root_rounds_once_more_unless_the_root_is_a_power_of_two(found: Outcomes) -> None:
    for head_dim, costs in ((64, True), (128, True), (256, False)):
        both, after = (error(found, "fp16", "normal", head_dim, way, 0).scores for way in ("both, FP32", "after, FP32"))
        assert (both > 1.5 * after) is costs


def test_bf16_s_scores_are_eight_times_as_coarse_as_fp16_s(found: Outcomes) -> None:
    coarse, fine = (error(found, dtype, "normal", 128, "after, FP32", 0).scores for dtype in ("bf16", "fp16"))
    assert 7 < coarse / fine < 9


@pytest.mark.parametrize("dtype", SMALL.dtypes)
def test_the_error_of_stored_scores_grows_with_magnitude_and_fused_attention_s_does_not(
    found: Outcomes, dtype: str
) -> None:
    stored, fused = (
        [error(found, dtype, "aligned", 128, way, exponent).output for exponent in SMALL.magnitudes]
        for way in ("TE unfused", "TE fused")
    )
    assert stored[1] > 5 * stored[0]
    assert fused[1] < 2 * fused[0]


def test_te_s_unfused_attention_computes_what_alpha_in_fp32_does(kernels: Kernels) -> None:
    rng = Rng(0)
    query, key, value = (rng.normal(4, 32, 64).half() for _ in range(3))
    expected = attend(scores(query, key, "after", "fp32", 1), value)
    actual = te_modules.attend(kernels, "unfused", query, key, value)
    # Sums in another order may round a few scores to the other neighbour, which costs less than FP16's rounding.
    assert (actual.double() - expected.double()).norm() < 2.0**-12 * expected.double().norm()


def test_a_backend_that_te_lacks_is_told(kernels: Kernels) -> None:
    single = torch.zeros(4, 32, 64)
    with pytest.raises(UserError, match=r"TE's fused attention, .*head_dim 64: No dot product"):
        te_modules.attend(kernels, "fused", single, single, single)


@given(st.sampled_from(sorted(PLACEMENTS)), st.sampled_from(sorted(KEPT)), st.integers(0, 2**16))
def test_every_way_computes_the_scaled_product_up_to_its_roundings(placement: str, kept: str, seed: int) -> None:
    rng = Rng(seed)
    query, key = (rng.normal(2, 8, 48).half() for _ in range(2))
    golden = query.double() @ key.double().mT / math.sqrt(48)
    computed = scores(query, key, placement, kept, layer=3)
    # Two operands, at most four sums and two products are rounded, each by at most half an ulp of |q| |k|.
    bound = 8 * 2.0**-11 * (query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max()) / math.sqrt(48)
    assert (computed.double() - golden).abs().max() <= bound


def test_minus_infinity_is_a_probability_of_0_and_plus_infinity_nan() -> None:
    assert not overflows(torch.tensor([[0.0, -math.inf]]))
    assert overflows(torch.tensor([[0.0, math.inf]]))


def test_outcomes_survive_the_record_to_four_digits(found: Outcomes) -> None:
    types = TypeAdapter(Outcome)
    for outcome in found.values():
        again = types.validate_python(types.dump_python(outcome))
        assert again.frontiers == pytest.approx(outcome.frontiers, rel=1e-3)
        for way, by_magnitude in outcome.errors.items():
            for exponent, errors in by_magnitude.items():
                assert again.errors[way][exponent] == pytest.approx(errors, rel=1e-3, nan_ok=True)


def test_a_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Settings(distributions=("normal",), head_dims=(16,), magnitudes=(1, 3), seq=32, seeds=1)
    run = partial(catalogue.run, "query_key_scale", tiny, tmp_path)
    made, report = run_again(monkeypatch, study, "outcome_of", run)
    assert made == list(runs(tiny))
    assert "emulated" in report.read_text()
    assert (tmp_path / "query_key_scale.png").stat().st_size > 0


def test_claims_are_answered_from_the_figures(found: Outcomes) -> None:
    answers = {claim.claimed: claim.agrees for claim in study.claims(found, SMALL, 128)}
    assert list(answers.values()) == ["only if the product is kept in FP16", "consistent", "yes", "on paper", "yes"]


def test_the_root_of_the_scale_is_the_same_where_scores_are_equally_far_off(found: Outcomes) -> None:
    alike = {
        run: replace(outcome, errors=dict.fromkeys(outcome.errors, outcome.errors["after, FP32"]))
        for run, outcome in found.items()
    }
    answers = {claim.claimed: claim.agrees for claim in study.claims(alike, SMALL, 128)}
    assert answers["n (A · B) is (√n A) · (√n B)"] == "yes"


def test_ways_that_a_dtype_lacks_are_left_out() -> None:
    assert set(ways("fp16")) == {*WAYS, *TE_WAYS}
    assert not [way for way in ways("bf16") if "half" in way or way == "TE unfused, layer"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(dtypes=("fp8",)), "dtypes: unknown name 'fp8'"),
        (Settings(head_dims=(20,)), "multiples of 8, not 20"),
        (Settings(seq=40), "multiple of 16 queries"),
    ],
)
def test_settings_that_cannot_run_are_told(tmp_path: Path, settings: Settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.run("query_key_scale", settings, tmp_path)
