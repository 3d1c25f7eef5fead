"""What stands in for ``torch.compile`` in TransformerEngine, which fuses pointwise code with it.

A compiled fusion reads half-precision tensors into FP32 registers and rounds once, when it stores its results; run
eagerly, the same lines would round after every operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_HALF = (torch.float16, torch.bfloat16)


def fuse(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    """Run ``function`` in FP32 and round its results to the dtypes that it has eagerly; call it as `torch.compile`."""
    if function is None:
        return fuse

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        if not any(_is_half(leaf) for leaf in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        stored = function(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        results = function(*tree_map(_to_fp32, args), **tree_map(_to_fp32, kwargs))
        return tree_map(lambda result, like: result.to(like.dtype), results, stored)

    return fused


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _to_meta(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value
