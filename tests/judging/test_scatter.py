"""Whether drawn runs show that few roundings decide how large an error is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parity.judge.statistics import scatters
from parity.numerics.errors import Summed

RUNS, TOKENS, WIDTH = 16, 8, 128


def drawn(make) -> list[Summed]:
    generator = torch.Generator().manual_seed(0)
    return [Summed(make(generator)) for _ in range(RUNS)]


def normal(*shape: int):
    return lambda generator: torch.randn(*shape, dtype=torch.float64, generator=generator)


def one_row_is_moved(generator: torch.Generator) -> Tensor:
    """A single number moves all of the first row beside many small roundings, as a saturated softmax's score does."""
    error = normal(TOKENS, WIDTH)(generator)
    error[0] += 2.0 * torch.randn(1, dtype=torch.float64, generator=generator)
    return error


def mean_of_moved_rows(generator: torch.Generator) -> Tensor:
    return one_row_is_moved(generator).expand(1, TOKENS, WIDTH).mean(1)


@pytest.mark.parametrize("shape", [(32,), (TOKENS, WIDTH), (1, WIDTH), (4, 8, 16)])
def test_independent_roundings_of_many_elements_do_not_scatter(shape):
    assert not scatters(drawn(normal(*shape)))


def test_a_row_that_one_rounding_moves_scatters():
    assert scatters(drawn(one_row_is_moved))


def test_a_sum_of_rows_scatters_though_others_hide_the_one_that_does():
    assert scatters(drawn(mean_of_moved_rows))


def test_kinds_of_kernels_that_lose_unequally_are_no_scatter():
    runs = drawn(normal(TOKENS, WIDTH))
    assert not scatters([Summed(run.values * (1.0 + 0.5 * (index % 2))) for index, run in enumerate(runs)])


def test_few_or_infinite_runs_tell_nothing():
    runs = drawn(one_row_is_moved)
    infinite = Summed(torch.full((TOKENS, WIDTH), torch.inf, dtype=torch.float64))
    assert not scatters([*runs[:3], infinite, infinite])
