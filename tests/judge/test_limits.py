"""Limits from the errors of correct ports: the laws, the table that stores them, and how it differs from parity's."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.judge import limits
from parity.judge.limits import FALSE_ALARMS_A_RUN, FEWEST_TENSORS, SIGNED, STATISTICS_A_RUN, Key, Law, Table, fit
from parity.numerics.errors import Tolerance, margin
from parity.result import Errors
from parity.te import PRECISIONS
from parity.user_error import UserError

# From the errors of faithful ports to limits.


LAW = Law(center=0.1, spread=0.2, tensors=40, samples=160, largest=1.8)


def tensors(count):
    return [f"tensor {i}" for i in range(count)]


@pytest.mark.parametrize("statistic", ["norm", "gain"])
def test_a_faithful_port_exceeds_a_limit_no_more_often_than_it_is_allowed_to(statistic):
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 2.0 if statistic in SIGNED else 0.3, 100_000)
    values = normal if statistic in SIGNED else np.exp(normal)
    law = fit(values[:500], tensors(500), statistic)
    exceeding = np.mean(np.abs(values) > law.limit(statistic, probability=1e-2))
    assert 1e-4 < exceeding < 1e-2


@given(values=st.lists(st.floats(0.5, 20), min_size=FEWEST_TENSORS, max_size=50))
def test_the_law_bounds_every_value_that_it_was_fitted_to(values):
    law = fit(values, tensors(len(values)), "norm")
    quantiles = statistics.NormalDist()
    for i, value in enumerate(sorted(values)):
        quantile = quantiles.inv_cdf((i + 0.5) / len(values))
        assert quantile < 1 or law.deviations(value, "norm") <= quantile + 1e-9


def test_errors_far_below_the_models_do_not_lower_the_limit_nor_raise_it():
    values = [1.05, 1.1, 0.95, 1.02, 1.08, 0.97, 1.03, 1.06]
    small = [value if value > 1 else value / 1000 for value in values]
    names = tensors(len(values))
    assert fit(small, names, "norm").limit("norm") == pytest.approx(fit(values, names, "norm").limit("norm"), rel=0.01)


@given(tensors=st.integers(FEWEST_TENSORS, 500))
def test_the_more_tensors_were_measured_the_closer_the_limit(tensors):
    fewer, more = (dataclasses.replace(LAW, tensors=count) for count in (tensors, tensors + 1))
    assert more.limit("norm") <= fewer.limit("norm")


def test_many_seeds_of_one_tensor_are_one_tensor():
    values = list(np.exp(np.random.default_rng(0).normal(0, 0.1, 80)))
    assert fit(values, tensors(8) * 10, "norm").tensors == 8


def test_too_few_tensors_are_refused_instead_of_giving_a_limit_that_nothing_exceeds():
    with pytest.raises(UserError, match="3 different tensors"):
        fit([1.0, 1.1, 0.9], tensors(3), "norm")


def test_no_model_is_trusted_to_the_last_percent():
    exact = fit([1.0] * 100, tensors(100), "norm")
    assert exact.limit("norm") > 1.5


@pytest.mark.parametrize("statistic", ["norm", "gain"])
def test_deviations_put_the_limit_where_its_quantile_is(statistic):
    normal = dataclasses.replace(LAW, tensors=10**6, spread=1.0)
    limit = normal.limit(statistic, probability=0.02275 * (2 if statistic in SIGNED else 1))
    assert normal.deviations(limit, statistic) == pytest.approx(2.0, rel=1e-3)


def test_a_run_of_the_default_suite_is_rarely_a_false_alarm_by_construction():
    probability = FALSE_ALARMS_A_RUN / STATISTICS_A_RUN
    normal = dataclasses.replace(LAW, tensors=10**6, center=0.0, spread=1.0)
    assert SIGNED
    assert math.erfc(math.log(normal.limit("norm")) / math.sqrt(2)) / 2 == pytest.approx(probability, rel=1e-2)


# The table that stores the laws, its file, and the table that comes with parity.


def test_a_table_comes_back_from_its_file_as_it_was(tmp_path):
    stored = Table({("bf16", "output", "norm"): LAW, ("bf16", "output", "gain"): LAW}, {"bf16": {"device": "CPU"}})
    limits.save(stored, tmp_path / "table.json")
    loaded = limits.load(tmp_path / "table.json")
    assert (loaded.laws, loaded.provenance) == (stored.laws, stored.provenance)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99, "laws": []}', '{"format": 1, "laws": [1]}'])
def test_a_file_that_is_no_table_is_named(tmp_path, text):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"table\.json.*parity calibrate"):
        limits.load(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spread": float("nan")}, "has the spread nan, which is not a number"),
        ({"center": float("inf")}, "has the center inf, which is not a number"),
        ({"center": "0.1"}, "has the center '0.1', which is not a number"),
        ({"spread": -0.2}, "has the spread -0.2, which is below 0"),
        ({"largest": -1.0}, "has the largest -1, which is below 0"),
        ({"tensors": 1}, "was measured on 1 tensors"),
        ({"tensors": -40}, "has the tensors -40, which is below 0"),
        ({"center": 50.0}, "would be .*, where everything would pass"),
        ({"center": 1e5}, "would be inf, where everything would pass"),
        ({"center": -1e5}, "would be 0, where nothing passes"),
    ],
)
def test_a_law_that_gives_no_limit_is_named_with_its_place(tmp_path, changes, words):
    limits.save(Table({("bf16", "output", "norm"): LAW}, {}), tmp_path / "table.json")
    record = json.loads((tmp_path / "table.json").read_text())
    record["laws"][0].update(changes)
    (tmp_path / "table.json").write_text(json.dumps(record))
    with pytest.raises(
        UserError, match=rf"table\.json has a law .*'norm' of the kind 'output' in bf16 {words}"
    ) as told:
        limits.load(tmp_path / "table.json")
    assert "\n" not in str(told.value)


def test_a_missing_table_and_a_missing_law_say_how_to_make_them(tmp_path):
    with pytest.raises(UserError, match="parity calibrate --out"):
        limits.load(tmp_path / "none.json")
    with pytest.raises(UserError, match="parity calibrate --precision nvfp4"):
        Table({}, {}).limit("nvfp4", "output", "norm")


def test_the_packaged_table_has_a_law_for_every_statistic_at_every_precision():
    packaged = limits.packaged()
    for precision in PRECISIONS:
        there = {(kind, name) for p, kind, name in packaged.laws if p == precision}
        for kind in ("output", "probed output", "input gradient", "weight gradient"):
            assert {name for k, name in there if k == kind} >= {"norm", "largest", "gain", "slice", "shift"}
        assert ("output", "mistake") in there
        assert packaged.provenance[precision]["kernels"].startswith(("emulated", "real"))


def test_packaged_limits_are_above_what_faithful_ports_showed_and_not_absurd():
    for (precision, kind, statistic), law in limits.packaged().laws.items():
        limit = limits.packaged().limit(precision, kind, statistic)
        assert law.largest < limit < 100, (precision, kind, statistic)


def test_a_tables_json_has_a_law_a_line(tmp_path):
    limits.save(Table({("bf16", "output", "norm"): LAW}, {}), tmp_path / "table.json")
    text = (tmp_path / "table.json").read_text()
    assert json.loads(text)["laws"][0]["statistic"] == "norm"
    assert sum('"statistic"' in line for line in text.splitlines()) == 1


# Tables of limits compared with the packaged one: what differs, and what lies far outside.


NORM: Key = ("bf16", "output", "norm")
GAIN: Key = ("bf16", "output", "gain")
UNKNOWN: Key = ("bf16", "output", "another statistic")


def law(key: Key, **changes: float) -> Law:
    """Return the packaged law with some changes."""
    return replace(limits.packaged().laws[key], **changes)


def test_the_packaged_table_and_a_copy_of_it_do_not_differ() -> None:
    assert limits.compared(limits.packaged()) == ()
    assert limits.compared(Table(dict(limits.packaged().laws), {})) == ()


def test_limits_are_compared_one_by_one_and_counted_by_precision() -> None:
    laws = {NORM: law(NORM, center=5.0), GAIN: law(GAIN), UNKNOWN: law(NORM)}
    laws["fp32", "output", "norm"] = replace(limits.packaged().laws["fp32", "output", "norm"], center=-9.0)
    bf16, fp32 = limits.compared(Table(laws, {"bf16": {"accepted": "one limit"}}))
    assert (bf16.precision, bf16.shared, bf16.wider, bf16.tighter, bf16.unknown) == ("bf16", 2, 1, 0, 1)
    assert (fp32.precision, fp32.shared, fp32.wider, fp32.tighter, fp32.unknown) == ("fp32", 1, 0, 1, 0)
    assert (bf16.accepted, fp32.accepted) == ("one limit", "")
    assert bf16.widest is not None
    assert (bf16.widest.kind, bf16.widest.statistic) == ("output", "norm")
    assert bf16.widest.limit == Table(laws, {}).limit(*NORM)
    assert bf16.widest.packaged == limits.packaged().limit(*NORM)


@pytest.mark.parametrize(
    ("changes", "is_far"),
    [
        ({}, False),
        ({"largest": 1.6}, False),  # within the packaged limit, 1.7
        ({"tensors": 8}, False),  # a wide limit, but only because tensors are few
        ({"largest": 2.0, "spread": 0.12}, False),  # beyond it, but the limit is not twice as wide
        ({"spread": 0.3}, False),  # four times as wide, but no port showed a value that is rare by the packaged law
        ({"largest": 3.5, "spread": 0.3}, True),
        ({"largest": 3.5, "spread": 0.3, "tensors": 8}, True),
        ({"largest": 120.0, "center": 4.6}, True),  # nine Linears, each times 1.3
        ({"largest": 1e300, "center": 700.0}, True),
    ],
)
def test_far_outside_is_a_limit_that_ports_widen_which_the_packaged_law_knows_nothing_of(
    changes: dict[str, float], is_far: bool
) -> None:
    laws = {NORM: replace(law(NORM), **{"largest": 1.1, "samples": 100, **changes})}
    assert bool(limits.far_outside(laws)) is is_far


def test_the_more_values_a_calibration_has_the_rarer_one_must_be() -> None:
    """5.2 standard deviations are rare among twenty values, but not among ten million."""
    stray = law(GAIN, spread=3.0, largest=5.2, samples=20)
    assert limits.far_outside({GAIN: stray})
    assert not limits.far_outside({GAIN: replace(stray, samples=10_000_000)})


def test_what_the_packaged_table_lacks_is_compared_with_nothing() -> None:
    assert not limits.far_outside({UNKNOWN: law(NORM, center=9.0, largest=1e4)})


def test_the_packaged_laws_are_not_far_outside_of_themselves() -> None:
    assert not limits.far_outside(limits.packaged().laws)


def test_the_widest_limit_comes_first() -> None:
    found = limits.far_outside({GAIN: law(GAIN, spread=9.0, largest=40.0), NORM: law(NORM, center=6.0, largest=500.0)})
    assert list(found) == [NORM, GAIN]


# Errors compared with the two bounds that a report shows.


ERRORS = Errors(relative_l2=1e-3, max_abs=1e-2, max_ulps=1.0, cosine=1.0, sqnr_db=60.0, golden_rms=1.0)


def test_the_margin_is_the_larger_of_both_errors_over_their_bounds():
    assert margin(ERRORS, Tolerance(relative_l2=1e-2, max_abs=2e-2)) == pytest.approx(0.5)
    assert margin(ERRORS, Tolerance(relative_l2=5e-4, max_abs=1.0)) == pytest.approx(2.0)


def test_an_error_where_none_is_allowed_fails_and_no_error_passes():
    nothing = Tolerance(0.0, 0.0)
    assert margin(ERRORS, nothing) == math.inf
    assert margin(dataclasses.replace(ERRORS, relative_l2=0.0, max_abs=0.0), nothing) == 0.0


@pytest.mark.parametrize("field", ["nans", "infs", "golden_non_finite"])
def test_what_is_not_finite_never_passes(field):
    errors = dataclasses.replace(ERRORS, relative_l2=0.0, max_abs=0.0, **{field: 1})
    assert margin(errors, Tolerance(1.0, 1.0)) == math.inf
