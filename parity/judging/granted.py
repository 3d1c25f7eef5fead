"""Grant what kernels may do that leans, along the change that it makes and nowhere else.

Some faithful kernels change all results in one direction: those that cut TF32 operands shrink every product, and a
tensor core's short sums lose the low bits of terms of one sign (``parity.rounding.kernel_choices``). To expect an
error of that size everywhere would hide mistakes of that size. So the rounding model runs once more as such a kernel
does: what it computes differently is a direction, and what the candidate's error contains of it is taken out before
the rest is judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.summed import Summed

# A kernel may do it in one product and not in the next, and somewhat more than the model of it does.
_MOST = 1.25
# An error that contains more of the change than that is not made by such kernels.
_TOO_MUCH = 2.0
# What the model of it may be off by, of the change, in each element: instructions that add fewer products at a time, or
# promote sums at other lengths.
_UNSURE = 0.25
_FEWEST_ELEMENTS = 32
# A kernel does it in a whole product: some tensor contains much of the change, or none does but by chance, as where a
# mistake happens to lean alike. Of several products in a row of which one does it, this much is left.
_EVIDENCE = 0.3
# Of the expected error: what less is granted is as good as nothing.
_NOTHING = 0.05


@dataclass(frozen=True)
class Granted:
    """What is granted to one tensor's error.

    Attributes:
        index: of the kernels' run that explains most of the error.
        coefficient: how much of its change the error contains, 0 to 1.25.
        norm: of what is granted.
        max_abs: the largest element of what is granted.
        left: the error without it.
        models: errors to be expected beside the models' own, as the change is not known exactly.
    """

    index: int
    coefficient: float
    norm: float
    max_abs: float
    left: Summed
    models: tuple[Summed, Summed]

    @property
    def is_evidence(self) -> bool:
        """Return whether kernels that lean are the likely cause."""
        return self.coefficient >= _EVIDENCE and self.left.values.numel() >= _FEWEST_ELEMENTS


def grant(error: Summed, base: Summed, kernels: Sequence[Summed]) -> Granted | None:
    """Take out of an error what one of several kinds of kernels makes of it.

    Args:
        error: candidate minus golden.
        base: the rounding model's, with kernels that do nothing of the kind.
        kernels: the rounding model's with each kind of kernel, otherwise as ``base``.

    Returns:
        None where next to nothing is to be granted, or where something is not finite.
    """
    if not all(x.is_finite for x in (error, base, *kernels)):
        return None
    found = [_granted(index, error, base, one) for index, one in enumerate(kernels)]
    told = [one for one in found if one is not None]
    return min(told, key=lambda one: one.left.norm, default=None)


def _granted(index: int, error: Summed, base: Summed, kernel: Summed) -> Granted | None:
    dtype = torch.promote_types(error.values.dtype, kernel.values.dtype)
    change = kernel.values.to(dtype) - base.values
    norm = torch.linalg.vector_norm(change).item()
    if norm == 0.0 or not math.isfinite(norm):
        return None
    contained = _contained(error.values.to(dtype), base.values.to(dtype), change)
    if not 0.0 < contained <= _TOO_MUCH or contained * norm <= _NOTHING * base.norm:
        return None
    coefficient = min(contained, _MOST)
    change *= coefficient
    # Of several products, some of which do it and others not, the share is what is known, and not which: each is a
    # toss whose standard deviation that is.
    unsure = max(_UNSURE, math.sqrt(max(1.0 - coefficient, 0.0) / coefficient)) * change
    left = Summed(error.values - change)
    if left.norm >= error.norm:
        return None
    models = Summed(base.values + unsure), Summed(base.values - unsure)
    return Granted(index, coefficient, coefficient * norm, change.abs().max().item(), left, models)


def _contained(error: Tensor, base: Tensor, change: Tensor) -> float:
    """Return how much of the change an error contains that has a part in common with the model's.

    The two are told apart by regressing on both at once: the change goes from roundings that the model made, and an
    error without these contains as little of one as of the other.
    """
    if change.numel() < _FEWEST_ELEMENTS:  # too few to tell the two apart
        return float(torch.dot((error - base).flatten(), change.flatten()) / change.square().sum())
    known = torch.stack([change.flatten(), base.flatten()])
    known = known[known.square().sum(-1) > 0]
    products, with_error = known @ known.T, known @ error.flatten()
    return float(torch.linalg.lstsq(products.double(), with_error.double()[:, None]).solution[0])
