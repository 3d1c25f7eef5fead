"""Test what a record keeps of an error for pictures."""

from __future__ import annotations

import json
import math

import pytest
import torch
from fakes import tensor
from torch import Tensor

from parity.judge.judge import MOST_PICTURES, thinned
from parity.judge.pictures import PARTS, PARTS_OF_A_PASS, pictured
from parity.numerics.errors import GoldenTensor
from parity.result import Histogram, Kind, Picture, TensorResult, to_json

OUTPUT: tuple[Kind, str] = ("output", "output")
UNIT = 1e-3


def picture_of(error: Tensor, expected: Tensor, margin: float = 2.0) -> Picture | None:
    golden = torch.randn_like(error, dtype=torch.float64)
    known = {OUTPUT: GoldenTensor(golden)}
    (verdict,) = pictured((tensor(margin=margin),), known, {OUTPUT: golden + error}, [{OUTPUT: golden + expected}])
    return verdict.picture


def uniform(*shape: int) -> Tensor:
    """Return an error of constant size with random signs."""
    return UNIT * (2 * torch.randint(0, 2, shape, dtype=torch.float64) - 1)


def test_a_profile_shows_the_index_at_which_an_error_lies() -> None:
    error = uniform(4, 16, 8)
    error[:, 11] *= 100
    picture = picture_of(error, uniform(4, 16, 8))
    assert picture is not None
    assert picture.unit == pytest.approx(UNIT, rel=0.01)
    batch, positions, channels = picture.profiles
    assert [profile.axis for profile in picture.profiles] == [0, 1, 2]
    assert positions.error == pytest.approx([100 * UNIT if i == 11 else UNIT for i in range(16)], rel=0.01)
    assert positions.expected == pytest.approx([UNIT] * 16, rel=0.01)
    along_others = UNIT * math.sqrt((15 + 100**2) / 16)
    assert batch.error == pytest.approx([along_others] * 4, rel=0.01)
    assert channels.error == pytest.approx([along_others] * 8, rel=0.01)


@pytest.mark.parametrize(("margin", "parts"), [(2.0, PARTS), (0.5, PARTS_OF_A_PASS)])
def test_a_long_axis_is_shown_in_parts_of_which_the_last_may_be_shorter(margin: float, parts: int) -> None:
    length = 3 * parts - 2
    picture = picture_of(uniform(length), uniform(length), margin)
    assert picture is not None
    (profile,) = picture.profiles
    assert profile.span == 3
    assert profile.error == pytest.approx([UNIT] * parts, rel=0.01)


def test_an_axis_of_one_index_has_no_profile() -> None:
    picture = picture_of(uniform(1, 32), uniform(1, 32))
    assert picture is not None
    assert [profile.axis for profile in picture.profiles] == [1]


def test_nans_and_infinities_are_counted_where_they_are() -> None:
    error = uniform(4, 16)
    error[2, 5], error[2, 6] = math.nan, math.inf
    picture = picture_of(error, uniform(4, 16))
    assert picture is not None
    rows, columns = picture.profiles
    assert rows.spoiled == (0, 0, 2, 0)
    assert [i for i, count in enumerate(columns.spoiled) if count] == [5, 6]
    assert all(map(math.isfinite, rows.error))


def bin_of(histogram: Histogram, times: float) -> int:
    return math.floor((math.log10(times) - histogram.start) / histogram.width)


def test_a_histogram_counts_elements_by_their_error_over_the_expected_one() -> None:
    error = uniform(64, 64)
    error[0] *= 3e3
    error[1] = 0.0
    error[2] *= 1e-9
    error[3] *= 1e9
    picture = picture_of(error, 1.5 * uniform(64, 64))
    assert picture is not None
    assert picture.histogram is not None
    histogram = picture.histogram
    filled = {i: count for i, count in enumerate(histogram.error) if count}
    last = len(histogram.error) - 1
    assert filled == {0: 64, bin_of(histogram, 1 / 1.5): 60 * 64, bin_of(histogram, 2e3): 64, last: 64}
    assert histogram.exact == (64, 0)
    assert sum(histogram.error) + histogram.exact[0] == error.numel()
    assert sum(histogram.expected) == error.numel()


def test_a_tensor_without_any_error_has_no_picture() -> None:
    assert picture_of(torch.zeros(4, 8), torch.zeros(4, 8)) is None


def test_where_no_error_is_expected_the_candidates_own_is_the_unit() -> None:
    picture = picture_of(uniform(8, 8), torch.zeros(8, 8))
    assert picture is not None
    assert picture.unit == pytest.approx(UNIT, rel=0.01)
    assert set(picture.profiles[0].expected) == {0.0}


def pictured_labels(*tensors: TensorResult) -> list[str]:
    keys = [each.key for each in tensors]
    golden = {key: torch.randn(4, 8, dtype=torch.float64) for key in keys}
    wrong = {key: x + uniform(4, 8) for key, x in golden.items()}
    found = pictured(tensors, {key: GoldenTensor(x) for key, x in golden.items()}, wrong, [wrong])
    assert [each.label for each in found] == [each.label for each in tensors]
    return [each.label for each in found if each.picture]


def weights(*margins: float) -> list[TensorResult]:
    return [tensor(f"w{i}", "weight gradient", margin) for i, margin in enumerate(margins)]


def test_of_a_pass_the_worst_tensor_has_a_picture() -> None:
    assert pictured_labels(tensor(margin=0.3), *weights(0.2, 0.9)) == ["d w1"]


def test_of_a_failure_the_worst_tensors_have_pictures_and_an_output_if_one_failed() -> None:
    many = weights(*(10.0 + i for i in range(MOST_PICTURES + 2)))
    worst = [each.label for each in many[-MOST_PICTURES:]]
    assert pictured_labels(tensor(margin=0.3), *many) == worst
    assert pictured_labels(tensor(margin=2.0), *many) == ["output", *worst[1:]]


def test_a_trainings_steps_together_have_no_more_pictures_than_one() -> None:
    picture = picture_of(uniform(4, 8), uniform(4, 8))
    steps = [
        TensorResult(**{name: getattr(each, name) for name in each.__slots__} | {"step": i, "picture": picture})
        for i, each in enumerate(weights(*(2.0 + i for i in range(9))), 1)
    ]
    assert sum(each.picture is not None for each in thinned(steps)) == MOST_PICTURES


def test_a_picture_takes_a_few_kilobytes_of_a_record() -> None:
    picture = picture_of(uniform(96, 80, 72), uniform(96, 80, 72))
    assert picture is not None
    size = len(json.dumps(to_json(picture)))  # type: ignore[arg-type]
    assert 1_000 < size < 6_000
