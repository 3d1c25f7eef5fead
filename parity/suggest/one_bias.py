"""Entries where the reference has a weight each for query, key and value, but one bias: all of its parts in turn.

``nn.MultiheadAttention`` with ``kdim`` or ``vdim`` has ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight`` and
``in_proj_bias``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parity.weights.notation import interleaved_qkv, reorder, separated_qkv, stack
from parity.weights.terms import Side

_Entries = tuple[tuple[Side, Side], ...]


def to_three(weights: Sequence[Side], bias: Side, te_weights: Sequence[Side], te_biases: Sequence[Side]) -> _Entries:
    """For TE's query, key and value by themselves."""
    return (*zip(weights, te_weights, strict=True), (bias, stack(*te_biases)))


def to_one(
    weights: Sequence[Side], bias: Side, te_weight: Side, te_bias: Side, heads: Sequence[tuple[int, int]]
) -> Iterator[_Entries]:
    """For TE's fused weight, by group for each of these groups and head dimensions, or one after the other."""
    for groups, head_dim in heads:
        fused = interleaved_qkv(*weights, groups=groups, head_dim=head_dim)
        yield (fused, te_weight), (bias, separated_qkv(te_bias, groups=groups, head_dim=head_dim))
    yield (stack(*weights), te_weight), (bias, te_bias)


def to_query_beside_key_and_value(
    weights: Sequence[Side],
    bias: Side,
    te_weights: tuple[Side, Side],
    te_biases: tuple[Side, Side],
    groups: Sequence[int],
) -> Iterator[_Entries]:
    """For TE's cross-attention, whose key and value are fused: one after the other, or by group."""
    key_value = stack(*weights[1:])
    yield (weights[0], te_weights[0]), (key_value, te_weights[1]), (bias, stack(*te_biases))
    for count in groups:
        by_group = reorder(key_value, tuple(i for group in range(count) for i in (group, count + group)))
        in_turn = reorder(te_biases[1], (*range(0, 2 * count, 2), *range(1, 2 * count, 2)))
        yield (weights[0], te_weights[0]), (by_group, te_weights[1]), (bias, stack(te_biases[0], in_turn))
