"""Stand in for functions of ``torch`` and ``importlib.metadata`` that TransformerEngine's sources call.

``loader.py`` says which name is exchanged for which function, and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from parity.cpu import kernel_choices, tensor_cores

__all__ = ["PackageNotFoundError", "baddbmm", "bmm", "distribution", "fuse", "version"]

# ``torch.compile``, with which TE fuses pointwise code. A compiled fusion reads half-precision tensors into FP32
# registers and rounds once, when it stores its results; run eagerly, the same lines would round after every operation.

_HALF = (torch.float16, torch.bfloat16)


def fuse(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    """Run ``function`` in FP32 and round what it stores; call it as ``torch.compile``.

    What it returns has the dtypes that it has eagerly. An argument that it writes to is written, and one that it
    returns, or a view of one, is that argument's memory.
    """
    if function is None:
        return fuse

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        if not any(_is_half(leaf) for leaf in leaves):
            return function(*args, **kwargs)
        # A run without memory tells which arguments are written to, and what dtype and whose memory results have.
        shapes = _each_once(_to_meta, leaves)
        versions = [shape._version if _is_half(shape) else 0 for shape in shapes]
        args, kwargs = tree_unflatten(shapes, structure)
        stored = function(*args, **kwargs)
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
    """Return what ``change`` makes of each leaf; a tensor that is there twice is changed once."""
    changed = {id(leaf): change(leaf) for leaf in leaves}
    return [changed[id(leaf)] for leaf in leaves]


def _to_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with torch.inference_mode(False):  # whose tensors do not count how often they are written to
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _as_stored(result: Any, like: Any, memory: dict[int, Tensor]) -> Any:
    """Return a result rounded to the dtype that it has eagerly, or the argument whose memory it is."""
    if not isinstance(result, torch.Tensor):
        return result
    owner = memory.get(like.untyped_storage()._cdata)
    if owner is None:
        return result.to(like.dtype)
    if (like.shape, like.stride(), like.storage_offset()) == (owner.shape, owner.stride(), 0):
        return owner
    return owner.as_strided(like.shape, like.stride(), owner.storage_offset() + like.storage_offset())


# The batched products of TE's unfused attention, whose Python calls ``torch.baddbmm`` and ``torch.bmm``.
#
# They are PyTorch's. Under the kernel choice ``attention-16-bit-sums`` those of FP16 and BF16, and the products of
# their gradients, split K and add the parts in that dtype, as cuBLAS may on a GPU, where PyTorch's
# ``allow_fp16_reduced_precision_reduction`` and its like for BF16 are True unless set.


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Compute ``beta * input + alpha * batch1 @ batch2``; parts are added as said above if ``beta`` is 0."""
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


# ``importlib.metadata``. TE imports packages whose kernels run on a GPU alone where it finds their versions, and would
# then call them with tensors that are on the CPU.

_GPU_ONLY = ("flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend")


def version(distribution_name: str) -> str:
    """Return the version of an installed distribution.

    Raises:
        PackageNotFoundError: if it is not installed, or runs on a GPU alone.
    """
    if distribution_name in _GPU_ONLY:
        raise PackageNotFoundError(distribution_name)
    return metadata.version(distribution_name)
