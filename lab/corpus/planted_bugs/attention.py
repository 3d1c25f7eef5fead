"""Attention with the wrong mask, scale or heads, and rotary position embeddings of the wrong form."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from lab.corpus.planting import (
    STORED_IN_16_BITS,
    Bug,
    Call,
    Plant,
    both,
    called,
    constructed_with,
    edited,
    parameter_filled,
    with_argument,
    with_inputs,
)
from parity.case.case import Pair
from parity.measuring.hosts.attention import WINDOW, TELongAttention, slopes
from parity.measuring.hosts.host import construction_of
from parity.measuring.hosts.layer import TEModel
from parity.numerics.formats import tf32

# Rotary position embeddings with the wrong form, base, position or precision.


SELF_ATTENTION = ("attention", "llama_layer")
RIGHT_BASE, WRONG_BASE = 10_000.0, 500_000.0


def _rope(change: Callable[[Tensor], object]) -> Plant:
    """Change the argument ``rotary_pos_emb``, ``[seq, 1, 1, head_dim]``, which has the phases twice in a row."""
    return with_argument("rotary_pos_emb", change)


def _of_wrong_base(phases: Tensor) -> Tensor:
    """Return the phases for the wrong base, given that each frequency is a power of the base."""
    frequencies = phases[1].double()
    ratio = torch.log(torch.tensor(WRONG_BASE)) / torch.log(torch.tensor(RIGHT_BASE))
    positions = torch.arange(phases.shape[0], dtype=torch.float64, device=phases.device)[:, None, None, None]
    return (positions * frequencies**ratio).to(phases.dtype)


def _half(phases: Tensor) -> Tensor:
    """Return the phases of ``rotary_percent=0.5``, for half of the channels and with the frequencies for that many."""
    quarter = phases[..., : phases.shape[-1] // 2 : 2]
    return torch.cat((quarter, quarter), dim=-1)


def _whole(phases: Tensor) -> Tensor:
    """Return phases for all channels, where only half of them should be rotated."""
    head_dim = 2 * phases.shape[-1]
    positions = torch.arange(phases.shape[0], device=phases.device)
    half = _right_phases(positions, head_dim)
    return torch.cat((half, half), dim=-1)[:, None, None, :]


def _right_phases(positions: Tensor, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    return positions.float()[:, None] / RIGHT_BASE**exponents


def _long(phases: Callable[[TELongAttention, Tensor], Tensor]) -> Plant:
    def edit(module: nn.Module) -> None:
        assert isinstance(module, TELongAttention)
        module.phases = lambda positions: phases(module, positions)

    return edited(edit)


def _make_submodule(module: nn.Module) -> None:
    assert isinstance(module, TEModel)
    module.rope = module.frequencies.func  # type: ignore[assignment]


LONG = ("long_context_attention",)
ROPE_BUGS = (
    Bug(
        "rope-interleaved-for-halves",
        "RoPE rotates neighbouring channels together, as in Meta's Llama, where the reference rotates halves.",
        ("attention",),
        both(
            constructed_with(rotary_pos_interleaved=True),
            _rope(lambda phases: phases[..., : phases.shape[-1] // 2].repeat_interleave(2, dim=-1)),
        ),
        "rope-layout",
    ),
    Bug(
        "rope-interleaved-on-the-layer-alone",
        "rotary_pos_interleaved=True for the layer, and phases as of halves.",
        ("attention",),
        constructed_with(rotary_pos_interleaved=True),
        "rope-layout",
    ),
    Bug("rope-base-wrong", "RoPE's base is 500,000 for 10,000.", SELF_ATTENTION, _rope(_of_wrong_base), "rope-base"),
    Bug(
        "rope-keys-one-position-late",
        "Keys are rotated by the position after theirs; queries are not.",
        SELF_ATTENTION,
        _rope(lambda phases: (phases, phases + phases[1])),
        "rope-position",
    ),
    Bug("rope-partial", "rotary_percent=0.5: half of the channels stay.", SELF_ATTENTION, _rope(_half), "rope-partial"),
    Bug(
        "rope-of-all-channels",
        "rotary_percent was never passed: all channels are rotated, where the reference rotates half of them.",
        ("partial_rope_attention",),
        _rope(_whole),
        "rope-partial",
    ),
    Bug(
        "rope-on-queries-alone",
        "Keys are not rotated.",
        SELF_ATTENTION,
        _rope(lambda phases: (phases, torch.zeros_like(phases))),
        "rope-one-side",
    ),
    Bug(
        "rope-on-keys-alone",
        "Queries are not rotated.",
        ("attention",),
        _rope(lambda phases: (torch.zeros_like(phases), phases)),
        "rope-one-side",
    ),
    Bug(
        "rope-applied-twice",
        "Queries and keys are rotated twice.",
        SELF_ATTENTION,
        _rope(lambda x: 2 * x),
        "rope-twice",
    ),
    Bug(
        "rope-missing",
        "rotary_pos_emb was never passed.",
        SELF_ATTENTION,
        _rope(lambda phases: None),
        "rope-missing",
    ),
    Bug(
        "rope-frequencies-in-bf16",
        "model.to(bfloat16) rounded inv_freq before it was multiplied by positions.",
        LONG,
        _long(
            lambda module, positions: (
                positions.float()[:, None] * module.frequencies(positions.device).bfloat16().float()
            )
        ),
        "rope-precision",
    ),
    Bug(
        "rope-cast-with-the-model",
        "RoPE is a submodule, whose frequencies model.to(bfloat16) rounds (TransformerEngine issue 1245).",
        ("tied_model",),
        edited(_make_submodule),
        "rope-precision",
        precisions=STORED_IN_16_BITS,
    ),
    Bug(
        "rope-phases-in-bf16",
        "Phases are stored in BF16 (TransformerEngine issue 1245).",
        LONG,
        _long(lambda module, positions: module.right_phases(positions).bfloat16().float()),
        "rope-precision",
    ),
    Bug(
        "rope-positions-in-tf32",
        "Positions and frequencies were multiplied in TF32, which rounds positions past 2,048 (transformers 48428).",
        LONG,
        _long(lambda module, positions: tf32(positions.float())[:, None] * tf32(module.frequencies(positions.device))),
        "rope-precision",
    ),
    Bug(
        "rope-base-of-short-context",
        "RoPE's base is 10,000 for 500,000.",
        LONG,
        _long(lambda module, positions: _right_phases(positions, module.head_dim)),
        "rope-base",
    ),
)


# Attention's scale, masks, window and softcap.


CORE = ("causal_attention",)
LAYER_NUMBER = 12


def _scale(scale: Callable[[int], float]) -> Plant:
    """Multiply queries so that the scores' scale is ``scale(head_dim)``."""

    def change(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        head_dim = query.shape[-1]
        return query * (scale(head_dim) * math.sqrt(head_dim)), key, value

    return with_inputs(change)


def _with_scale(scale: Callable[[int], float]) -> Plant:
    """Give the candidate another ``softmax_scale``."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        _, head_dim = construction_of(pair.candidate).args
        return constructed_with(softmax_scale=scale(head_dim))(pair, te)

    return plant


def _next_key_visible(call: Call) -> Call:
    """Make the mask with ``diagonal=2`` instead of 1, so that each query also sees the key after it."""

    def mistaken(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ones = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
        return module(query, key, value, attention_mask=ones.triu(2)[None, None], attn_mask_type="arbitrary")

    return mistaken


def _own_key_hidden(call: Call) -> Call:
    """Hide each query's own key (``diagonal=0``), except for the first query, which has no other key."""

    def mistaken(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).triu(0)
        mask[0, 0] = False
        return module(query, key, value, attention_mask=mask[None, None], attn_mask_type="arbitrary")

    return mistaken


def _heads_tiled(call: Call) -> Call:
    """Let query head i share the key-value head ``i % groups``."""

    def mistaken(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, groups = query.shape[2], key.shape[2]
        order = torch.arange(heads, device=query.device).view(-1, groups).t().flatten()
        context = call(module, query[:, :, order], key, value).unflatten(-1, (heads, -1))
        return context[:, :, order.argsort()].flatten(2)

    return mistaken


def _slopes_reversed(call: Call) -> Call:
    """Pass the slopes in another implementation's order, with the smallest first."""

    def mistaken(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        alibi_slopes = slopes(query.shape[2]).flip(0).to(query.device)
        return module(query, key, value, core_attention_bias_type="alibi", alibi_slopes=alibi_slopes)

    return mistaken


ATTENTION_BUGS = (
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
    Bug(
        "alibi-missing",
        "No bias was passed.",
        ("alibi_attention",),
        called(lambda call: lambda module, query, key, value: module(query, key, value)),
        "attention-bias",
    ),
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
        # The gradient ignores the rounding.
        with_inputs(lambda *tensors: tuple(tensor + (tf32(tensor.detach()) - tensor.detach()) for tensor in tensors)),
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
