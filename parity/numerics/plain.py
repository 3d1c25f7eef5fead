"""Model the roundings of the PyTorch functions that a port calls outside of TransformerEngine.

TE's fused kernels compute in FP32 until they store a result. A port's own lines are not fused: each function rounds
its result, and some round inside. Before a port fails, the rounding model is told which functions it calls.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.numerics.aten import NO_BACKWARD, address
from parity.numerics.freedom import Freedom
from parity.numerics.storing import Storing
from parity.trace.whose import Owner, module_of, whose

# PyTorch's own kernels for operations that TransformerEngine has no kernel for.
#
# These are convolutions, batch and group norms, and pooling. A port holds their operands in the precision's dtype and
# stores their results in it. Their inner precision is up to PyTorch and differs by device, so the model runs them in
# that dtype. On a CPU, a batch norm keeps its statistics in it. On an H100 (torch 2.11), cumulative sums and sums by
# index are kept in it, so that the sum of 4,096 numbers is 6 % off in BF16 (``torch.cumsum``), and a convolution rounds
# before it adds its bias.


_aten = torch.ops.aten

PLAIN_KERNELS = frozenset(
    {
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten.native_batch_norm.default,
        _aten.native_batch_norm_backward.default,
        _aten.cudnn_batch_norm.default,
        _aten.cudnn_batch_norm_backward.default,
        _aten.native_group_norm.default,
        _aten.native_group_norm_backward.default,
        _aten.avg_pool2d.default,
        _aten.avg_pool2d_backward.default,
        _aten._adaptive_avg_pool2d.default,
        _aten._adaptive_avg_pool2d_backward.default,
        _aten.upsample_bilinear2d.default,
        _aten.upsample_bilinear2d_backward.default,
    }
)


# Functions that sum the gradients of functions with other names, such as those that read by index. On a CPU and on an
# H100, the gradient of ``table[tokens]`` is summed in the table's dtype; that of ``F.embedding`` is on a CPU.
_SUMS_GRADIENTS_OF = {
    "index_put": "index",
    "index_add": "index_select",
    "scatter_add": "gather",
    "cumsum": "cumprod",
    "embedding_dense_backward": "embedding",
}


def is_backward_of(name: str, called: Container[str]) -> bool:
    """Return whether an ATen function of a backward pass computes the gradient of a function that a port calls."""
    return name.removesuffix("_backward") in called or _SUMS_GRADIENTS_OF.get(name, name) in called


def as_in(dtype: torch.dtype, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel on tensors cast from FP32 to ``dtype``, and return its result in FP32, not yet stored.

    The result of an in-place kernel is written to its first argument.
    """
    if dtype is torch.float32:
        return kernel(*args, **kwargs)

    def cast(tree: Any, to: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(to) if x.is_floating_point() else x, tree)

    given, named = cast((args, kwargs), dtype)
    try:
        result = cast(kernel(*given, **named), torch.float32)
    except RuntimeError:  # there is no kernel for the dtype, so a port computes in FP32
        return kernel(*args, **kwargs)
    return args[0].copy_(result) if is_in_place(kernel) else result


# Biases that a port adds by itself, for example because TE hands them out (``return_bias``). Then the product is stored
# before the bias is added.


ADDED_BIAS = "bias"
"""Stands for a bias that a port adds to a layer's result, among the names of functions that it calls."""

ADDED_TO_SUM = "bias of a sum"
"""Stands for a bias that a port adds after the residual connection, to ``x + layer(x)``."""


def added_bias(name: str, operands: tuple[Any, ...]) -> set[str]:
    """Return which of these two names apply to a call of an ATen function."""
    if name not in ("add", "add_") or not all(isinstance(x, Tensor) for x in operands[:2]):
        return set()
    some, other = sorted(operands[:2], key=lambda x: x.dim())
    if not some.dim() == 1 < other.dim() or not some.requires_grad or some.shape[0] != other.shape[-1]:
        return set()
    is_of_sum = type(other.grad_fn).__name__ == "AddBackward0"
    return {ADDED_BIAS, ADDED_TO_SUM} if is_of_sum else {ADDED_BIAS}


class BiasesByHand:
    """The linear layers of a pass, rounded like those of a port that adds their biases itself.

    Args:
        storing: how the pass stores tensors.
        freedom: its ``plain`` says whether the port does so.
    """

    def __init__(self, storing: Storing, freedom: Freedom) -> None:
        self._storing = storing
        self.made = ADDED_BIAS in freedom.plain
        self._to_sums = ADDED_TO_SUM in freedom.plain
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # results are kept, so that no address is reused

    def result(self, product: Tensor, bias: Tensor) -> Tensor:
        """Return a linear layer's rounded result, ``[rows, out]``."""
        product = self._storing.store(product)
        result = self._storing.store(product + bias)
        if self._to_sums:
            self._parts[address(result)] = product, bias, result
        return result

    def in_sum(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Return the sum of two activations with the bias of one of them added last, or None if neither has one."""
        for one, other in ((left, right), (right, left)):
            parts = self._parts.get(address(one))
            if parts is not None and parts[0].numel() == one.numel():
                product, bias, _ = parts
                return self._storing.store(self._storing.store(other + product.view_as(one)) + bias)
        return None


# Find the functions of PyTorch that a port calls outside TransformerEngine, in the precision's dtype.


# This module calls ports. If the nearest frame is its own, PyTorch's code is the port, such as a Sequential.
_CALLS_PORTS = "parity.passes.one_pass"
# TE's own lines of PyTorch, each of which rounds like a user's: a softcap divides, takes a tanh and multiplies.
_UNFUSED_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.backends"

# Copies do not round, and attention's softmax has a freedom of its own.
_LEFT_OUT = frozenset({"copy_", "clone", "detach", "_softmax", "_safe_softmax"})


@contextmanager
def plain_calls(dtype: torch.dtype, evaluation: bool = False) -> Iterator[set[str]]:
    """Collect the names of the ATen functions that a port's own code calls on activations within the context.

    The code of TE and parity does not count, except for TE's unfused attention.

    Args:
        dtype: the dtype of the activations that count.
        evaluation: whether the port runs without gradients, which else tell activations from tables of angles. It must
            be built within the context then, so that its buffers are known.
    """
    recorder = _Recorder(dtype, _Constants() if evaluation else None)
    with recorder:
        yield recorder.names


class _Constants:
    """Floating-point tensors that are computed from numbers alone, such as tables of angles and masks."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}  # by address; kept, so that no address is reused

    def see(self, func: Any, operands: Sequence[Any], result: Any) -> None:
        """Note whether the results of a call are constants; what an empty tensor will hold is not known."""
        is_constant = "empty" not in func.overloadpacket.__name__ and not self.lacks_any(operands)
        for x in filter(_is_floating, tree_leaves(result)):
            if is_constant and address(x):
                self._held[address(x)] = x
            else:
                self._held.pop(address(x), None)

    def lacks_any(self, operands: Sequence[Any]) -> bool:
        """Return whether any floating-point tensor among the operands is no constant."""
        return any(_is_floating(x) and (x.requires_grad or address(x) not in self._held) for x in operands)


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def is_in_place(func: Any) -> bool:
    """Return whether an ATen function changes its argument and returns it."""
    return any(value.alias_info is not None and value.alias_info.is_write for value in func._schema.returns)


class _Recorder(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype, constants: _Constants | None) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._dtype = dtype
        self._constants = constants

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        names = {name, *added_bias(name, args)}
        is_new = not names <= self.names and name not in _LEFT_OUT and not func.is_view
        if is_new and self._is_of_activations(func, args) and _is_users(sys._getframe(1)):
            self.names |= names
        result = func(*args, **(kwargs or {}))
        if self._constants is not None and not func.is_view:  # a view shares its tensor's memory
            self._constants.see(func, tree_leaves((args, kwargs)), result)
        return result

    def _is_of_activations(self, func: Any, args: Any) -> bool:
        if self._constants is not None:
            held = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype is self._dtype]
            return self._constants.lacks_any(held)
        if is_in_place(func) and torch._C._current_graph_task_id() == NO_BACKWARD:  # as in a training step
            return any(isinstance(x, Tensor) and x.dim() and x.dtype is self._dtype for x in tree_leaves(args[:1]))
        return any(isinstance(x, Tensor) and x.requires_grad and x.dtype is self._dtype for x in tree_leaves(args))


def _is_users(frame: FrameType | None) -> bool:
    """Return whether the nearest code outside PyTorch and Python is a user's, or counts as a user's."""
    while frame is not None and (owner := whose(frame)) in (Owner.TORCH, Owner.PYTHON):
        frame = frame.f_back
    if frame is None:
        return False
    return owner is Owner.USER or module_of(frame) in (_CALLS_PORTS, _UNFUSED_ATTENTION)


# The roundings of a port's own casts between the precision's dtype and FP32.
#
# Plain lines often compute in FP32: ``x.float()`` passes back a gradient that is rounded to x's dtype, and
# ``.type_as(x)`` passes on a rounded value. Equal numbers, such as a cross-entropy's gradients at the labels, are all
# rounded the same way, and so everything that is computed from them leans. The model runs the reference in FP32, where
# these calls do nothing. So they are watched, to tell tensors that a port holds in FP32 (*wide*) from those that it
# holds in the dtype.


CAST = "_to_copy"
"""ATen's name for a cast."""

_CASTS = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float)
_WIDE = "_parity_is_wide"


class Casts(TorchFunctionMode):
    """A mode under which casts of activations in an FP32 module round as in a module of a 16-bit dtype.

    Args:
        store: rounds to the dtype.
        alone: makes a context in which nothing else is rounded.
    """

    def __init__(self, store: Callable[[Tensor], Tensor], alone: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._store, self._alone = store, alone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if _is_of_activation(x):
            if func in _CASTS:
                return self._round_cast(func, args, kwargs)
            if kwargs.get("dtype") is torch.float32 and not _is_wide(x):
                args = (_mark_wide(_Widened.apply(x, self._stored_alone)), *args[1:])
        result = func(*args, **kwargs)
        if any(_is_wide(given) for given in tree_leaves((args, kwargs))):
            for each in tree_leaves(result):
                _mark_wide(each)
        return result

    def _stored_alone(self, x: Tensor) -> Tensor:
        with self._alone():
            return self._store(x)

    def _round_cast(self, func: Any, args: Any, kwargs: Any) -> Any:
        x, result = args[0], func(*args, **kwargs)
        if not _is_of_activation(result):  # another dtype, or no gradient: PyTorch's own cast is right
            return result
        becomes_wide = _becomes_wide(func, x, (*args[1:], *kwargs.values()))
        if becomes_wide and not _is_wide(x):
            result = _Widened.apply(result, self._stored_alone)
        elif not becomes_wide and _is_wide(x):
            result = _Narrowed.apply(result, self._stored_alone)
        return _mark_wide(result) if becomes_wide else result


def _becomes_wide(func: Any, x: Tensor, asked: tuple[Any, ...]) -> bool:
    """Return whether a port holds the result of a cast in FP32.

    If the cast names another tensor, the result is as wide as that one. A named dtype is FP32 here, whichever it is in
    the port. As nobody casts to the dtype that a tensor has already, it then widens a narrow tensor, or narrows a wide
    one.
    """
    if func is Tensor.float:
        return True
    for one in asked:
        if isinstance(one, Tensor):
            return _is_wide(one)
        if isinstance(one, torch.dtype):
            return not _is_wide(x)
    return _is_wide(x)


class _Narrowed(torch.autograd.Function):
    """A function that rounds a value, and passes its gradient back unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor:
        return store(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Widened(torch.autograd.Function):
    """A function that passes a value on unchanged, and rounds its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.store = store
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.store(gradient), None


def _is_of_activation(x: Any) -> bool:
    """Return whether a value is an FP32 tensor with a gradient, unlike tables of angles and masks."""
    return isinstance(x, Tensor) and x.dtype is torch.float32 and x.requires_grad


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and getattr(x, _WIDE, False)


def _mark_wide(x: Any) -> Any:
    """Mark an FP32 tensor as wide, and return the value."""
    if isinstance(x, Tensor) and x.dtype is torch.float32:
        setattr(x, _WIDE, True)
    return x


# Convolutions whose patches do not overlap, such as ViT's patch embedding and all convolutions with one pixel. Ports
# compute them as linear layers.


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes a linear layer's rounded product of ``[rows, in]`` and ``[in, out]``, plus a bias ``[out]`` if not None."""


def are_patches(
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Return whether a convolution with these arguments of ``aten.convolution`` reads each pixel once."""
    plain = not transposed and groups == 1 and not any(padding) and set(dilation) <= {1}
    return plain and tuple(weight.shape[2:]) == _of_all(stride, weight.dim() - 2)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, patches: Tensor, multiply: Multiply) -> Tensor:
    """Return the convolution's result, ``[batch, out, *spatial]``.

    Args:
        x: ``[batch, channels, *spatial]``.
        weight: ``[out, channels, *kernel]``.
        bias: ``[out]`` or None.
        patches: ``rows_of(x, kernel)``.
        multiply: computes the rounded product.
    """
    spatial = (size // width for size, width in zip(x.shape[2:], weight.shape[2:], strict=True))
    rows = multiply(patches, weight.flatten(1).t(), bias)
    return rows.reshape(x.shape[0], *spatial, len(weight)).movedim(-1, 1)


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, patches: Tensor, wanted: Sequence[bool], multiply: Multiply
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of ``x``, ``weight`` and a bias, each None if not wanted; arguments as for ``forward``."""
    rows = gradient.movedim(1, -1).reshape(-1, gradient.shape[1])
    return (
        from_rows(multiply(rows, weight.flatten(1), None), x.shape, weight.shape[2:]) if wanted[0] else None,
        multiply(rows.t(), patches, None).view_as(weight) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def rows_of(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return ``[batch, channels, *spatial]`` as ``[batch * patches, channels * kernel]``, without remainders."""
    counts = [size // width for size, width in zip(x.shape[2:], kernel, strict=True)]
    for dim, (count, width) in enumerate(zip(counts, kernel, strict=True)):
        x = x.narrow(2 + dim, 0, count * width)
    rank = len(kernel)
    split = x.reshape(*x.shape[:2], *(size for pair in zip(counts, kernel, strict=True) for size in pair))
    patches, within = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    return split.permute(0, *patches, 1, *within).reshape(-1, x.shape[1] * math.prod(kernel))


def from_rows(rows: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """Return the inverse of ``rows_of``, with zeros where no patch was."""
    batch, channels, *spatial = shape
    counts = [size // width for size, width in zip(spatial, kernel, strict=True)]
    rank = len(kernel)
    split = rows.reshape(batch, *counts, channels, *kernel)
    order = [0, 1 + rank, *(dim for i in range(rank) for dim in (1 + i, 2 + rank + i))]
    covered = split.permute(order).reshape(batch, channels, *(c * w for c, w in zip(counts, kernel, strict=True)))
    x = rows.new_zeros(*shape)
    part = x
    for dim, size in enumerate(covered.shape[2:], 2):
        part = part.narrow(dim, 0, size)
    part.copy_(covered)
    return x


def _of_all(values: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(values) * rank if len(values) == 1 else tuple(values)


# Run LSTMs step by step, although PyTorch has a CPU kernel for a whole layer in FP32 (but none in FP16).
#
# This kernel (``mkldnn_rnn_layer``) hides what it computes, so that the rounding model could not round inside. Step by
# step, an LSTM consists of products, sums, sigmoids and tangents, as a GRU always does, in every dtype.


_MKLDNN: Any = torch.backends.mkldnn


@contextmanager
def step_by_step() -> Iterator[None]:
    """Keep ``nn.LSTM`` from calling a kernel for a whole layer on a CPU, within the context.

    This uses hooks, because they run wherever the module does, even if a checkpoint runs it again without any mode.
    """
    before: list[bool] = []  # the former settings, one for each LSTM that is running

    def enter(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.LSTM):
            before.append(_MKLDNN.enabled)
            _MKLDNN.enabled = False

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(module, nn.LSTM):
            _MKLDNN.enabled = before.pop()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
