"""Tables of a fixed length, such as masks and cosines, for a sequence that is shorter than the reference's.

TE makes its own mask, and takes as much of a rotary table as it needs. A reference that is called with another
sequence, to see what such a port computes, may hold a table for its own length alone.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ShorterTables(TorchFunctionMode):
    """Within the context, a table is cut to the first positions where it is too long for what it is applied to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if func is F.scaled_dot_product_attention:
                return func(**_shorter_mask(args, kwargs))
            return _with_shorter(func, args, kwargs)


def _with_shorter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of several operands, all as long as the largest needs them; a mask may be larger than scores."""
    tensors = sorted((x for x in args if isinstance(x, Tensor)), key=lambda x: (x.dim(), x.numel()))
    whole = tensors[-1].shape if tensors else ()
    try:
        return func(*_shorter(args, tuple(whole)), **kwargs)
    except RuntimeError:
        if len(tensors) != 2 or not all(map(_is_square, tensors)):
            raise
        return func(*_shorter(args, tuple(tensors[0].shape)), **kwargs)


def _shorter(args: tuple[Any, ...], whole: tuple[int, ...]) -> list[Any]:
    return [_cut(x, whole) if isinstance(x, Tensor) else x for x in args]


def _is_square(x: Tensor) -> bool:
    """Whether it may be scores of a sequence with itself, or a mask of them."""
    return x.dim() > 2 and x.shape[-1] == x.shape[-2]


def _shorter_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(given.get("attn_mask"), Tensor):
        scores = (*given["query"].shape[:-1], given["key"].shape[-2])
        given["attn_mask"] = _cut(given["attn_mask"], scores)
    return given


def _cut(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As much of the tensor as broadcasts to the shape."""
    for dim in range(-min(x.dim(), len(shape)), 0):
        if 1 < shape[dim] < x.shape[dim]:
            x = x.narrow(dim, 0, shape[dim])
    return x
