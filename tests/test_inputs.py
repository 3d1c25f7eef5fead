"""Seeded random inputs."""

import torch

from parity.case.case import Rng


def test_a_seed_gives_the_same_tensors_again():
    assert torch.equal(Rng(7).normal(4, 8), Rng(7).normal(4, 8))


def test_seeds_and_purposes_give_independent_streams():
    draws = [Rng(seed, purpose).normal(1000) for seed in (0, 1) for purpose in ("inputs", "weights")]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert correlations.abs().max() < 0.15


def test_tensors_of_one_stream_differ():
    rng = Rng(0)
    assert not torch.equal(rng.normal(8), rng.normal(8))


def test_draws_stay_in_their_range():
    rng = Rng(0)
    assert rng.uniform(1000, low=-2, high=3).min() >= -2
    assert set(rng.integers(1000, low=1, high=4).tolist()) == {1, 2, 3}
    assert sorted(rng.permutation(16).tolist()) == list(range(16))
