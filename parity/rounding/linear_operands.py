"""What the GEMMs of linear layers read of their operands: weights, inputs and gradients in the precision's formats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from parity.formats import hadamard, is_alike_both_ways, largest
from parity.rounding.addresses import address
from parity.rounding.norms_seen import NormsSeen
from parity.rounding.operands_read import OperandsRead
from parity.rounding.parts import OperandPart
from parity.rounding.phase import Phase
from parity.rounding.storing import Storing


class LinearOperands:
    """The linear layers of one pass.

    Args:
        storing: of the pass.
        phase: of the pass.
        norms: that the pass has seen.
        weights: the model's parameters.
        scaled_together, plain, weights_read: as for ``rounded``.
    """

    def __init__(
        self,
        storing: Storing,
        phase: Phase,
        norms: NormsSeen,
        weights: Sequence[Tensor],
        scaled_together: Iterable[Sequence[Tensor]],
        plain: Iterable[Tensor],
        weights_read: OperandsRead,
    ) -> None:
        self._storing, self._phase, self._norms = storing, phase, norms
        self._weights = {address(weight) for weight in weights}
        self._stacks = {address(weight): len(weight) for weight in weights if weight.dim() == 3 and len(weight) > 1}
        self._read_by_experts: set[int] = set()  # addresses of inputs
        self._scaled_together = {address(weight): group for group in scaled_together for weight in group}
        self._plain = {address(weight) for weight in plain}
        self._read_plainly: dict[int, set[int]] = defaultdict(set)  # by inputs' address: plain layers' output channels
        self._gradient: tuple[Tensor, bool] | None = None  # multiplied by a weight last, and whether a plain layer's
        self._inputs: dict[int, Tensor] = {}  # by address; kept so that no address is given out again
        self._read, self._weights_read = OperandsRead(), weights_read
        self.is_plain = False  # of the product whose operands were read last

    def read(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The two as the GEMM reads them; it sums over left's last and right's last but one dimension."""
        self.is_plain = bool(self._plain) and self._are_plain(left, right)
        if self.is_plain:
            return self._storing.operand(left, self._part(left)), self._storing.operand(right, self._part(right))
        is_wgrad = self._phase.backward and not {address(left), address(right)} & self._weights
        is_rotated = is_wgrad and self._storing.rounding.rotate_wgrad
        return self._operand(left, 1, is_rotated), self._operand(right, 0, is_rotated)

    def are_of_experts(self, left: Tensor, right: Tensor) -> bool:
        """Whether a batch of GEMMs is one linear layer of each expert, whose weights are one ``[experts, ...]``."""
        operands = {address(left), address(right)}
        if any(self._stacks.get(at) == len(left) for at in operands):
            if not self._phase.backward:
                self._read_by_experts |= operands - self._stacks.keys()
            return True
        return self._phase.backward and bool(operands & self._read_by_experts)

    def _are_plain(self, left: Tensor, right: Tensor) -> bool:
        """Whether a plain layer multiplies the two: one is its weight, or they give its weight's gradient."""
        operands = {address(left), address(right)}
        is_plain = bool(operands & self._plain)
        if self._phase.backward and operands & self._weights:
            self._gradient = left, is_plain
        elif is_plain:
            self._read_plainly[address(left)].add(right.shape[-1])
        elif self._phase.backward and self._gradient is not None and address(self._gradient[0]) == address(left):
            return self._gradient[1]  # autograd multiplies a result's gradient by the weight, and by the input next
        # Other layers may read the same inputs: a gradient of as many channels is that of the plain layer's result.
        return is_plain or (self._phase.backward and left.shape[-2] in self._read_plainly.get(address(right), ()))

    def _operand(self, x: Tensor, dim: int, is_rotated: bool) -> Tensor:
        if is_matrix(x):
            return self._matrix_operand(x.reshape(x.shape[-2:]), x, dim, is_rotated).reshape(x.shape)
        return torch.stack([self._matrix_operand(matrix, x, dim, is_rotated) for matrix in x])

    def _matrix_operand(self, matrix: Tensor, whole: Tensor, dim: int, is_rotated: bool) -> Tensor:
        """A matrix of the whole tensor as a GEMM reads it; each expert's is a tensor of its own."""
        part = self._part(whole)
        to_format = self._storing.rounding.operand_format(part)

        def read(matrix: Tensor, dim: int) -> Tensor:
            stored = matrix if self._storing.is_stored(whole) else self._storing.store(matrix, part)
            if is_rotated:
                stored = hadamard(stored, dim)
            if to_format is None:
                return stored
            amax = None if is_rotated else self._amax(matrix)
            if self._storing.freedom.dithers and part != "weights":
                return self._storing.dithered_operand(stored, to_format, dim, amax)
            return to_format(stored, dim, amax)

        if is_rotated or self._storing.freedom.jitter is not None or whole.is_inference():
            return read(matrix, dim)
        is_along_dim = not is_alike_both_ways(to_format)
        operands = self._weights_read if part == "weights" else self._read
        return operands.read(matrix, whole._version, dim, read, is_along_dim, part != "gradients")

    def _amax(self, x: Tensor) -> Tensor | None:
        """The magnitude that a tensor's scale comes from; None for the largest that is stored."""
        rounding, freedom = self._storing.rounding, self._storing.freedom
        group = self._scaled_together.get(address(x))
        if group is not None:
            return torch.stack([largest(rounding.store_part(weight.detach(), "weights")) for weight in group]).max()
        if address(x) in self._weights:  # held in the dtype by every port
            return None
        if freedom.jitter is not None and not freedom.dithers:
            return self._storing.jittered_amax(x)
        return None if freedom.stores_pointwise or self._norms.is_result(x) else largest(x)

    def _part(self, x: Tensor) -> OperandPart:
        at = address(x)
        if at in self._weights:
            return "weights"
        if not self._phase.backward:
            self._inputs[at] = x
        return "inputs" if at in self._inputs else "gradients"


def is_matrix(operand: Tensor) -> bool:
    """Attention multiplies in batches; a linear layer has one weight, also where einsum makes it a batch of 1."""
    return operand.dim() == 2 or operand.shape[0] == 1
