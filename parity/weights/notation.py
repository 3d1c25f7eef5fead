"""Weight maps: which parameters of the reference hold which parameters of the TE module, and in which layout.

A map is ``{left: right, ...}``. Left sides name reference parameters, right sides TE parameters; each is a parameter's
name or a term of names, and both sides of an entry pack to the same tensor::

    {
        "norm.weight": "layer_norm_weight",
        stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
        transpose("c_attn.weight"): stack("query_weight", "key_weight", "value_weight"),
    }

Terms nest. Written once, a map carries weights and gradients in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from parity.weights.sides import renamed
from parity.weights.terms import (
    SIDES,
    Constant,
    Copies,
    Experts,
    InterleavedQKV,
    Rearrange,
    Reorder,
    RopeHalves,
    SeparatedQKV,
    Shift,
    Side,
    Stack,
    Term,
    Transpose,
    WeightMapError,
)

WeightMap = Mapping[Side, Side]


def stack(*terms: Side, dim: int = 0) -> Term:
    """The terms one after the other along an existing dimension: gate over up, or Q over K over V.

    Args:
        terms: of equal shape but for ``dim``.
        dim: the dimension along which they follow each other.
    """
    return Stack(_sides("stack", *terms), _dimension("stack", dim))


def experts(*terms: Side) -> Term:
    """``[experts, ...]``: the terms, all of one shape, along a new first dimension; one for each expert."""
    return Experts(_sides("experts", *terms))


def transpose(term: Side) -> Term:
    """The term with its last two dimensions exchanged, e.g. a Conv1D weight ``[in, out]`` as ``[out, in]``."""
    return Transpose(_sides("transpose", term))


def shift(term: Side, by: float) -> Term:
    """The term plus a number: with ``by=-1.0`` on the left, a norm's gain as TE's ``zero_centered_gamma`` stores it.

    In FP64 a shift by 1 of values that were rounded to a narrower dtype is exact, there and back, where their magnitude
    is 0 or between 2**-29 and 2**53 for FP32, 0 or from 2**-45 to 2**53 for BF16, and always for FP16: below, the last
    bits of the value are finer than the last bit of the sum. In the narrower dtype itself it rounds.
    """
    return Shift(_sides("shift", term), _number("shift", by))


def reorder(term: Side, order: tuple[int, ...], dim: int = 0) -> Term:
    """Equal blocks of the term in another order: ``reorder("up_gate.weight", (1, 0))`` has gate over up.

    Args:
        order: block ``order[i]`` of the term becomes block ``i``.
        dim: the dimension that is cut into ``len(order)`` equal blocks.
    """
    if not isinstance(order, Sequence) or not order or set(order) != set(range(len(order))):
        raise WeightMapError(f"reorder() needs each number from 0 to n - 1 once, not {order!r}")
    return Reorder(_sides("reorder", term), tuple(order), _dimension("reorder", dim))


def interleaved_qkv(query: Side, key: Side, value: Side, *, groups: int, head_dim: int) -> Term:
    """Q, K and V as TE fuses them with ``qkv_weight_interleaved=True``, its default.

    The result, viewed as ``[groups, heads / groups + 2, head_dim, ...]``, holds each group's query heads, then its key,
    then its value (TE 2.20, ``MultiheadAttention.forward``). As many groups as heads are plain multi-head attention,
    one group is multi-query attention.

    Args:
        query: weight ``[heads * head_dim, in]`` or bias ``[heads * head_dim]``.
        key: weight or bias with ``groups * head_dim`` rows.
        value: ditto.
        groups: key-value heads, TE's ``num_gqa_groups``.
        head_dim: channels of one head.
    """
    _positive("interleaved_qkv", groups=groups, head_dim=head_dim)
    return InterleavedQKV(_sides("interleaved_qkv", query, key, value), groups, head_dim)


def separated_qkv(term: Side, *, groups: int, head_dim: int) -> Term:
    """All of Q, then K, then V, from a term that ``interleaved_qkv`` describes; the number of heads is found from it.

    E.g. GPT-2's fused weight in TE's: ``{transpose("c_attn.weight"): separated_qkv("qkv.weight", groups=12,
    head_dim=64)}``.
    """
    _positive("separated_qkv", groups=groups, head_dim=head_dim)
    return SeparatedQKV(_sides("separated_qkv", term), groups, head_dim)


def rope_halves(term: Side, *, head_dim: int, rotary_dim: int | None = None) -> Term:
    """Rows of a query or key projection for the halves form of RoPE, from rows for the interleaved form.

    The interleaved form rotates rows ``2i`` and ``2i + 1`` of a head together (Meta's Llama, GPT-J; TE's
    ``interleaved=True``), the halves form rows ``i`` and ``i + rotary_dim / 2`` (Hugging Face's ``rotate_half``; TE's
    default).

    Args:
        term: weight ``[heads * head_dim, in]`` or bias ``[heads * head_dim]``.
        head_dim: channels of one head.
        rotary_dim: channels at a head's start that are rotated, the others stay; None means all.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    _positive("rope_halves", head_dim=head_dim, rotary_dim=rotary)
    if rotary % 2 or rotary > head_dim:
        raise WeightMapError(f"rope_halves() rotates pairs: rotary_dim={rotary} must be even and at most {head_dim}")
    return RopeHalves(_sides("rope_halves", term), head_dim, rotary)


def rearrange(term: Side, pattern: str, **sizes: int) -> Term:
    """The term in another order of its elements or another shape, as ``einops.rearrange`` says it.

    Gate and up in alternate rows, as gate over up: ``rearrange("gate_up.weight", "(ffn two) hidden -> (two ffn)
    hidden", two=2)``. A convolution over patches, as a linear layer: ``rearrange("conv.weight", "out c h w -> out (c h
    w)")``. Fused Q, K and V of each head, as all of Q, then K, then V: ``rearrange("qkv.weight", "(h three d) i ->
    (three h d) i", h=16, three=3)``.

    Args:
        term: a parameter's name or a term.
        pattern: of einops, with the same axes on both sides of its arrow.
        sizes: of axes that do not follow from the shape.
    """
    if not isinstance(pattern, str) or pattern.count("->") != 1:
        raise WeightMapError(f'rearrange() needs a pattern "before -> after" as einops has it, not {pattern!r}')
    _positive("rearrange", **sizes)
    return Rearrange(_sides("rearrange", term), pattern, tuple(sizes.items()))


def copies(*terms: Side) -> Term:
    """TE parameters that all hold the same of the reference's; right sides only.

    A reference whose attention and MLP read one norm (GPT-J, Phi, Cohere) becomes a layer that has two: ``{"ln.weight":
    copies("self_attention.layernorm_qkv.layer_norm_weight", "layernorm_mlp.layer_norm_weight")}``. The reference's
    gradient is compared with the sum of theirs.
    """
    return Copies(_sides("copies", *terms))


def constant(value: float, *shape: int) -> Term:
    """A parameter that the reference lacks and TE has, e.g. ``{constant(0.0, hidden): "fc1_bias"}``; left sides only.

    Its gradient has no counterpart in the reference and is dropped.
    """
    for length in shape:
        if not isinstance(length, Integral) or length < 0:
            raise WeightMapError(f"constant() needs its shape as whole numbers, one after the other, not {length!r}")
    return Constant(_number("constant", value), shape)


def under(weights: WeightMap, reference: str, candidate: str | None = None) -> dict[Side, Side]:
    """The map of a module that lies within another: each name with a prefix.

    A layer's map, written once, serves every layer: ``{left: right for i in range(32) for left, right in under(LAYER,
    f"layers.{i}.").items()}``.

    Args:
        weights: of the module by itself.
        reference: what stands before its parameters' names in the reference, e.g. ``"model.layers.0."``.
        candidate: ditto in the TE model; the same where it is None.
    """
    if not isinstance(weights, Mapping):
        raise WeightMapError(f"under() takes a map {{left: right}}, not {type(weights).__name__}")
    before = reference if candidate is None else candidate
    return {
        renamed(left, lambda name: reference + name): renamed(right, lambda name: before + name)
        for left, right in weights.items()
    }


def _sides(function: str, *terms: Side) -> tuple[Side, ...]:
    for term in terms:
        if not isinstance(term, SIDES):
            raise WeightMapError(f"{function}() takes parameters' names and terms, not {term!r}")
    if not terms:
        raise WeightMapError(f"{function}() needs at least one parameter's name or term")
    return terms


def _number(function: str, value: float) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise WeightMapError(f"{function}() needs a finite number, not {value!r}")
    return float(value)


def _dimension(function: str, dim: int) -> int:
    if not isinstance(dim, int):
        raise WeightMapError(f"{function}(): a dimension is a whole number, not {dim!r}")
    return dim


def _positive(function: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise WeightMapError(f"{function}() needs a positive whole number {name}, not {number!r}")
