"""From which numbers PyTorch draws the next random ones, and passes that draw others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_OTHER_SEED = 407


@dataclass(frozen=True)
class RandomState:
    """The state of PyTorch's generators, from which a pass draws its random numbers.

    Attributes:
        cpu: as ``torch.get_rng_state``.
        gpu: as ``torch.cuda.get_rng_state``; None without a GPU.
    """

    cpu: Tensor
    gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """That of this moment, of the CPU and the kernels' device."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)

    def is_as(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two, which are of one device."""
        if self.gpu is not None and other.gpu is not None and not torch.equal(self.gpu, other.gpu):
            return False
        return torch.equal(self.cpu, other.cpu)


def kept(device: torch.device) -> AbstractContextManager[None]:
    """The state after the context is what it was before it."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def other_numbers(device: torch.device) -> Iterator[None]:
    """Within the context random numbers are others than those of a comparison, the same ones each time."""
    with kept(device):
        # Without a GPU PyTorch would note each seed, and the stack, for the time that there is one.
        (torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed)(_OTHER_SEED)
        yield
