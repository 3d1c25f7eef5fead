"""The claims of the study ``softmax_precision`` at small sizes, and resuming the study."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupted import run_again

pytest.importorskip("matplotlib")
from hypothesis import given
from hypothesis import strategies as st

from lab.studies import catalogue
from lab.studies.softmax_precision import report as report
from lab.studies.softmax_precision import study as study
from lab.studies.softmax_precision.study import (
    DTYPES,
    WAYS,
    Errors,
    Outcome,
    Precision,
    Run,
    Settings,
    error,
    frontier,
    measure_traffic,
    outcome_of,
    runs,
    te_agrees,
    traffic,
    ways,
)
from parity.case.case import Rng
from parity.te import Kernels
from parity.user_error import UserError

SMALL = Settings(scales=(-3, 0, 1, 2, 4, 5), rows=32, keys=256, seeds=2)
Outcomes = dict[Run, Outcome]


@pytest.fixture(scope="module")
def found(kernels: Kernels) -> Outcomes:
    return {each: outcome_of(each, SMALL, kernels) for each in runs(SMALL)}


@pytest.mark.parametrize(
    ("dtype", "way", "largest"),
    [
        ("fp16", "plain", math.log(65504)),
        ("fp16", "max subtracted", 65504),
        ("fp16", "torch.softmax", 65504),
        ("fp16", "FP32", 65504),
        ("fp16", "TE", 65504),
        ("fp16", "PB-Relax", 32 * 65504),
        ("fp16", "FP32, layer scaling", 16 * 65504),
        ("bf16", "plain", math.log(3.39e38)),
        ("fp32", "plain", math.log(3.4e38)),
    ],
)
def test_the_largest_score_that_survives_follows_from_the_format(
    kernels: Kernels, dtype: str, way: str, largest: float
) -> None:
    # Rounding to nearest keeps scores up to half an ulp above the largest number; the search has 64 steps an octave.
    assert frontier(ways(kernels)[way], Precision(DTYPES[dtype]), kernels) == pytest.approx(
        largest, rel=2 ** (1 / 64) - 1
    )


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_formats_with_eight_bits_of_exponent_do_not_overflow_once_a_maximum_is_subtracted(
    found: Outcomes, dtype: str, way: str
) -> None:
    assert error(found, dtype, "apart", way, 5).spoiled == 0


@pytest.mark.parametrize("dtype", SMALL.dtypes)
@pytest.mark.parametrize("scale", [-3, 0, 1, 2])
def test_pytorch_s_softmax_of_16_bit_scores_is_one_in_fp32(found: Outcomes, dtype: str, scale: int) -> None:
    usual, fp32 = (error(found, dtype, "apart", way, scale).moved for way in ("torch.softmax", "FP32"))
    assert usual == fp32


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_te_s_softmax_is_one_in_fp32_bit_by_bit(kernels: Kernels, dtype: str) -> None:
    assert te_agrees(dtype, SMALL, kernels) == 1.0


def test_softmax_in_fp16_operations_loses_more_than_one_in_fp32(found: Outcomes) -> None:
    written_out, fp32 = (error(found, "fp16", "apart", way, 0).alone for way in ("max subtracted", "FP32"))
    assert written_out > 1.5 * fp32


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_large_scores_lose_more_in_storage_than_in_any_arithmetic(found: Outcomes, dtype: str) -> None:
    stored, never_stored = (error(found, dtype, "apart", way, 2) for way in ("FP32", "FP32 scores"))
    assert stored.moved > 20 * stored.alone
    assert stored.moved > 20 * never_stored.moved
    assert stored.gradient > 20 * never_stored.gradient


@pytest.mark.parametrize("dtype", SMALL.dtypes)
def test_pb_relax_with_the_maximum_of_a_head_loses_rows_of_smaller_scores(found: Outcomes, dtype: str) -> None:
    relaxed, by_rows = (error(found, dtype, "mixed", way, 0).moved for way in ("PB-Relax", "PB-Relax by rows"))
    assert relaxed > 100 * by_rows


@pytest.mark.parametrize("dtype", SMALL.dtypes)
def test_pb_relax_costs_nothing_in_heads_of_one_scale(found: Outcomes, dtype: str) -> None:
    relaxed, usual = (error(found, dtype, "apart", way, 2).moved for way in ("PB-Relax", "torch.softmax"))
    assert relaxed == pytest.approx(usual, rel=0.05)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "PB-Relax"])
def test_other_rows_do_not_matter_to_ways_that_look_at_one(found: Outcomes, way: str) -> None:
    for scale in (-3, 0):
        apart, mixed = (error(found, "fp16", layout, way, scale) for layout in ("apart", "mixed"))
        assert apart.moved == pytest.approx(mixed.moved, rel=1e-6)


def test_autocast_makes_softmax_fp32_on_a_gpu_and_its_product_casts_back() -> None:
    assert study.autocast_dtypes("cuda", torch.float16) == (torch.float32, torch.float16)
    assert study.autocast_dtypes("cpu", torch.bfloat16) == (torch.bfloat16, torch.bfloat16)
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


def test_the_casts_of_autocast_give_the_numbers_of_fp32() -> None:
    stored, gradient = (Rng(seed).normal(2, 4, 32).half() for seed in (0, 1))
    found = []
    for way in (lambda x: WAYS["FP32"].softmax(x, Precision(torch.float16)), lambda x: x.float().softmax(-1).half()):
        leaf = stored.clone().requires_grad_()
        probabilities = way(leaf)
        found.append((probabilities, *torch.autograd.grad(probabilities, leaf, gradient)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_fused_softmax_moves_what_one_in_the_dtype_does_and_pb_relax_more(kernels: Kernels) -> None:
    moved = {way: each.forward for way, each in traffic("fp16", SMALL, kernels).items()}
    scores = 4 * SMALL.rows * SMALL.keys
    assert moved["torch.softmax"] == moved["TE"] == 4 * scores
    assert moved["PB-Relax by rows"] > 3 * moved["torch.softmax"]


def test_traffic_counts_each_tensor_once_a_kernel() -> None:
    x = torch.randn(8, 16)
    measured = measure_traffic(lambda x: x.view(-1).exp() * 2, x)
    assert measured.operations == ("exp", "mul.Tensor")
    assert measured.forward == 2 * (x.nbytes + x.nbytes)
    assert measured.saved == x.nbytes  # the exponential


@given(st.sampled_from(sorted(WAYS)), st.integers(0, 2**16))
def test_every_way_is_softmax_up_to_its_roundings(way: str, seed: int) -> None:
    scores = Rng(seed).normal(2, 4, 32)
    probabilities = WAYS[way](scores, Precision(torch.float16))
    golden = scores.double().softmax(-1)
    # At most eight roundings, of scores below 6 in magnitude (absolute error) or of the results (relative error).
    assert ((probabilities.double() - golden).abs() <= golden * 8 * 2.0**-11 * 6 + 2.0**-24).all()


def test_claims_are_answered_from_the_figures(found: Outcomes, kernels: Kernels) -> None:
    costs = {"fp16": traffic("fp16", SMALL, kernels)}
    measured = report.measured(costs, SMALL, kernels)
    answers = [claim.agrees for claim in report.claims(found, SMALL, measured)]
    assert answers == [
        "only if no maximum is subtracted",
        "with each row's own maximum",
        "consistent",
        "not by its arithmetic",
        "yes, in a fused kernel",
        "yes",
    ]


def measured_as(found: Outcomes, layout: str, moved: dict[str, tuple[float, ...]], spoiled: float) -> Outcomes:
    """Return outcomes with other FP16 figures for a layout: how far each way moves by seed, and the rows it spoils."""

    def changed(way: str, errors: Errors, seed: int) -> Errors:
        return errors._replace(moved=moved[way][seed], spoiled=spoiled) if way in moved else errors

    return {
        run: {
            way: {scale: changed(way, errors, run.seed) for scale, errors in by_scale.items()}
            for way, by_scale in outcome.items()
        }
        if (run.dtype, run.layout) == ("fp16", layout)
        else outcome
        for run, outcome in found.items()
    }


@pytest.mark.parametrize(
    ("claim", "layout", "moved", "spoiled", "answer"),
    [
        (0, "apart", {"plain": (0.1, 0.1)}, 0.0, "no"),
        (0, "apart", {"plain": (0.1, 0.1), "max subtracted": (0.1, 0.1)}, 0.5, "yes"),
        (1, "apart", {"PB-Relax": (0.1, 0.1), "PB-Relax by rows": (0.1, 0.1)}, 0.5, "no"),
        (1, "apart", {"PB-Relax": (0.1, 0.1)}, 0.0, "yes"),
        (2, "mixed", {"PB-Relax": (0.1, 0.1), "torch.softmax": (0.1, 0.1)}, 0.0, "no"),
        (2, "mixed", {"PB-Relax": (1.0, 0.01), "torch.softmax": (0.01, 0.01)}, 0.0, "cannot tell"),
        (3, "apart", {"torch.softmax": (1e6, 1e6)}, 0.0, "yes"),
        (3, "apart", {"torch.softmax": (1e6, 1e-6)}, 0.0, "cannot tell"),
    ],
)
def test_other_figures_give_other_answers(
    found: Outcomes,
    kernels: Kernels,
    claim: int,
    layout: str,
    moved: dict[str, tuple[float, ...]],
    spoiled: float,
    answer: str,
) -> None:
    figures = report.measured({"fp16": traffic("fp16", SMALL, kernels)}, SMALL, kernels)
    tested = list(report.claims(measured_as(found, layout, moved, spoiled), SMALL, figures))
    assert tested[claim].agrees == answer


def test_a_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Settings(scales=(0, 2), rows=16, keys=24, seeds=1)
    run = partial(catalogue.run, "softmax_precision", tiny, tmp_path)
    made, report = run_again(monkeypatch, study, "outcome_of", run)
    assert made == list(runs(tiny))
    assert "emulated" in report.read_text()
    assert (tmp_path / "softmax_precision.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(dtypes=("fp8",)), "dtypes: unknown name 'fp8'"),
        (Settings(layouts=("together",)), "layouts: unknown name 'together'"),
        (Settings(scales=(5, 6)), "need one up to largest_mixed=4"),
        (Settings(rows=20), "multiple of 16 rows"),
        (Settings(keys=20), "a multiple of 8 keys"),
    ],
)
def test_settings_that_cannot_run_are_told(tmp_path: Path, settings: Settings, message: str) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.run("softmax_precision", settings, tmp_path)
