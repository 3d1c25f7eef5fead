"""Attention's scale, masks, window and softcap."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from parity.case.case import Pair
from parity.lab.zoo.hosts.core_attention import WINDOW, slopes
from parity.lab.zoo.planting import (
    Bug,
    Call,
    Plant,
    called,
    constructed_with,
    construction_of,
    parameter_filled,
    with_argument,
    with_inputs,
)
from parity.numerics.formats import tf32

CORE = ("causal_attention",)
LAYER_NUMBER = 12


def _scale(scale: Callable[[int], float]) -> Plant:
    """Queries are multiplied so that the scores' scale is ``scale(head_dim)``."""

    def change(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        head_dim = query.shape[-1]
        return query * (scale(head_dim) * math.sqrt(head_dim)), key, value

    return with_inputs(change)


def _with_scale(scale: Callable[[int], float]) -> Plant:
    """``softmax_scale`` is another one."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        _, head_dim = construction_of(pair.candidate).args
        return constructed_with(softmax_scale=scale(head_dim))(pair, te)

    return plant


def _next_key_visible(call: Call) -> Call:
    """Return a port whose mask is made with ``diagonal=2`` where 1 is due: each query also sees the key after it."""

    def mistaken(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ones = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
        return module(query, key, value, attention_mask=ones.triu(2)[None, None], attn_mask_type="arbitrary")

    return mistaken


def _own_key_hidden(call: Call) -> Call:
    """``diagonal=0``: no query sees its own key, but for the first, which has no other."""

    def mistaken(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).triu(0)
        mask[0, 0] = False
        return module(query, key, value, attention_mask=mask[None, None], attn_mask_type="arbitrary")

    return mistaken


def _heads_tiled(call: Call) -> Call:
    """Query head i shares the key-value head ``i % groups``."""

    def mistaken(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, groups = query.shape[2], key.shape[2]
        order = torch.arange(heads, device=query.device).view(-1, groups).t().flatten()
        context = call(module, query[:, :, order], key, value).unflatten(-1, (heads, -1))
        return context[:, :, order.argsort()].flatten(2)

    return mistaken


def _without_alibi(call: Call) -> Call:
    return lambda module, query, key, value: module(query, key, value)


def _slopes_reversed(call: Call) -> Call:
    """The slopes are in the order of another implementation, the smallest first."""

    def mistaken(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        alibi_slopes = slopes(query.shape[2]).flip(0).to(query.device)
        return module(query, key, value, core_attention_bias_type="alibi", alibi_slopes=alibi_slopes)

    return mistaken


def _tf32_operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rounded to TF32, with a gradient as if they were not."""
    return tuple(tensor + (tf32(tensor.detach()) - tensor.detach()) for tensor in tensors)


BUGS = (
    Bug("softmax-scale-missing", "softmax_scale=1.", CORE, _with_scale(lambda d: 1.0), "softmax-scale"),
    Bug(
        "softmax-scale-1-over-d",
        "softmax_scale is 1/d for 1/sqrt(d).",
        CORE,
        _with_scale(lambda d: 1 / d),
        "softmax-scale",
    ),
    Bug(
        "softmax-scale-twice",
        "The query projection's output was scaled by 1/sqrt(d), and TE scales the scores again.",
        CORE,
        _scale(lambda d: 1 / d),
        "softmax-scale",
    ),
    Bug(
        "query-key-layer-scaling",
        "Scores are divided by the layer's number, 12, and never multiplied by it again.",
        CORE,
        _with_scale(lambda d: 1 / (math.sqrt(d) * LAYER_NUMBER)),
        "softmax-scale",
    ),
    Bug("causal-mask-missing", "attn_mask_type='no_mask'.", CORE, constructed_with(attn_mask_type="no_mask"), "mask"),
    Bug(
        "causal-mask-missing-in-a-layer",
        "self_attn_mask_type='no_mask'.",
        ("gpt_layer", "llama_layer"),
        constructed_with(self_attn_mask_type="no_mask"),
        "mask",
    ),
    Bug(
        "causal-mask-on-a-bidirectional-model",
        "TE's default mask, causal, where the reference attends to each key that is not padding.",
        ("padded_attention",),
        constructed_with(attn_mask_type="padding_causal"),
        "mask",
    ),
    Bug(
        "causal-mask-in-the-wrong-corner",
        "attn_mask_type='causal' aligns the mask top-left where the last query stands at the last key.",
        ("cached_attention",),
        constructed_with(attn_mask_type="causal"),
        "mask-corner",
    ),
    Bug(
        "causal-mask-sees-the-next-key",
        "The mask's diagonal is one too far right.",
        CORE,
        called(_next_key_visible),
        "mask",
    ),
    Bug(
        "causal-mask-hides-the-own-key",
        "The mask's diagonal is one too far left.",
        CORE,
        called(_own_key_hidden),
        "mask",
    ),
    Bug(
        "mask-polarity-inverted",
        "True means attend, as in F.scaled_dot_product_attention, where TE masks out what is True.",
        ("padded_attention",),
        with_argument("attention_mask", torch.logical_not),
        "mask-polarity",
    ),
    Bug(
        "padding-mask-ignored",
        "attn_mask_type='no_mask', so that padding is attended to.",
        ("padded_attention",),
        constructed_with(attn_mask_type="no_mask"),
        "padding-mask",
    ),
    Bug(
        "window-one-too-wide",
        "The window has one key too many.",
        ("window_attention",),
        constructed_with(window_size=(WINDOW + 1, 0)),
        "window",
    ),
    Bug(
        "window-one-too-narrow",
        "The window counts the query's own key, as Mistral's does, where TE's does not.",
        ("window_attention",),
        constructed_with(window_size=(WINDOW - 1, 0)),
        "window",
    ),
    Bug(
        "window-missing",
        "window_size was never passed.",
        ("window_attention",),
        constructed_with(window_size=None),
        "window",
    ),
    Bug(
        "window-where-there-is-none",
        "A sliding window, as other layers of the model have one.",
        CORE,
        constructed_with(window_size=(WINDOW, 0)),
        "window",
    ),
    Bug(
        "sinks-not-loaded",
        "softmax_offset keeps the zeros with which TE begins.",
        ("sink_attention",),
        parameter_filled("softmax_offset", 0.0),
        "weight-not-copied",
    ),
    Bug("alibi-missing", "No bias was passed.", ("alibi_attention",), called(_without_alibi), "attention-bias"),
    Bug(
        "alibi-slopes-reversed",
        "The heads' slopes are in the reverse order.",
        ("alibi_attention",),
        called(_slopes_reversed),
        "attention-bias",
    ),
    Bug(
        "softcap-missing", "softcap was never passed.", ("softcap_attention",), constructed_with(softcap=0.0), "softcap"
    ),
    Bug(
        "gqa-heads-tiled",
        "Key-value heads are tiled over the query heads.",
        CORE,
        called(_heads_tiled),
        "gqa-head-order",
    ),
    Bug(
        "attention-in-tf32",
        "Attention's products in TF32 where PyTorch's FP32 is promised.",
        CORE,
        with_inputs(_tf32_operands),
        "tf32",
        precisions=("fp32",),
    ),
    Bug(
        "attention-dropout-left-on",
        "attention_dropout=0.1, the default of TE's layers.",
        CORE,
        constructed_with(attention_dropout=0.1),
        "dropout",
    ),
)
