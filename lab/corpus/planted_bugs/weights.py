"""Weights in the wrong layout, in the wrong place, or missing."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from lab.corpus.planting import (
    Bug,
    Call,
    Change,
    both,
    called,
    constructed_with,
    exchanged,
    heads_of,
    left_sides,
    left_sides_of,
    parameter,
    parameter_filled,
)
from parity.case.case import Pair
from parity.case.weight_map import (
    InterleavedQKV,
    RopeHalves,
    Shift,
    Side,
    Stack,
    interleaved_qkv,
    reorder,
    stack,
    transpose,
)
from parity.measuring.hosts.attention import QKV

GATED = ("swiglu_mlp", "llama_layer")


def _is_gate_and_up(side: Side) -> bool:
    return isinstance(side, Stack) and len(side.parts) == 2


def _halves_interleaved(pair: Pair) -> Change:
    shapes = {name: tensor.shape for name, tensor in pair.reference.named_parameters()}
    ffn = next(shape[0] for name, shape in shapes.items() if name.endswith("gate_proj.weight"))
    order = tuple(row for i in range(ffn) for row in (i, ffn + i))
    return lambda left: reorder(left, order) if _is_gate_and_up(left) else left


def _interleaved(pair: Pair) -> Change:
    heads = heads_of(pair)
    fused = interleaved_qkv(*QKV, groups=heads.groups, head_dim=heads.head_dim)
    return lambda left: fused if isinstance(left, Stack) else left


def _value_over_key(left: Side) -> Side:
    if not isinstance(left, (Stack, InterleavedQKV)) or len(left.parts) != 3:
        return left
    query, key, value = left.parts
    return dataclasses.replace(left, parts=(query, value, key))


def _head_rows_transposed(pair: Pair) -> Change:
    """Read rows as ``[head_dim, heads, hidden]`` although they are ``[heads, head_dim, hidden]``."""
    heads = heads_of(pair)
    order = tuple(head * heads.head_dim + i for i in range(heads.head_dim) for head in range(heads.heads))
    return parameter("q_proj.weight", lambda left: reorder(left, order))


def _output_for_reversed_heads(pair: Pair) -> Change:
    order = tuple(reversed(range(heads_of(pair).heads)))
    return parameter("o_proj.weight", lambda left: reorder(left, order, dim=1))


def _heads_dealt_to_groups(pair: Pair) -> Change:
    """Let query head i share the key-value head ``i % groups`` instead of ``i // (heads / groups)``."""
    heads = heads_of(pair)
    order = tuple(head for group in range(heads.groups) for head in range(group, heads.heads, heads.groups))
    rows = parameter("q_proj.weight", lambda left: reorder(left, order))
    columns = parameter("o_proj.weight", lambda left: reorder(left, order, dim=1))
    return lambda left: columns(rows(left))


def _with_bias_again(call: Call) -> Call:
    def mistaken(module: nn.Module, *inputs: Tensor) -> Tensor:
        bias = next(tensor for name, tensor in module.named_parameters() if name in ("bias", "fc2_bias"))
        return call(module, *inputs) + bias

    return mistaken


BUGS = (
    Bug(
        "gate-up-swapped",
        "fc1_weight holds up over gate.",
        GATED,
        left_sides(lambda left: Stack(left.parts[::-1]) if isinstance(left, Stack) and _is_gate_and_up(left) else left),
        "gate-up-swapped",
    ),
    Bug(
        "fc1-halves-interleaved",
        "fc1_weight holds gate and up row by row in turns.",
        GATED,
        left_sides_of(_halves_interleaved),
        "gate-up-interleaved",
    ),
    Bug(
        "qkv-stacked-for-interleaved",
        "The fused QKV weight is Q over K over V where TE wants each group's Q, K and V together.",
        ("interleaved_qkv_attention",),
        left_sides(lambda left: stack(*left.parts) if isinstance(left, InterleavedQKV) else left),
        "qkv-layout",
    ),
    Bug(
        "qkv-interleaved-for-stacked",
        "The fused QKV weight is interleaved by group where qkv_weight_interleaved=False wants Q over K over V.",
        ("stacked_qkv_attention",),
        left_sides_of(_interleaved),
        "qkv-layout",
    ),
    Bug(
        "key-value-swapped-in-fused-weight",
        "The fused QKV weight holds V before K.",
        ("interleaved_qkv_attention",),
        left_sides(_value_over_key),
        "key-value-swapped",
    ),
    Bug(
        "key-value-swapped",
        "key_weight holds V and value_weight holds K.",
        ("attention", "llama_layer"),
        exchanged("k_proj.weight", "v_proj.weight"),
        "parameters-exchanged",
    ),
    Bug(
        "norms-exchanged",
        "The norms in front of attention and of the MLP have each other's weight.",
        ("llama_layer",),
        exchanged("attention_norm.weight", "mlp.norm.weight"),
        "parameters-exchanged",
    ),
    Bug(
        "heads-transposed",
        "The query weight's rows are ordered channel by channel where TE has them head by head.",
        ("attention", "gpt_layer"),
        left_sides_of(_head_rows_transposed),
        "heads-transposed",
    ),
    Bug(
        "gqa-heads-dealt-out",
        "Key-value heads are tiled over the query heads where each is repeated for neighbours.",
        ("attention", "llama_layer"),
        left_sides_of(_heads_dealt_to_groups),
        "gqa-head-order",
    ),
    Bug(
        "output-projection-on-permuted-heads",
        "The output projection reads the heads in reverse order.",
        ("attention", "gpt_layer"),
        left_sides_of(_output_for_reversed_heads),
        "heads-permuted",
    ),
    Bug(
        "square-weight-transposed",
        "A square weight is [in, out], as Conv1D of GPT-2 keeps it.",
        ("square_linear",),
        left_sides(parameter("weight", transpose)),
        "weight-transposed",
    ),
    Bug(
        "output-projection-transposed",
        "The square output projection of attention is [in, out].",
        ("attention", "gpt_layer"),
        left_sides(parameter("o_proj.weight", transpose)),
        "weight-transposed",
    ),
    Bug(
        "gamma-not-shifted",
        "zero_centered_gamma=True, but the norm's weight was copied as it is.",
        ("zero_centered_rmsnorm",),
        left_sides(lambda left: left.parts[0] if isinstance(left, Shift) else left),
        "gamma-shift",
    ),
    Bug(
        "gamma-zero-centred-unawares",
        "zero_centered_gamma=True where the weights were trained without.",
        ("norm_linear", "swiglu_mlp"),
        constructed_with(zero_centered_gamma=True),
        "gamma-shift",
    ),
    Bug(
        "rope-weights-not-permuted",
        "Weights for Meta's interleaved RoPE were copied into a halves RoPE without permuting their rows.",
        ("meta_rope_attention",),
        left_sides(lambda left: left.parts[0] if isinstance(left, RopeHalves) else left),
        "rope-layout",
    ),
    Bug(
        "bias-dropped",
        "return_bias=True, and the caller does not add the bias.",
        ("linear", "gelu_mlp"),
        both(constructed_with(return_bias=True), called(lambda call: lambda module, *inputs: call(module, *inputs)[0])),
        "bias-dropped",
    ),
    Bug(
        "bias-added-twice",
        "The module adds its bias, and the caller does so again.",
        ("linear", "gelu_mlp"),
        called(_with_bias_again),
        "bias-added-twice",
    ),
    Bug(
        "norm-weight-not-copied",
        "The norm's weight stayed 1.",
        ("norm_linear", "swiglu_mlp"),
        parameter_filled("layer_norm_weight", 1.0),
        "weight-not-copied",
    ),
    Bug(
        "norm-bias-not-copied",
        "The norm's bias stayed 0.",
        ("norm_linear", "gelu_mlp"),
        parameter_filled("layer_norm_bias", 0.0),
        "weight-not-copied",
    ),
)
