"""Probing inputs: rows that Gaussian inputs never have."""

import math

import pytest
import torch

from parity.case.case import Rng
from parity.passes.draws import LARGEST, SMALLEST, probe

INPUTS = Rng(0).normal(4, 32, 64)


def test_rows_have_every_magnitude_between_the_smallest_and_the_largest():
    rms = probe(INPUTS, Rng(1)).square().mean(-1).sqrt().flatten().sort().values
    assert rms[0] < 10 * SMALLEST
    assert rms[-1] > LARGEST / 2
    steps = rms.log10().diff()
    assert steps.max() < 0.5


def test_a_third_of_the_rows_is_far_from_zero_and_a_third_has_a_single_value():
    rows = probe(INPUTS, Rng(1)).flatten(0, 1)
    single = (rows != 0).sum(-1) == 1
    shifted = rows.mean(-1) > 2 * rows.std(-1)
    assert int(single.sum()) == pytest.approx(len(rows) / 3, abs=1)
    assert int(shifted.sum()) == pytest.approx(len(rows) / 3, abs=1)


def test_rows_of_padding_stay_or_become_a_single_value():
    padded = INPUTS.clone()
    padded[:, ::4] = 0.0
    rows = probe(padded, Rng(1))[:, ::4].flatten(0, 1)
    values = (rows != 0).sum(-1)
    assert set(values.tolist()) == {0, 1}


def test_the_drawn_inputs_stay_as_they_are():
    before = INPUTS.clone()
    probe(INPUTS, Rng(1))
    assert torch.equal(INPUTS, before)


@pytest.mark.parametrize(
    "kept",
    [
        torch.ones(4, 8, dtype=torch.bool),
        torch.arange(8),
        torch.ones(8),
        torch.tensor([[0.0, -math.inf]]),
        torch.ones(4, 8),
    ],
    ids=["mask", "positions", "vector", "additive mask", "constant rows"],
)
def test_what_is_no_activation_is_not_changed(kept):
    activation, other = probe((INPUTS, kept), Rng(1))
    assert not torch.equal(activation, INPUTS)
    assert other is kept


def test_the_same_seed_gives_the_same_probe():
    assert torch.equal(probe(INPUTS, Rng(1)), probe(INPUTS, Rng(1)))
    assert not torch.equal(probe(INPUTS, Rng(1)), probe(INPUTS, Rng(2)))
