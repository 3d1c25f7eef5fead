"""Runs PyTorch's scaled dot-product attention by blocks of queries where its scores would not fit into memory."""

from __future__ import annotations

import inspect
import math
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from parity.golden.band import Band
from parity.golden.blocked_attention import EXACT, Arithmetic, are_too_many_scores, attention

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias


def attention_in_blocks(arithmetic: Arithmetic = EXACT) -> TorchFunctionMode:
    """Within the context, long calls of ``F.scaled_dot_product_attention`` and of ``attention`` run in blocks.

    Other ways to write attention stay as they are: a reference that multiplies queries and keys itself holds every
    score. So does a call with dropout, of nested tensors, or with a mask of a class of its own.

    Args:
        arithmetic: what is rounded in them.
    """
    return _InBlocks(arithmetic)


class _InBlocks(TorchFunctionMode):
    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is attention:
            return attention(*args[:-1], arithmetic=self._arithmetic)
        if func is F.scaled_dot_product_attention:
            call = SDPA.bind(*args, **kwargs)
            call.apply_defaults()
            is_served = _is_served(**call.arguments)
            if is_served and not (self._arithmetic is EXACT and _is_linear_already(**call.arguments)):
                return _scaled_dot_product(**call.arguments, arithmetic=self._arithmetic)
        return func(*args, **kwargs)


def _signature(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    """Of PyTorch's function, which is built in and has none."""


SDPA = inspect.signature(_signature)


def _is_served(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    **_: Any,
) -> bool:
    """Whether the call has too many scores and is one that blocks compute; what PyTorch refuses is left to it."""
    dimensions = {x.dim() for x in (query, key, value)}
    if query.is_nested or len(dimensions) > 1 or query.dim() < 2 or not are_too_many_scores(query, key):
        return False
    heads, *groups = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    shares = groups[0] == groups[1] and (groups[0] in (1, heads) or (enable_gqa and heads % groups[0] == 0))
    if attn_mask is not None and (is_causal or attn_mask.dim() > query.dim()):
        return False
    knows_mask = attn_mask is None or type(attn_mask) in (Tensor, torch.nn.Parameter) or _is_causal_bias(attn_mask)
    return knows_mask and dropout_p == 0.0 and shares and query.dtype == key.dtype == value.dtype


def _is_causal_bias(mask: Tensor | None) -> TypeGuard[CausalBias]:
    """Whether it is of PyTorch's class, whose import takes most of a second: whoever has one has imported it."""
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(mask, bias.CausalBias)


def _is_linear_already(attn_mask: Tensor | None, **call: Any) -> bool:
    """Whether PyTorch has a kernel that holds no matrix of scores, as the CPU's for FP64; it is faster than blocks."""
    if _is_causal_bias(attn_mask):
        return False
    return SDPBackend(torch._fused_sdp_choice(attn_mask=attn_mask, **call)) is not SDPBackend.MATH


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    arithmetic: Arithmetic,
    **_: Any,
) -> Tensor:
    band = Band(right=0) if is_causal else Band()
    if _is_causal_bias(attn_mask):
        from torch.nn.attention.bias import CausalVariant

        lower_right = attn_mask.variant is CausalVariant.LOWER_RIGHT
        band = Band(right=attn_mask.seq_len_kv - attn_mask.seq_len_q if lower_right else 0)
        attn_mask = None
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if arithmetic is not EXACT:
        # A model of rounding sees that PyTorch multiplies both operands by the scale's root, keys anew for each head.
        root = math.sqrt(abs(scale))
        key = _repeated(key, query) * root
        query, scale = query * math.copysign(root, scale), 1.0
    return attention(query, key, value, attn_mask, band, scale, 0.0, arithmetic)


def _repeated(key: Tensor, query: Tensor) -> Tensor:
    """Each group's key for every head of the group."""
    if query.dim() < 3 or key.shape[-3] == query.shape[-3]:
        return key
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
