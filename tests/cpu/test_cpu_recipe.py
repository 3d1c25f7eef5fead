"""The update of delayed scaling: laws of the amax history and of the scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.cpu import recipe
from parity.cpu.enums import DType

amaxes = st.floats(0.0, 1e6, width=32)


def update(
    amax: list[float],
    history: list[list[float]],
    scale: list[float],
    algorithm: str = "max",
    dtype: DType = DType.kFloat8E4M3,
    margin: float = 0,
) -> tuple[list[list[float]], list[float]]:
    """One update of one group of tensors: the new history, rows first, and the new scales."""
    histories, scales = [torch.tensor(history)], [torch.tensor(scale)]
    recipe.fused_amax_and_scale_update_after_reduction(torch.tensor(amax), histories, scales, algorithm, dtype, margin)
    return histories[0].tolist(), scales[0].tolist()


def test_the_history_rolls_up_and_its_first_row_is_cleared() -> None:
    history, _ = update([5.0], [[5.0], [1.0], [2.0], [3.0]], [1.0])
    assert history == [[0.0], [2.0], [3.0], [5.0]]


def test_the_scale_takes_the_largest_amax_of_the_history_to_the_largest_code() -> None:
    assert update([5.0], [[5.0], [1.0], [8.0], [3.0]], [1.0])[1] == [448.0 / 8.0]
    assert update([5.0], [[5.0], [1.0], [8.0], [3.0]], [1.0], dtype=DType.kFloat8E5M2)[1] == [57344.0 / 8.0]


def test_the_oldest_amax_counts_a_last_time_and_is_dropped() -> None:
    history, scale = update([4.0], [[4.0], [64.0], [2.0]], [1.0])
    assert (history, scale) == ([[0.0], [2.0], [4.0]], [7.0])
    assert update([4.0], history, scale)[1] == [112.0]


def test_most_recent_looks_at_this_iteration_alone() -> None:
    assert update([4.0], [[4.0], [1.0], [8.0]], [1.0], "most_recent")[1] == [112.0]


def test_the_margin_halves_the_scale_once_for_each_unit() -> None:
    assert update([4.0], [[4.0], [0.0]], [1.0], margin=3)[1] == [448.0 / 8 / 4]


def test_the_reduced_amax_replaces_the_local_one() -> None:
    history, scale = update([16.0], [[4.0], [1.0]], [1.0])
    assert (history, scale) == ([[0.0], [16.0]], [28.0])


def test_a_reduced_amax_of_zero_falls_back_on_the_local_one() -> None:
    history, scale = update([0.0], [[4.0], [1.0]], [1.0])
    assert (history, scale) == ([[0.0], [4.0]], [112.0])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_tensor_that_took_no_part_keeps_its_history_and_scale(algorithm: str) -> None:
    history, scale = update([0.0, 2.0], [[0.0, 2.0], [7.0, 1.0], [3.0, 1.0]], [5.0, 5.0], algorithm)
    assert history == [[0.0, 0.0], [7.0, 1.0], [3.0, 2.0]]
    assert scale == [5.0, 224.0]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_an_infinite_amax_keeps_the_scale(algorithm: str) -> None:
    history, scale = update([float("inf")], [[0.0], [1.0]], [5.0], algorithm)
    assert (history, scale) == ([[0.0], [float("inf")]], [5.0])


def test_an_amax_too_small_for_a_quotient_gets_the_largest_scale() -> None:
    assert update([1e-38], [[1e-38], [0.0]], [1.0])[1] == [torch.finfo(torch.float32).max]


def test_a_history_of_one_row_keeps_nothing() -> None:
    assert update([4.0], [[4.0]], [1.0]) == ([[0.0]], [112.0])


def test_each_group_reads_its_own_part_of_the_buffer() -> None:
    histories = [torch.zeros(2, 3), torch.zeros(2, 2)]
    scales = [torch.ones(3), torch.ones(2)]
    buffer = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    recipe.fused_amax_and_scale_update_after_reduction(buffer, histories, scales, "max", DType.kFloat8E4M3, 0)
    assert scales[0].tolist() == [448.0, 224.0, 112.0]
    assert scales[1].tolist() == [56.0, 28.0]


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        update([1.0], [[1.0]], [1.0], "mean")


@given(steps=st.lists(amaxes.filter(lambda amax: amax > 0), min_size=1, max_size=12), length=st.integers(1, 6))
def test_after_any_run_the_scale_follows_from_as_many_amaxes_as_the_history_has_rows(
    steps: list[float], length: int
) -> None:
    history, scale = torch.zeros(length, 1), torch.ones(1)
    for amax in steps:
        recipe.fused_amax_and_scale_update_after_reduction(
            torch.tensor([amax]), [history], [scale], "max", DType.kFloat8E4M3, 0
        )
    newest_first = steps[::-1] + [0.0] * length
    assert history.flatten().tolist()[1:] == newest_first[: length - 1][::-1]
    quotient = torch.tensor(448.0) / torch.tensor(max(newest_first[:length]))
    assert scale.item() == min(quotient.item(), torch.finfo(torch.float32).max)
