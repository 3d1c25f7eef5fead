"""What a precision rounds: operands to formats, stored results to a dtype, and which of these roundings are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from parity.formats import Format

OperandPart = Literal["weights", "inputs", "gradients"]
Part = Literal["weights", "inputs", "gradients", "storage", "attention"]
PARTS: frozenset[Part] = frozenset(get_args(Part))


@dataclass(frozen=True)
class Rounding:
    """What a precision rounds.

    Attributes:
        storage: dtype of stored activations, gradients and GEMM results.
        inputs: format of a linear layer's inputs in its GEMMs; None for ``storage``.
        weights: ditto of its weights.
        gradients: ditto of the gradients with respect to its outputs.
        rotate_wgrad: whether the two operands of a weight gradient's GEMM are rotated by Hadamard matrices first, which
            cancel in the product.
        parts: which roundings are made. ``weights``, ``inputs`` and ``gradients`` are those of a linear layer's
            operands, ``attention`` those of the operands of attention's batched GEMMs and of its scores; ``storage``
            those of other stored results: of linear layers, of attention, of sums, and of the module.
    """

    storage: torch.dtype
    inputs: Format | None = None
    weights: Format | None = None
    gradients: Format | None = None
    rotate_wgrad: bool = False
    parts: frozenset[Part] = PARTS

    def store(self, x: Tensor) -> Tensor:
        """``x`` as it reads after having been stored in the precision's dtype; integers and complex numbers stay."""
        return x if x.dtype == self.storage or not x.is_floating_point() else x.to(self.storage).to(x.dtype)

    def store_part(self, x: Tensor, part: Part = "storage") -> Tensor:
        """As ``store``, if the part's roundings are made."""
        return self.store(x) if part in self.parts else x

    def operand_format(self, part: OperandPart) -> Format | None:
        """The format of a linear layer's operand; None if it stays as it is stored."""
        if part not in self.parts:
            return None
        return {"weights": self.weights, "inputs": self.inputs, "gradients": self.gradients}[part]
