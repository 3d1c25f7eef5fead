"""The claims of the study ``flash_stability`` at small sizes, and resuming the study."""

from __future__ import annotations

import dataclasses
import resource
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
from lab.studies import catalogue
from lab.studies.flash_stability import report as report
from lab.studies.flash_stability import study as study
from lab.studies.flash_stability.report import flash_over_baseline, growth, of_length
from lab.studies.flash_stability.study import (
    ALONE,
    AS_KERNELS,
    EVERYWHERE,
    SPARED,
    STORED_STATE,
    SUMS,
    Deviation,
    Result,
    Results,
    Run,
    Settings,
    over_seeds,
    plain_run,
    result_of,
    runs,
    untiled,
    whole_runs,
)
from parity import te
from parity.measuring import record
from parity.te import Kernels
from parity.user_error import UserError

SMALL = Settings(
    formats=("fp64", "fp32", "tf32", "bf16", "e4m3", "e5m2"),
    length=512,
    lengths=(256, 4096),
    queries=64,
    whole_length=256,
    head_dim=32,
    tile=16,
    tiles=(16, 256),
    rises=(0, 31),
    seeds=1,
)
TINY = dataclasses.replace(
    SMALL,
    distributions=("normal",),
    formats=("fp32", "bf16"),
    length=32,
    lengths=(32, 64),
    whole_length=32,
    tiles=(16, 32),
    rises=(0, 1),
)
DISTRIBUTIONS = SMALL.distributions


class Found(dict[Run, Result]):
    """Hold every result that a test asks for, computed on first access."""

    def __missing__(self, entry: Run) -> Result:
        self[entry] = result_of(entry, SMALL, te.kernels("cpu"))
        return self[entry]


@pytest.fixture(scope="module")
def found() -> Results:
    return Found()


def at(found: Results, distribution: str, **changes: object) -> Deviation:
    return over_seeds(found, dataclasses.replace(plain_run(SMALL, distribution), **changes), SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_with_every_step_rounded_flash_deviates_much_more_than_baseline_on_long_sequences(
    found: Results, distribution: str
) -> None:
    entry = of_length(plain_run(SMALL, distribution), SMALL, SMALL.lengths[-1])
    assert 3 < flash_over_baseline(found, SMALL, entry) < 30


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_as_kernels_round_flash_deviates_no_more_than_baseline(found: Results, distribution: str) -> None:
    base = dataclasses.replace(plain_run(SMALL, distribution), rounded=AS_KERNELS)
    for keys in SMALL.lengths:
        assert flash_over_baseline(found, SMALL, of_length(base, SMALL, keys)) < 1.1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_running_sum_and_the_accumulator_are_what_makes_the_difference(found: Results, distribution: str) -> None:
    whole = at(found, distribution).relative_l2
    assert at(found, distribution, rounded=ALONE + SUMS).relative_l2 > 0.7 * whole
    assert at(found, distribution, rounded=SPARED + SUMS).relative_l2 < 0.5 * whole


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_deviation_grows_with_the_length_only_where_the_sums_are_rounded(found: Results, distribution: str) -> None:
    base = plain_run(SMALL, distribution)
    as_kernels = dataclasses.replace(base, rounded=AS_KERNELS)
    assert growth(found, SMALL, base, lambda one: one.relative_l2) > 0.3
    assert abs(growth(found, SMALL, as_kernels, lambda one: one.relative_l2)) < 0.1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_wider_tiles_deviate_less_and_higher_ones_no_less(found: Results, distribution: str) -> None:
    narrow, wide, high = (
        at(found, distribution, rows=rows, columns=columns) for rows, columns in ((16, 16), (16, 256), (256, 16))
    )
    assert wide.relative_l2 < 0.6 * narrow.relative_l2
    assert high == narrow


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_more_rescalings_do_not_mean_more_deviation(found: Results, distribution: str) -> None:
    none, most = (at(found, distribution, rises=rises) for rises in (0, 31))
    assert (none.rescalings, most.rescalings) == (0, 31)
    assert most.relative_l2 < none.relative_l2
    plain, known = at(found, distribution), at(found, distribution, maximum_known=True)
    assert plain.rescalings > known.rescalings == 0
    assert known.relative_l2 == pytest.approx(plain.relative_l2, rel=0.1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rounded", [EVERYWHERE, AS_KERNELS, STORED_STATE])
def test_the_order_of_the_loops_matters_only_through_where_the_state_waits(
    found: Results, distribution: str, rounded: str
) -> None:
    entry = dataclasses.replace(plain_run(SMALL, distribution), rounded=rounded)
    assert found[entry].outputs == found[dataclasses.replace(entry, outer="keys")].outputs
    in_registers, stored = (at(found, distribution, rounded=each) for each in (AS_KERNELS, STORED_STATE))
    assert stored.relative_l2 > 1.5 * in_registers.relative_l2


def test_where_a_format_of_more_bits_deviates_more_it_lacks_range(found: Results) -> None:
    baseline = untiled(plain_run(SMALL, "normal"))
    errors = {
        name: over_seeds(found, dataclasses.replace(baseline, format=name), SMALL).relative_l2
        for name in (*SMALL.formats, "e8m3", "e8m2")
    }
    assert errors["e4m3"] > errors["e5m2"]
    assert errors["e8m3"] < errors["e8m2"]
    assert errors["fp64"] < errors["fp32"] < errors["tf32"] < errors["bf16"] < min(errors["e4m3"], errors["e5m2"])


def test_the_libraries_round_as_the_re_implementation_says(found: Results) -> None:
    pairs = {"te unfused": "baseline", "te fused": "flash", "torch flash": "flash"}
    base = dataclasses.replace(plain_run(SMALL, "normal"), rounded=AS_KERNELS)
    for library, algorithm in pairs.items():
        ours = base if algorithm == "flash" else untiled(base)
        expected = over_seeds(found, ours, SMALL).relative_l2
        assert over_seeds(found, untiled(base, library), SMALL).relative_l2 == pytest.approx(expected, rel=0.1)


def test_a_verdict_is_found_from_the_figures(kernels: Kernels) -> None:
    figures = {entry: result_of(entry, TINY, kernels) for entry in runs(TINY)}

    def agrees(results: Results) -> str:
        claim = next(c for c in report.claims(results, TINY) if c.claimed.startswith("in BF16"))
        return claim.agrees

    def with_maximum(entry: Run, result: Result) -> Result:
        maximum = 1.0 if entry.algorithm == "flash" else 0.1
        deviation = result.deviation and dataclasses.replace(result.deviation, maximum=maximum)
        return dataclasses.replace(result, deviation=deviation)

    assert agrees(figures) == "no"
    assert agrees({entry: with_maximum(entry, result) for entry, result in figures.items()}) == "yes"


def test_a_study_computes_only_what_its_record_lacks(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = catalogue.run("flash_stability", TINY, tmp_path)
    assert (tmp_path / "flash_stability.png").stat().st_size > 0
    text = report.read_text()
    assert "emulated" in text
    path = tmp_path / study.RECORD
    code, *lines = path.read_text().splitlines(keepends=True)
    path.write_text(code + "".join(lines[:-2]) + lines[-2][:20])
    computed: list[Run] = []

    def noted(entry: Run, settings: Settings, kernels: Kernels) -> Result:
        computed.append(entry)
        return result_of(entry, settings, kernels)

    monkeypatch.setattr(study, "result_of", noted)
    study.results(TINY, tmp_path, kernels)
    assert len(computed) == 2
    assert len(record.read(path)) == len(lines) == len(runs(TINY))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot forget the peak of its memory")
def test_long_sequences_take_memory_that_grows_with_their_length_and_not_its_square(kernels: Kernels) -> None:
    """Run twice in one process: memory used before must not count, as it would if studies follow each other."""
    settings = dataclasses.replace(SMALL, whole_length=4096)
    held = torch.ones(1 << 28)  # 1 GiB, as an earlier study may have used
    del held
    for entry in whole_runs(settings):
        whole = dataclasses.replace(entry, rounded=AS_KERNELS)
        before = resident_bytes()
        taken = result_of(whole, settings, kernels).peak_bytes - before
        # A matrix of scores would be 64 MiB in FP32 and 128 MiB in FP64, and attention holds several of them.
        assert taken < 100 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(distributions=("cauchy",)), "distributions: unknown name 'cauchy'"),
        (dict(formats=("fp4",)), "formats: unknown name 'fp4'"),
        (dict(device="tpu"), "device: unknown name 'tpu'"),
        (dict(rises=(2,)), "32 keys in tiles of 16 allow for 1 at most"),
    ],
)
def test_settings_that_do_not_fit_are_told(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        catalogue.run("flash_stability", dataclasses.replace(TINY, **change), tmp_path)  # type: ignore[arg-type]
