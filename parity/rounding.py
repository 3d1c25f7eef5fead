"""The model of what a faithful port rounds: plain PyTorch in FP32, with the roundings of a precision put in.

The model runs the reference itself under a dispatch mode, so it knows nothing of TE and shares no code with the kernels
that it judges (``parity.cpu``). What it rounds, and why:

* both operands of every linear layer's GEMM, forward and backward, to the precision's formats: TF32 for FP32
  (``common/gemm/cublaslt_gemm.cu`` of TE 2.20 always chooses ``CUBLAS_COMPUTE_32F_FAST_TF32``), and what a recipe of
  ``transformer_engine.common.recipe`` quantizes inputs, weights and output gradients to;
* the result of every GEMM, which is stored in the precision's dtype; accumulation is FP32;
* the operands of attention's batched GEMMs to the dtype alone: TE computes attention in it under every recipe;
* the sum of two activations of one shape (a residual stream, RoPE), which is stored as well.

Everything between two GEMMs (norms, activations, softmax, biases) stays in FP32, as TE's fused kernels compute it.

Each rounding belongs to one of ``PARTS``, and a model may be told to make those of some parts alone. With none, what is
left is FP32 arithmetic: its sums, and what lies between GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from parity.formats import Format, hadamard

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
            operands, ``attention`` those of attention's batched GEMMs, operands and results; ``storage`` those of other
            stored results: of linear layers, of sums, and of the module.
    """

    storage: torch.dtype
    inputs: Format | None = None
    weights: Format | None = None
    gradients: Format | None = None
    rotate_wgrad: bool = False
    parts: frozenset[Part] = PARTS

    def store(self, x: Tensor) -> Tensor:
        """``x`` as it reads after having been stored in the precision's dtype."""
        return x if x.dtype == self.storage else x.to(self.storage).to(x.dtype)

    def store_part(self, x: Tensor, part: Part = "storage") -> Tensor:
        """As ``store``, if the part's roundings are made."""
        return self.store(x) if part in self.parts else x

    def operand_format(self, part: OperandPart) -> Format | None:
        """The format of a linear layer's operand; None if it stays as it is stored."""
        if part not in self.parts:
            return None
        return {"weights": self.weights, "inputs": self.inputs, "gradients": self.gradients}[part]


@dataclass
class Phase:
    """Whether the backward pass runs; GEMM operands that the forward pass has not seen are gradients then."""

    backward: bool = False

    def begin_backward(self) -> None:
        self.backward = True


@contextmanager
def rounded(rounding: Rounding, weights: Iterable[Tensor] = ()) -> Iterator[Phase]:
    """Within the context, FP32 PyTorch code rounds as a faithful kernel at the precision does.

    Args:
        rounding: what is rounded.
        weights: the model's parameters.

    Yields:
        The phase, to be told where the backward pass begins.
    """
    mode = _RoundingMode(rounding, weights)
    with sdpa_kernel(SDPBackend.MATH), mode:
        yield mode.phase


class _RoundingMode(TorchDispatchMode):
    def __init__(self, rounding: Rounding, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.rounding = rounding
        self.phase = Phase()
        self._weights = {_address(weight) for weight in weights}
        self._inputs: dict[int, Tensor] = {}  # by address; kept so that no address is given out again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        position = _FIRST_OPERAND.get(func)
        if position is not None:
            left, right = args[position], args[position + 1]
            is_linear = _is_linear_layer(left)
            operands = (self._linear_operands if is_linear else self._attention_operands)(left, right)
            args = (*args[:position], *operands, *args[position + 2 :])
            return self.rounding.store_part(func(*args, **kwargs), "storage" if is_linear else "attention")
        if func in _SUMS and _are_activations(args[:2]):
            stored = self.rounding.store_part(func(*args, **kwargs))
            return args[0].copy_(stored) if func is _SUM_IN_PLACE else stored
        return func(*args, **kwargs)

    def _attention_operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.rounding.store_part(left, "attention"), self.rounding.store_part(right, "attention")

    def _linear_operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The two as the GEMM reads them; it sums over left's last and right's last but one dimension."""
        is_wgrad = self.phase.backward and not {_address(left), _address(right)} & self._weights
        operands = []
        for x, dim in ((left, 1), (right, 0)):
            part = self._part(x)
            matrix = self.rounding.store_part(x, part).reshape(x.shape[-2:])
            if is_wgrad and self.rounding.rotate_wgrad:
                matrix = hadamard(matrix, dim)
            to_format = self.rounding.operand_format(part)
            operands.append((matrix if to_format is None else to_format(matrix, dim)).reshape(x.shape))
        return operands[0], operands[1]

    def _part(self, x: Tensor) -> OperandPart:
        address = _address(x)
        if address in self._weights:
            return "weights"
        if not self.phase.backward:
            self._inputs[address] = x
        return "inputs" if address in self._inputs else "gradients"


_aten = torch.ops.aten
_FIRST_OPERAND = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
_SUM_IN_PLACE = _aten.add_.Tensor
_SUMS = (_aten.add.Tensor, _SUM_IN_PLACE)


def _address(x: Tensor) -> int:
    """Views of one tensor share it."""
    return x.untyped_storage().data_ptr()


def _is_linear_layer(operand: Tensor) -> bool:
    """Attention multiplies in batches; a linear layer has one weight, also where einsum makes it a batch of 1."""
    return operand.dim() == 2 or operand.shape[0] == 1


def _are_activations(operands: tuple[Any, ...]) -> bool:
    return (
        len(operands) == 2
        and all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in operands)
        and operands[0].shape == operands[1].shape
    )
