"""The claims of the study ``expected_error`` at small sizes, and resuming the study."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from pathlib import Path

import pytest
from interrupted import run_again

pytest.importorskip("matplotlib")
from lab.studies import catalogue
from lab.studies.expected_error import report as claims
from lab.studies.expected_error import study as study
from lab.studies.expected_error.report import PARTS_OF_OUTPUTS, explained_share, law, mean, shares_of
from lab.studies.expected_error.study import (
    ISSUE_407,
    MODEL,
    SHORT_SUMS,
    TE,
    Drawn,
    Measured,
    Run,
    Settings,
    Shape,
    base,
    measure,
    runs,
)
from parity import te
from parity.te import Kernels
from parity.user_error import UserError

SMALL = Settings(
    modules=("linear", "layernorm_mlp_swiglu", "transformer_layer_llama"),
    precisions=("fp32", "bf16", "fp8_current", "nvfp4"),
    hidden=128,
    seq=32,
    hiddens=(128, 256),
    seqs=(32, 64),
    depths=(1, 2, 4),
    held_out_hidden=128,
    held_out_seq=64,
    held_out_depth=2,
    seeds=1,
    issue_seeds=3,
)
Found = dict[Run, Measured]


@pytest.fixture(scope="module")
def found(kernels: Kernels) -> Found:
    return {run: measure(run, kernels) for run in runs(SMALL, kernels) if run.module != ISSUE_407}


@pytest.mark.parametrize(("precision", "roundings", "bits"), [("fp32", 2, 11), ("bf16", 1, 8), ("fp8_current", 2, 4)])
def test_a_linear_layer_loses_what_the_theory_of_quantization_says(
    found: Found, precision: str, roundings: int, bits: int
) -> None:
    theory = math.sqrt(roundings * 0.180) * 2.0**-bits
    assert mean(found, "linear", base(SMALL), precision, TE) == pytest.approx(theory, rel=0.15)


@pytest.mark.parametrize("name", SMALL.modules)
@pytest.mark.parametrize("precision", SMALL.precisions)
def test_width_and_length_hardly_matter(found: Found, name: str, precision: str) -> None:
    fitted = law(found, SMALL, name, precision)
    assert fitted is not None
    assert abs(fitted.exponents["hidden"]) < 0.25
    assert abs(fitted.exponents["seq"]) < 0.25


@pytest.mark.parametrize("precision", SMALL.precisions)
def test_errors_of_layers_grow_as_the_square_root_of_their_number(found: Found, precision: str) -> None:
    fitted = law(found, SMALL, "transformer_layer_llama", precision)
    assert fitted is not None
    assert fitted.exponents["depth"] == pytest.approx(0.5, abs=0.15)


def test_gated_mlps_without_a_residual_stream_amplify_errors(found: Found) -> None:
    errors = [mean(found, "layernorm_mlp_swiglu", Shape(128, 32, depth), "fp32", TE) for depth in SMALL.depths]
    assert errors[2] > 3 * errors[0]


def test_the_rounding_model_predicts_what_te_loses(found: Found) -> None:
    measured = [run for run in found if run.way == TE]
    ratios = [
        found[run].relative_l2[kind] / found[dataclasses.replace(run, way=MODEL)].relative_l2[kind]
        for run in measured
        for kind in found[run].relative_l2
    ]
    assert min(ratios) > 0.7
    assert max(ratios) < 1.2


@pytest.mark.parametrize("name", SMALL.modules)
@pytest.mark.parametrize("precision", SMALL.precisions)
def test_errors_of_the_parts_add_as_squares(found: Found, name: str, precision: str) -> None:
    assert explained_share(found, SMALL, name, precision) == pytest.approx(1.0, abs=0.1)
    assert sum(shares_of(found, SMALL, name, precision)) == pytest.approx(1.0)


def test_bf16_errs_where_it_stores_and_fp8_in_the_operands(found: Found) -> None:
    shares = {
        precision: dict(zip(PARTS_OF_OUTPUTS, shares_of(found, SMALL, "linear", precision), strict=True))
        for precision in ("bf16", "fp8_current")
    }
    assert shares["bf16"]["storage"] > 0.99
    assert shares["fp8_current"]["weights"] == pytest.approx(0.5, abs=0.1)
    assert shares["fp8_current"]["inputs"] == pytest.approx(0.5, abs=0.1)


def test_short_sums_hide_behind_the_cast_to_fp8(found: Found) -> None:
    short, plain = (mean(found, "linear", base(SMALL), "fp8_current", way) for way in (SHORT_SUMS, TE))
    assert short != plain
    assert short == pytest.approx(plain, rel=0.01)


def drawn(right: list[float], swapped: list[float], allclose: bool = False) -> list[Drawn]:
    alike = dict.fromkeys(study.LINEARS, allclose)
    return [Drawn(*sums, alike) for sums in zip(right, swapped, strict=True)]


SMALL_SUMS, LARGE_SUMS = [1.8, -2.1, 0.4, -0.7, 1.1, -1.5], [2400.0, -3100.0, 900.0, -1700.0, 2800.0, -600.0]


@pytest.mark.parametrize(
    ("draws", "answers"),
    [
        (drawn(SMALL_SUMS, LARGE_SUMS), ["yes", "yes", "no", "no"]),
        (drawn(LARGE_SUMS, SMALL_SUMS), ["no", "no", "no", "no"]),
        (drawn([1e6] * 6, LARGE_SUMS, allclose=True), ["no", "yes", "yes", "yes"]),
        (drawn([1e6 * each for each in SMALL_SUMS], [1e6] * 6), ["no", "no", "no", "no"]),
        (drawn(SMALL_SUMS, SMALL_SUMS), ["cannot tell", "no", "no", "no"]),
        (drawn(SMALL_SUMS[:1], LARGE_SUMS[:1]), ["cannot tell", "cannot tell", "no", "no"]),
        ([*drawn(SMALL_SUMS, LARGE_SUMS), *drawn([0.1], [9.0], True)], ["yes", "yes", "cannot tell", "cannot tell"]),
    ],
)
def test_issue_407_is_answered_from_draws_of_both_ports(draws: list[Drawn], answers: list[str]) -> None:
    settings = dataclasses.replace(SMALL, modules=(), precisions=("fp32",))
    assert [claim.agrees for claim in claims.claims({}, draws, settings)] == answers


def test_issue_407_s_ports_err_by_far_apart_sums_and_no_linear_layer_is_allclose(kernels: Kernels) -> None:
    right, *others = [study.draw(seed, kernels) for seed in range(3)]
    assert right == study.draw(0, kernels)
    for each in (right, *others):
        assert abs(each.faithful) < 10 < abs(each.swapped)
        assert not any(each.allclose.values())


@pytest.mark.parametrize(
    ("errors", "agrees"),
    [((2.9e-4, 2.9e-4), "yes"), ((1e6, 1.1e6), "no"), ((2.9e-4, 4e-4), "cannot tell"), ((2.9e-4,), "cannot tell")],
)
def test_theory_is_compared_with_the_errors_of_all_seeds(errors: tuple[float, ...], agrees: str) -> None:
    settings = dataclasses.replace(SMALL, modules=("linear",), precisions=("fp32",))
    runs_by_seed = (Run("linear", base(SMALL), "fp32", TE, seed) for seed in range(len(errors)))
    found = {run: Measured({"output": error}, 0.1) for run, error in zip(runs_by_seed, errors, strict=True)}
    assert list(claims.claims(found, drawn(SMALL_SUMS, LARGE_SUMS), settings))[-1].agrees == agrees


def test_a_tolerance_that_the_errors_exceed_disagrees() -> None:
    settings = dataclasses.replace(SMALL, modules=("layernorm_mlp_swiglu",), precisions=("bf16",))
    run = Run("layernorm_mlp_swiglu", base(SMALL), "bf16", TE, 0)
    answers = [next(claims.claims({run: Measured({}, error)}, [], settings)).agrees for error in (0.01, 1e6)]
    assert answers == ["yes", "no"]


def test_a_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(
        SMALL, modules=("linear",), precisions=("bf16", "fp8_current"), hiddens=(128,), seqs=(32, 64), depths=(1,)
    )
    monkeypatch.setattr(study, "ISSUE_407_SHAPE", study.Shape(8, 8))
    figures = Measured({"output": 0.1, "input gradient": 0.1, "weight gradient": 0.1}, 0.1, "a GPU")
    monkeypatch.setattr(study, "measure", lambda *_: figures)
    run = partial(study.results, tiny, tmp_path, te.kernels("cpu"))
    made, _ = run_again(monkeypatch, study, "measure", run, after=3)
    assert sorted(map(str, made)) == sorted(map(str, set(runs(tiny, te.kernels("cpu")))))


def test_the_report_has_the_table_that_a_person_looks_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(SMALL, modules=("linear",), precisions=("fp32", "fp8_current"), depths=(1,))
    faithful = study.measure

    def quick(entry: Run, kernels: Kernels) -> Measured:
        if entry.module == ISSUE_407:
            return Measured({"output": 5e-4, "input gradient": 5e-4, "weight gradient": 5e-4}, 1e-3, "a GPU")
        return faithful(entry, kernels)

    monkeypatch.setattr(study, "measure", quick)
    report = catalogue.run("expected_error", tiny, tmp_path).read_text()
    assert re.search(r"Linear \|\s+~0\.0003 \|", report)
    assert "emulated: TransformerEngine's own Python" in report
    for picture in ("expected_error_growth.png", "expected_error_parts.png"):
        assert (tmp_path / picture).stat().st_size > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dataclasses.replace(SMALL, modules=("conv",)), "modules: unknown name 'conv'"),
        (dataclasses.replace(SMALL, precisions=("int8",)), "precisions: unknown name 'int8'"),
        (dataclasses.replace(SMALL, hiddens=(100,)), "100 is not a multiple of 128"),
        (dataclasses.replace(SMALL, seqs=(10,)), "10 is not a multiple of 32"),
        (dataclasses.replace(SMALL, depths=(0,)), "must be at least 1"),
        (dataclasses.replace(SMALL, depth=2), "must be 1 unless all modules can be stacked"),
    ],
)
def test_settings_that_cannot_be_run_are_told(settings: Settings, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.run("expected_error", settings, tmp_path)
