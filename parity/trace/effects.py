"""Notice what a module does besides returning outputs.

It may remember something from one call to the next, detach an output, draw random numbers, or write to its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What modules remember from one call to the next, besides parameters and buffers: attributes that a call changes.


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

Attributes = dict[str, tuple[Any, int]]


def attributes_of(module: nn.Module) -> Attributes:
    """Return what each module's own attributes hold now, by ``name of the module.attribute``."""
    return {
        f"{name}.{key}".removeprefix("."): (value, _mark(value))
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in _OF_EVERY_MODULE
    }


def changed_attributes(module: nn.Module, before: Attributes) -> list[str]:
    """Return the names of attributes that are new, or hold something else than before.

    Lists, dicts and sets count as changed where their length is another, tensors where they were written to.
    """
    return [
        name
        for name, (value, mark) in attributes_of(module).items()
        if name not in before or before[name][0] is not value or before[name][1] != mark
    ]


def _mark(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return len(value) if isinstance(value, (list, Mapping, set)) else 0


# Outputs through which gradients flow back in only one of the two modules.
#
# A loss beside a module's other outputs, such as a router's, may add less to every gradient than rounding does: if it
# is detached, no number shows that.


def detached_by_candidate_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Say why a candidate whose numbers are right is not a drop-in replacement; return an empty text if it is.

    Args:
        reference: names of the reference's outputs that require no gradient.
        candidate: names of the candidate's outputs that require no gradient.
    """
    detached = [name for name in candidate if name not in reference]
    if not detached:
        return ""
    names, have, they = (", ".join(detached), *(("have", "they are") if len(detached) > 1 else ("has", "it is")))
    return (
        f"{names} of the candidate {have} no gradient, where the reference's {have} one: {they} detached, or computed "
        "under no_grad, so it trains nothing"
    )


# The state from which PyTorch draws random numbers, and passes that draw other numbers.


_OTHER_SEED = 407


@dataclass(frozen=True)
class RandomState:
    """The state of PyTorch's generators, from which a pass draws its random numbers.

    Attributes:
        cpu: as ``torch.get_rng_state`` returns it.
        gpu: as ``torch.cuda.get_rng_state`` returns it; None without a GPU.
    """

    cpu: Tensor
    gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the present state of the CPU and of the kernels' device."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)

    def is_as(self, other: RandomState) -> bool:
        """Return whether nothing was drawn between the two states, which are of one device."""
        if self.gpu is not None and other.gpu is not None and not torch.equal(self.gpu, other.gpu):
            return False
        return torch.equal(self.cpu, other.cpu)


def kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore the state after the context."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def other_numbers(device: torch.device) -> Iterator[None]:
    """Within the context, random numbers differ from those of a comparison, but are the same each time."""
    with kept(device):
        # Without a GPU, PyTorch would record each seed, with the stack, in case a GPU appears later.
        (torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed)(_OTHER_SEED)
        yield


# Inputs that one of the two modules writes to and the other leaves as they were: outputs alone do not show that.


def written_by_candidate_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Say why a candidate whose numbers are right is not a drop-in replacement; return an empty text if it is.

    Args:
        reference: names of the inputs that the reference changes in place.
        candidate: names of the inputs that the candidate changes in place.
    """
    changed = _only(candidate, reference)
    return changed and (
        f"the candidate changes {changed} in place, which the reference leaves as it was: whatever reads it "
        "afterwards, such as a residual, gets other numbers; let the candidate compute on a copy"
    )


def by_reference_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Say what to know about a reference that writes to its inputs; empty if there is nothing. Arguments as above."""
    changed = _only(reference, candidate)
    return changed and (
        f"the reference changes {changed} in place, which the candidate leaves as it was; no later reader of it was "
        "compared"
    )


def _only(names: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(name for name in names if name not in others)
