"""What is drawn for weights and inputs, and drawn again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parity.draws import Draws


def built(draws: Draws, seed: int) -> tuple[list[Tensor], Tensor]:
    """What modules hold that are built from a seed, and the number that is drawn next."""
    torch.manual_seed(seed)
    with draws.repeated():
        modules = nn.Linear(64, 128), nn.Embedding(100, 64), nn.Linear(128, 64)
        scale = torch.randn(8192)  # by no method of a tensor
        weight = nn.init.trunc_normal_(torch.empty(128, 64).t(), std=0.02)
    held = [parameter for module in modules for parameter in module.parameters()]
    return [x.detach() for x in (*held, scale, weight)], torch.rand(())


def test_modules_that_are_built_again_hold_the_same_to_the_bit() -> None:
    draws = Draws()
    without, following = built(Draws(), 0)
    for _ in range(2):
        held, drawn_next = built(draws, 0)
        assert all(torch.equal(x, y) for x, y in zip(held, without, strict=True))
        assert torch.equal(drawn_next, following)


def test_what_is_written_to_a_weight_does_not_come_again() -> None:
    draws = Draws()
    first, _ = built(draws, 0)
    before = [x.clone() for x in first]
    for x in first:
        x.zero_()
    again, _ = built(draws, 0)
    assert all(torch.equal(x, y) for x, y in zip(again, before, strict=True))


def test_another_seed_draws_other_numbers() -> None:
    draws = Draws()
    one, _ = built(draws, 0)
    other, _ = built(draws, 1)
    assert not any(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_generator_of_its_own_gives_what_its_own_state_does() -> None:
    with Draws().repeated():
        generators = [torch.Generator().manual_seed(seed) for seed in (0, 0, 1)]
        one, same, other = (torch.empty(8192).normal_(generator=generator) for generator in generators)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_outside_of_the_context_tensors_are_filled_as_ever() -> None:
    before = Tensor.normal_
    with Draws().repeated():
        assert Tensor.normal_ is not before
    assert Tensor.normal_ is before
