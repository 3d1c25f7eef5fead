"""What is drawn for weights and inputs, and drawn again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parity.passes.draws import Draws


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


class Counted(TorchDispatchMode):
    """Counts what is drawn into tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn += func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
        return func(*args, **kwargs or {})


def test_what_was_drawn_before_is_copied() -> None:
    draws = Draws()
    for drawn in (4, 0):  # a bias has fewer elements than are worth a look, and is drawn each time
        with Counted() as counted, draws.repeated():
            torch.manual_seed(0)
            for module in (nn.Linear(64, 128), nn.Embedding(100, 64)):
                assert module.weight.requires_grad
            torch.empty(8192).uniform_(-1.0, to=1.0)
            nn.init.normal_(torch.empty(8192), 0.0, 2.0)
        assert counted.drawn == drawn + 1


def test_pytorchs_own_methods_stay_what_they_are_and_other_threads_draw_as_ever() -> None:
    before = Tensor.normal_, Tensor.uniform_
    alone = torch.empty(8192).normal_(generator=torch.Generator().manual_seed(3))
    with Draws().repeated(), ThreadPoolExecutor(1) as pool:
        assert (Tensor.normal_, Tensor.uniform_) == before
        with Counted() as counted:
            beside = pool.submit(lambda: torch.empty(8192).normal_(generator=torch.Generator().manual_seed(3)))
            assert torch.equal(beside.result(), alone)
        assert counted.drawn == 0
