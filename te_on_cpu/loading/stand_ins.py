"""Replacements for functions of ``torch`` and ``importlib.metadata`` that TransformerEngine's sources call.

A table in ``loader.py`` says which function replaces which name, and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from te_on_cpu import kernel_choices, tensor_cores

__all__ = ["PackageNotFoundError", "baddbmm", "bmm", "distribution", "fuse", "version"]

# ``torch.compile``, with which TE fuses pointwise code. A compiled fusion reads half-precision tensors into FP32
# registers and rounds once, when it stores its results. The same lines, run eagerly, would round after every operation.

_HALF = (torch.float16, torch.bfloat16)


def fuse(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    """Make ``function`` compute in FP32 and round only its results; has the parameters of ``torch.compile``.

    Results have the same dtypes as in eager mode. Arguments are written to as in eager mode, and a result that is an
    argument, or a view of one, shares its memory.
    """
    if function is None:
        return fuse

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        columns = _columns(leaves)
        if columns == 0 and not any(_is_half(leaf) for leaf in leaves):
            return function(*args, **kwargs)
        # A run on meta tensors shows which arguments are written to, and the dtypes and the shared memory of results.
        shapes = _each_once(_to_meta, leaves)
        versions = [shape._version if _is_half(shape) else 0 for shape in shapes]
        metas = tree_unflatten(shapes, structure)
        with _Operations() as operations:
            stored = function(*metas[0], **metas[1])
        results = tree_leaves(stored)
        if columns and operations.keep_columns_apart and all(_has_columns(result, columns) for result in results):
            return _by_columns(function, leaves, structure, stored, columns)
        if not any(_is_half(leaf) for leaf in leaves):
            return function(*args, **kwargs)
        exact = _each_once(_to_fp32, leaves)
        args, kwargs = tree_unflatten(exact, structure)
        results = function(*args, **kwargs)
        for leaf, shape, version, value in zip(leaves, shapes, versions, exact, strict=True):
            if _is_half(leaf) and shape._version != version:
                leaf.copy_(value)
        memory = {
            shape.untyped_storage()._cdata: leaf for leaf, shape in zip(leaves, shapes, strict=True) if _is_half(leaf)
        }
        return tree_map(lambda result, like: _as_stored(result, like, memory), results, stored)

    return fused


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _each_once(change: Callable[[Any], Any], leaves: list[Any]) -> list[Any]:
    """Apply ``change`` to each leaf, but only once to a tensor that occurs twice."""
    changed = {id(leaf): change(leaf) for leaf in leaves}
    return [changed[id(leaf)] for leaf in leaves]


def _to_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with torch.inference_mode(False):  # inference tensors have no version counter
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _as_stored(result: Any, like: Any, memory: dict[int, Tensor]) -> Any:
    """Return a result rounded to its dtype in eager mode, or the argument, or a view of it, whose memory it shares."""
    if not isinstance(result, torch.Tensor):
        return result
    owner = memory.get(like.untyped_storage()._cdata)
    if owner is None:
        return result.to(like.dtype)
    if (like.shape, like.stride(), like.storage_offset()) == (owner.shape, owner.stride(), 0):
        return owner
    return owner.as_strided(like.shape, like.stride(), owner.storage_offset() + like.storage_offset())


# A fusion keeps intermediate results in a GPU's registers. Here, if no column depends on another, large tensors are
# computed some columns at a time, so that intermediate results stay in the caches.

_ELEMENTS_AT_ONCE = 1 << 18
_STEP = 64  # for multiples of this, PyTorch's order of sums over rows does not depend on the number of columns
_aten = torch.ops.aten


def _columns(leaves: list[Any]) -> int:
    """Return the number of columns of the arguments; 0 if they are small, need gradients, or do not agree."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    largest = max(tensors, key=torch.Tensor.numel, default=None)
    if largest is None or largest.numel() <= 4 * _ELEMENTS_AT_ONCE or largest.shape[-1] < 2 * _STEP:
        return 0
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return 0
    columns = largest.shape[-1]
    fit = all(tensor.dim() == 0 or tensor.shape[-1] in (1, columns) for tensor in tensors)
    return columns if fit and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors) else 0


class _Operations(TorchDispatchMode):
    """Observes whether a function computes each column independently, in new memory.

    Attributes:
        keep_columns_apart: whether all operations so far do so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keep_columns_apart = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        is_sum_over_rows = func is _aten.sum.dim_IntList and args[0].dim() == 2 and list(args[1]) == [0]
        is_kept = is_pointwise or is_sum_over_rows or func is _aten._to_copy.default
        self.keep_columns_apart &= is_kept and not func._schema.is_mutable
        return func(*args, **(kwargs or {}))


def _has_columns(result: Any, columns: int) -> bool:
    return isinstance(result, torch.Tensor) and result.dim() > 0 and result.shape[-1] == columns


def _by_columns(function: Callable[..., Any], leaves: list[Any], structure: TreeSpec, stored: Any, columns: int) -> Any:
    """Compute the function in FP32, some columns at a time, and return results with the dtypes of ``stored``."""
    made = tree_map(lambda like: torch.empty_strided(like.shape, like.stride(), dtype=like.dtype), stored)
    rows = max(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) // columns
    step = max(_STEP, _ELEMENTS_AT_ONCE // rows // _STEP * _STEP)
    for start in range(0, columns, step):
        own = slice(start, start + step)
        args, kwargs = tree_unflatten([_to_fp32(_part(leaf, own, columns)) for leaf in leaves], structure)
        results = tree_leaves(function(*args, **kwargs))
        for whole, part in zip(tree_leaves(made), results, strict=True):
            whole[..., own] = part
    return made


def _part(leaf: Any, own: slice, columns: int) -> Any:
    return leaf[..., own] if _has_columns(leaf, columns) else leaf


# The batched products of TE's unfused attention, whose Python calls ``torch.baddbmm`` and ``torch.bmm``.
#
# They are PyTorch's by default. With the kernel choice ``attention-16-bit-sums``, products of FP16 and BF16, and those
# of their gradients, split K and add the parts in that dtype. cuBLAS may do the same on a GPU, where PyTorch's
# ``allow_fp16_reduced_precision_reduction`` and its counterpart for BF16 are True by default.


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Compute ``beta * input + alpha * batch1 @ batch2``; K is only split, as described above, if ``beta`` is 0."""
    if beta == 0.0 and _splits(batch1):
        return _SplitProduct.apply(batch1, batch2, alpha)
    return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """Compute ``input @ mat2``, ``[batch, n, m]`` of ``[batch, n, k]`` and ``[batch, k, m]``."""
    return _SplitProduct.apply(input, mat2, 1.0) if _splits(input) else torch.bmm(input, mat2)


def _splits(operand: Tensor) -> bool:
    return (
        operand.dtype in tensor_cores.SIXTEEN_BIT and kernel_choices.ATTENTION_16_BIT_SUMS in kernel_choices.current()
    )


class _SplitProduct(torch.autograd.Function):
    """``alpha * a @ b``; its backward pass is that of ``torch.baddbmm``, which applies ``alpha`` after rounding."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.alpha = alpha
        return _product(a, b, alpha)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        of_a = _product(gradient, b.transpose(1, 2)).mul_(ctx.alpha) if ctx.needs_input_grad[0] else None
        of_b = _product(a.transpose(1, 2), gradient).mul_(ctx.alpha) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None


def _product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    def partial(part: slice) -> Tensor:
        return torch.bmm(a[:, :, part].float(), b[:, part].float()).mul_(alpha)

    return tensor_cores.added(partial, a.shape[2], a.dtype)


# ``importlib.metadata``. TE imports packages with GPU-only kernels if it finds their versions, and would then call them
# with tensors that are on the CPU.

_GPU_ONLY = ("flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend")


def version(distribution_name: str) -> str:
    """Return the version of an installed distribution.

    Raises:
        PackageNotFoundError: if it is not installed, or runs only on a GPU.
    """
    if distribution_name in _GPU_ONLY:
        raise PackageNotFoundError(distribution_name)
    return metadata.version(distribution_name)
