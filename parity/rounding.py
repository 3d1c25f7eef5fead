"""The model of what a faithful port rounds: plain PyTorch in FP32, with the roundings of a precision put in.

The model runs the reference itself under a dispatch mode, so it knows nothing of TE and shares no code with the kernels
that it judges (``parity.cpu``). What it rounds, and why:

* both operands of every linear layer's GEMM, forward and backward, to the precision's GEMM formats: TF32 for FP32
  (``common/gemm/cublaslt_gemm.cu`` of TE 2.20 always chooses ``CUBLAS_COMPUTE_32F_FAST_TF32``), and for FP8 recipes
  E4M3 forward and E5M2 for gradients, scaled by the tensor's largest magnitude (``recipe.Format.HYBRID``);
* the result of every GEMM, which is stored in the precision's dtype; accumulation is FP32;
* the operands of attention's batched GEMMs to the dtype alone: TE computes attention in it under every recipe;
* the sum of two activations of one shape (a residual stream, RoPE), which is stored as well.

Everything between two GEMMs (norms, activations, softmax, biases) stays in FP32, as TE's fused kernels compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

Format = Callable[[Tensor], Tensor]


def TF32(x: Tensor) -> Tensor:
    """FP32 values rounded to nearest with 10 mantissa bits, by Veltkamp's splitting; |x| < 2^114.

    Source: T. J. Dekker, "A floating-point technique for extending the available precision", 1971, section 5.
    """
    scaled = x * (2.0**13 + 1.0)
    return scaled - (scaled - x)


def E4M3(x: Tensor) -> Tensor:
    """Values of float8_e4m3fn, scaled by the tensor's largest magnitude."""
    return _scaled_cast(x, torch.float8_e4m3fn)


def E5M2(x: Tensor) -> Tensor:
    """Values of float8_e5m2, scaled by the tensor's largest magnitude."""
    return _scaled_cast(x, torch.float8_e5m2)


def _scaled_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    scale = torch.where(amax > 0, torch.finfo(dtype).max / amax, torch.ones_like(amax))
    return (x * scale).to(dtype).to(x.dtype) / scale


@dataclass(frozen=True)
class Rounding:
    """What a precision rounds.

    Attributes:
        storage: dtype of stored activations, gradients and GEMM results.
        forward: format of a linear layer's inputs and weights in its GEMMs; None for ``storage``.
        backward: format of output gradients in its GEMMs; None for ``storage``.
    """

    storage: torch.dtype
    forward: Format | None = None
    backward: Format | None = None

    def store(self, x: Tensor) -> Tensor:
        """``x`` as it reads after having been stored in the precision's dtype."""
        return x if x.dtype == self.storage else x.to(self.storage).to(x.dtype)


@contextmanager
def rounded(rounding: Rounding) -> Iterator[Phase]:
    """Within the context, FP32 PyTorch code rounds as a faithful kernel at the precision does.

    Yields:
        The phase, to be told where the backward pass begins.
    """
    mode = _RoundingMode(rounding)
    with sdpa_kernel(SDPBackend.MATH), mode:
        yield mode.phase


@dataclass
class Phase:
    """Whether the backward pass runs; GEMM operands that the forward pass has not seen are gradients then."""

    backward: bool = False

    def begin_backward(self) -> None:
        self.backward = True


class _RoundingMode(TorchDispatchMode):
    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self.rounding = rounding
        self.phase = Phase()
        self._forward_operands: dict[int, Tensor] = {}  # by address; kept so that no address is given out again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        position = _FIRST_OPERAND.get(func)
        if position is not None:
            left, right = args[position], args[position + 1]
            operand = self._linear_operand if _is_linear_layer(left, right) else self.rounding.store
            args = (*args[:position], operand(left), operand(right), *args[position + 2 :])
            return self.rounding.store(func(*args, **kwargs))
        if func in _SUMS and _are_activations(args[:2]):
            stored = self.rounding.store(func(*args, **kwargs))
            return args[0].copy_(stored) if func is _SUM_IN_PLACE else stored
        return func(*args, **kwargs)

    def _linear_operand(self, x: Tensor) -> Tensor:
        address = x.untyped_storage().data_ptr()
        if not self.phase.backward:
            self._forward_operands[address] = x
        is_gradient = self.phase.backward and address not in self._forward_operands
        to_format = self.rounding.backward if is_gradient else self.rounding.forward
        stored = self.rounding.store(x)
        return stored if to_format is None else to_format(stored)


_aten = torch.ops.aten
_FIRST_OPERAND = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
_SUM_IN_PLACE = _aten.add_.Tensor
_SUMS = (_aten.add.Tensor, _SUM_IN_PLACE)


def _is_linear_layer(left: Tensor, right: Tensor) -> bool:
    """Attention multiplies in batches; a linear layer has one weight, also where einsum makes it a batch of 1."""
    return left.dim() == 2 or left.shape[0] == 1


def _are_activations(operands: tuple[Any, ...]) -> bool:
    return (
        len(operands) == 2
        and all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in operands)
        and operands[0].shape == operands[1].shape
    )
