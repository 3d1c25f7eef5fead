"""Tables of limits against the packaged one: what differs, and what lies far outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity.judge import differences, limits
from parity.judge.limits import Key, Law, Table

NORM: Key = ("bf16", "output", "norm")
GAIN: Key = ("bf16", "output", "gain")
UNKNOWN: Key = ("bf16", "output", "another statistic")


def law(key: Key, **changes: float) -> Law:
    """The packaged law, with what is changed of it."""
    return replace(limits.packaged().laws[key], **changes)


def test_the_packaged_table_and_a_copy_of_it_do_not_differ() -> None:
    assert differences.compared(limits.packaged()) == ()
    assert differences.compared(Table(dict(limits.packaged().laws), {})) == ()


def test_limits_are_compared_one_by_one_and_counted_by_precision() -> None:
    laws = {NORM: law(NORM, center=5.0), GAIN: law(GAIN), UNKNOWN: law(NORM)}
    laws["fp32", "output", "norm"] = replace(limits.packaged().laws["fp32", "output", "norm"], center=-9.0)
    bf16, fp32 = differences.compared(Table(laws, {"bf16": {"accepted": "one limit"}}))
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
        ({"tensors": 8}, False),  # a wide limit, for want of tensors alone
        ({"largest": 2.0, "spread": 0.12}, False),  # beyond it, yet the limit is not twice as wide
        ({"spread": 0.3}, False),  # four times as wide, though no port showed what is rare by the packaged law
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
    assert bool(differences.far_outside(laws)) is is_far


def test_the_more_values_a_calibration_has_the_rarer_one_must_be() -> None:
    """5.2 standard deviations are rare among twenty values, and are not among ten million."""
    stray = law(GAIN, spread=3.0, largest=5.2, samples=20)
    assert differences.far_outside({GAIN: stray})
    assert not differences.far_outside({GAIN: replace(stray, samples=10_000_000)})


def test_what_the_packaged_table_lacks_is_compared_with_nothing() -> None:
    assert not differences.far_outside({UNKNOWN: law(NORM, center=9.0, largest=1e4)})


def test_the_packaged_laws_are_not_far_outside_of_themselves() -> None:
    assert not differences.far_outside(limits.packaged().laws)


def test_the_widest_limit_comes_first() -> None:
    found = differences.far_outside(
        {GAIN: law(GAIN, spread=9.0, largest=40.0), NORM: law(NORM, center=6.0, largest=500.0)}
    )
    assert list(found) == [NORM, GAIN]
