"""Classify PyTorch's calls as a dispatch mode sees them: what they compute, on which memory, in which pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# PyTorch's calls, as a dispatch mode sees them, grouped by what the rounding model does with them.


_aten = torch.ops.aten

CONVOLUTION = _aten.convolution.default
CONVOLUTION_BACKWARD = _aten.convolution_backward.default
MATRICES, BIASED = _aten.mm.default, _aten.addmm.default
FIRST_OPERAND = {
    MATRICES: 0,
    _aten.bmm.default: 0,
    BIASED: 1,
    _aten.baddbmm.default: 1,
}
SOFTMAX_BACKWARD = _aten._softmax_backward_data.default
SOFTMAX = (_aten._softmax.default, _aten._safe_softmax.default, SOFTMAX_BACKWARD)
POINTWISE = frozenset(
    {
        _aten.mul.Tensor,
        _aten.mul.Scalar,
        _aten.rsub.Scalar,
        _aten.exp.default,
        _aten.softplus.default,
        _aten.softplus_backward.default,
        _aten.silu.default,
        _aten.gelu.default,
        _aten.relu.default,
        _aten.sigmoid.default,
        _aten.silu_backward.default,
        _aten.gelu_backward.default,
        _aten.threshold_backward.default,
        *SOFTMAX,
    }
)
RELU, RELU_IN_PLACE, RELU_BACKWARD = _aten.relu.default, _aten.relu_.default, _aten.threshold_backward.default
HARDSWISH_BACKWARD = _aten.hardswish_backward.default
KINKED_BACKWARD = {
    RELU_BACKWARD: 1,
    HARDSWISH_BACKWARD: 1,
    _aten.hardtanh_backward.default: 1,
    _aten.hardsigmoid_backward.default: 1,
    _aten.leaky_relu_backward.default: 1,
    _aten._prelu_kernel_backward.default: 1,
    _aten.softshrink_backward.default: 1,
    _aten.hardshrink_backward.default: 1,
}
"""Kernels of gradients that jump, and the argument that decides on which side of the jump a value is."""
COMPARISONS = frozenset(
    overload
    for comparison in (_aten.lt, _aten.le, _aten.gt, _aten.ge)
    for overload in (comparison.Scalar, comparison.Tensor)
)
LARGEST, LARGEST_AND_PLACE = _aten.amax.default, _aten.max.dim
INDEXED = frozenset(
    {"max", "min", "argmax", "argmin", "cummax", "cummin", "topk", "sort", "kthvalue", "median", "nanmedian", "mode"}
)
"""Names of functions that return indices of the numbers that they choose along a dimension."""
STEPS = frozenset(
    {"floor", "ceil", "round", "trunc", "frac", "sign", "sgn", "heaviside", "hardshrink", "threshold"}
    | {"floor_divide", "remainder", "fmod"}
)
"""Names of functions of each number that jump."""
OF_EACH = STEPS | {"_to_copy", "bucketize", "searchsorted"}
"""Names of functions of each number; PyTorch does not call all of these pointwise."""
SIGN = (_aten.sgn.default, _aten.sign.default)
EMBEDDING = _aten.embedding.default
RECIPROCAL_ROOT = _aten.rsqrt.default
LAYER_NORM = _aten.native_layer_norm.default
NORMS = (LAYER_NORM, _aten.native_layer_norm_backward.default)
AFFINE = (_aten.mul.Tensor, _aten.add.Tensor)
TABLES = (_aten.cos.default, _aten.sin.default)
SAME_PLACE = POINTWISE | {_aten.where.self, _aten.masked_fill.Scalar, _aten.clone.default}
QUOTIENT, COPY_IN_PLACE = _aten.div.Tensor, _aten.copy_.default
SLICE_BACKWARD = _aten.slice_backward.default
COPIES = frozenset({_aten.clone.default, _aten.cat.default, _aten.stack.default})
REDUCTIONS = (_aten.sum.dim_IntList, _aten.mean.dim)
ELEMENTWISE = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
SUM, SUM_IN_PLACE = _aten.add.Tensor, _aten.add_.Tensor
SUMS = (SUM, SUM_IN_PLACE)
ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "neg", "sum", "mean", "pow", "sqrt", "exp", "reciprocal"})
"""PyTorch computes gradients by these calls if a function has no kernel for its gradient."""


# Identify tensors by their memory, which all views of a tensor share.


def address(x: Tensor) -> int:
    """Return the address of the tensor's memory."""
    return x.untyped_storage().data_ptr()


def addresses(operands: Iterable[Any]) -> set[int]:
    """Return the addresses of the tensors among the operands."""
    return {address(x) for x in operands if isinstance(x, Tensor)}


# Tell the forward pass of a module from its backward pass.


NO_BACKWARD = -1
"""The id that autograd reports when no backward pass is running."""


@dataclass
class Phase:
    """How far a pass under the rounding model has come.

    Attributes:
        backward: whether the backward pass is running; then GEMM operands that the forward pass has not seen are
            gradients.
        suspended: whether the model rounds nothing, because other code does.
    """

    backward: bool = False
    suspended: bool = False

    def begin_backward(self) -> None:
        self.backward = True

    @contextmanager
    def suspending(self) -> Iterator[None]:
        """Keep the model from rounding anything within the context."""
        self.suspended = True
        try:
            yield
        finally:
            self.suspended = False
