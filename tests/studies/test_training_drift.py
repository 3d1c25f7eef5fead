"""The claims of the study ``training_drift`` at small sizes, resuming the study, and its distances."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("matplotlib")
from lab.studies import catalogue
from lab.studies.training_drift import report as report
from lab.studies.training_drift import study as study
from lab.studies.training_drift.report import (
    claims,
    of_algorithm,
    of_format,
    of_other_start,
    of_rounding,
    of_te,
)
from lab.studies.training_drift.study import (
    Distance,
    Drift,
    Drifts,
    Kind,
    Pair,
    Run,
    Settings,
    Trajectory,
    WeightDistance,
    between,
    drift_of,
    pairs,
    trajectory,
    wasserstein,
)
from parity import te
from parity.measuring import record
from parity.te import Kernels
from parity.user_error import UserError

SMALL = Settings(
    formats=("fp32", "bf16"),
    te_precisions=("bf16",),
    steps=16,
    every=8,
    seeds=1,
    control_seeds=1,
    batch=2,
    seq=32,
    hidden=32,
    layers=1,
    heads=2,
    groups=1,
)
TINY = dataclasses.replace(SMALL, steps=2, every=1, warmup=1, te_precisions=("bf16", "mxfp8"))
GPU = te.Kernels("gpu", torch.device("cpu"), types.ModuleType("te"))


def moved(drift: Drift) -> float:
    return drift.last.whole.wasserstein


def test_low_precision_moves_the_weights_more_than_flash_attention_does_and_less_than_another_start(
    kernels: Kernels,
) -> None:
    found = {pair: drift_of(pair, SMALL, kernels) for pair in pairs(SMALL, kernels)}
    low = moved(of_format(found, "bf16", 0))
    assert moved(of_algorithm(found, "flash", "bf16", 0)) < low
    assert moved(of_algorithm(found, "flash", "fp32", 0)) < 1e-2 * low
    assert 10 * low < moved(of_other_start(found, 0))
    # TE moves the weights as far as its rounding model does.
    assert moved(of_te(found, "bf16", 0)) == pytest.approx(moved(of_rounding(found, "bf16", 0)), rel=0.5)

    def stretched(drift: Drift, factor: float) -> Drift:
        return dataclasses.replace(drift, distances=(WeightDistance(Distance(0.0, factor * moved(drift)), {}),))

    # A port that drifts further than its precision explains disagrees with the claim.
    for factor, answer in ((1.0, "yes"), (1e6, "no")):
        ported = {pair: stretched(drift, factor) if pair.run.kind == "te" else drift for pair, drift in found.items()}
        assert claims(ported, SMALL, ["bf16"])[-1].agrees == answer


def test_weights_are_looked_at_every_so_many_steps_and_after_the_last(kernels: Kernels) -> None:
    settings = dataclasses.replace(SMALL, steps=5, every=2)
    assert list(trajectory(Run("baseline", "fp32", 0), settings, kernels).weights) == [2, 4, 5]


def test_a_training_is_the_same_twice_and_another_with_another_seed(kernels: Kernels) -> None:
    one, again, other = (
        trajectory.__wrapped__(Run("flash", "bf16", seed), TINY, kernels).weights[2] for seed in (0, 0, 1)
    )
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["tokens.weight"], other["tokens.weight"])


def test_a_nudge_is_one_unit_in_the_last_place(kernels: Kernels) -> None:
    still = dataclasses.replace(TINY, learning_rate=0.0)
    nudged, plain = (trajectory(Run(kind, "fp32", 0), still, kernels).weights[1] for kind in ("nudged", "baseline"))
    for name, weight in plain.items():
        towards = torch.where(nudged[name] > weight, torch.inf, -torch.inf)
        assert torch.equal(nudged[name], torch.nextafter(weight, towards))


def test_te_s_weights_have_the_names_and_shapes_of_the_plain_model_s(kernels: Kernels) -> None:
    ported, plain = (trajectory(Run(kind, "bf16", 0), TINY, kernels).weights[1] for kind in ("te", "rounded"))
    assert {name: weight.shape for name, weight in ported.items()} == {name: w.shape for name, w in plain.items()}


def test_fp16_s_loss_scale_leaves_the_weights_where_they_would_be(kernels: Kernels) -> None:
    settings = dataclasses.replace(SMALL, formats=("fp32", "fp16"))
    drift = drift_of(Pair(Run("baseline", "fp16", 0), Run("baseline", "fp32", 0)), settings, kernels)
    assert drift.loss == pytest.approx(drift.loss_against, abs=1e-3)
    assert 0 < moved(drift) < 1e-4


def test_on_a_gpu_it_trains_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def noted(settings: Settings, folder: Path, kernels: Kernels) -> None:
        steps.append(settings.steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "results", noted)
    for kernels in (te.kernels("cpu"), GPU):
        monkeypatch.setattr(study, "kernels_on", lambda device, kernels=kernels: kernels)
        with pytest.raises(KeyboardInterrupt):
            catalogue.run("training_drift", study.FULL, tmp_path)
    assert steps == [300, 2000]


@pytest.mark.parametrize("kind", ["te", "rounded"])
def test_stochastic_rounding_is_the_same_twice(kernels: Kernels, kind: Kind) -> None:
    one, again = (trajectory.__wrapped__(Run(kind, "nvfp4", 0), TINY, kernels).losses for _ in range(2))
    assert one == again


def test_a_study_trains_only_what_its_record_lacks(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = catalogue.run("training_drift", TINY, tmp_path)
    assert all((tmp_path / f"training_drift{part}.png").is_file() for part in ("", "_te", "_tensors"))
    text = report.read_text()
    assert "On an emulated Hopper: `bf16`. On an emulated Blackwell: `mxfp8`." in text
    path = tmp_path / study.RECORD
    code, *lines = path.read_text().splitlines(keepends=True)
    path.write_text(code + "".join(lines[:-1]))
    trained: list[Run] = []

    def noted(entry: Run, settings: Settings, kernels: Kernels) -> Trajectory:
        trained.append(entry)
        return trajectory(entry, settings, kernels)

    noted.cache_clear = trajectory.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setattr(study, "trajectory", noted)
    study.results(TINY, tmp_path, kernels)
    last = list(pairs(TINY, kernels))[-1]
    assert trained == [last.run, last.against]
    assert len(record.read(path)) == len(lines)
    assert catalogue.run("training_drift", TINY, tmp_path).read_text() == text


SEEDS = dataclasses.replace(SMALL, te_precisions=(), control_seeds=4)


def drifted(low: float, flash: float, ulp: float, start: float, scatter: float = 1.05) -> Drifts:
    """Return drifts of these sizes; flash attention's scatters by a factor between seeds."""
    sizes = {"baseline": low, "flash": flash, "flash everywhere": flash, "nudged": ulp, "other start": start}

    def drift(run: Run) -> Drift:
        size = sizes[run.kind] * (scatter ** (run.seed - 1.5) if run.kind == "flash" else 1.0)
        return Drift((1,), (WeightDistance(Distance(size, size), {"weight": Distance(size, size)}),), 1.0, 1.0)

    return {pair: drift(pair.run) for pair in pairs(SEEDS, te.kernels("cpu"))}


@pytest.mark.parametrize(
    ("sizes", "answers"),
    [
        (dict(low=3.0, flash=1.0, ulp=0.1, start=1.5), ["yes", "yes", "yes"]),
        (dict(low=1e6, flash=1.0, ulp=0.1, start=0.5), ["no", "yes", "no"]),
        (dict(low=1.2, flash=1.0, ulp=0.1, start=1e6), ["no", "no", "yes"]),
        (dict(low=3.0, flash=1.0, ulp=1.0, start=1e6), ["cannot tell", "no", "yes"]),
        (dict(low=3.0, flash=1.0, ulp=0.1, start=2.0, scatter=8.0), ["cannot tell", "yes", "cannot tell"]),
    ],
)
def test_each_claim_depends_on_how_far_the_weights_went(sizes: dict[str, float], answers: list[str]) -> None:
    assert [claim.agrees for claim in claims(drifted(**sizes), SEEDS, [])] == answers


@pytest.mark.parametrize(("ulp", "headline"), [(1.0, "cannot tell flash"), (0.1, "tells flash")])
def test_the_headline_says_whether_the_control_separates(tmp_path: Path, ulp: float, headline: str) -> None:
    found = drifted(low=3.0, flash=1.0, ulp=ulp, start=10.0)
    text = report.write(found, {}, SEEDS, te.kernels("cpu"), tmp_path).read_text()
    assert f"**This experiment {headline} attention from any other change of rounding**" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model="bert"), "model: unknown name 'bert'"),
        (dict(formats=("bf16",)), "formats: fp32 must be among them"),
        (dict(te_precisions=("int8",)), "te_precisions: unknown name 'int8'"),
        (dict(heads=3), "groups must divide heads, and a head must have an even width"),
        (dict(heads=2, groups=3), "groups must divide heads"),
        (dict(seq=33, te_precisions=("bf16", "fp8_current")), "multiples of 32"),
        (dict(device="gpu"), "device: no real TransformerEngine kernels here: no GPU"),
    ],
)
def test_settings_that_do_not_fit_are_told(
    tmp_path: Path, change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(te, "why_no_gpu", lambda: "no GPU")
    with pytest.raises(UserError, match=message):
        catalogue.run("training_drift", dataclasses.replace(TINY, **change), tmp_path)  # type: ignore[arg-type]


# Distances of weights.


numbers = st.floats(-1e3, 1e3, width=32)
two_sets = st.integers(1, 30).flatmap(
    lambda size: st.tuples(
        st.lists(numbers, min_size=size, max_size=size), st.lists(numbers, min_size=size, max_size=size)
    )
)


@given(two_sets)
def test_wasserstein_is_scipy_s(pair: tuple[list[float], list[float]]) -> None:
    one, other = (torch.tensor(values, dtype=torch.float64) for values in pair)
    assert wasserstein(one, other) == pytest.approx(stats.wasserstein_distance(*pair), rel=1e-9, abs=1e-9)


def test_weights_that_change_places_are_no_distance_apart_as_a_set() -> None:
    one = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert wasserstein(one, one.flip(0)) == 0.0
    assert between({"w": one}, {"w": one.flip(0)}).whole.maximum > 0


def test_weights_that_all_move_are_as_far_apart_as_they_moved() -> None:
    one = torch.arange(10.0)
    distance = between({"w": one}, {"w": one + 3})
    assert distance.whole.wasserstein == distance.whole.maximum == 3.0


def test_the_whole_is_one_set_of_numbers() -> None:
    one = {"a": torch.zeros(1), "b": torch.ones(3)}
    other = {"a": torch.ones(1), "b": torch.tensor([0.0, 1.0, 1.0])}
    distance = between(one, other)
    assert distance.whole.wasserstein == 0.0
    assert [each.wasserstein for each in distance.tensors.values()] == [1.0, pytest.approx(1 / 3)]


def test_sets_of_other_sizes_are_told() -> None:
    with pytest.raises(ValueError, match="3 numbers cannot be matched with 4"):
        wasserstein(torch.zeros(3), torch.zeros(4))
