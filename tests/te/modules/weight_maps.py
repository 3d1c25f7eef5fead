"""Map the parameters of ``plain``'s modules to TransformerEngine's, in every layout that TE offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import parity
from parity.case.weight_map import WeightMap

Projections = Literal["separate", "interleaved", "concatenated"]
"""Q, K and V have a parameter each, are fused head by head (TE's default when it fuses), or one after the other."""


def kinds(bias: bool = True) -> tuple[str, ...]:
    """Return the kinds of parameters that a linear layer has."""
    return ("weight", "bias") if bias else ("weight",)


def norm_weights(normalization: str, plain: str, te: str, zero_centered: bool = False) -> WeightMap:
    """Map a norm's parameters.

    Args:
        plain: prefix of the plain norm's parameters.
        te: prefix of TE's, e.g. ``layer_norm_``.
        zero_centered: whether TE stores the gain minus 1.
    """
    gain = parity.shift(f"{plain}weight", by=-1.0) if zero_centered else f"{plain}weight"
    bias = {f"{plain}bias": f"{te}bias"} if normalization == "LayerNorm" else {}
    return {gain: f"{te}weight"} | bias


def mlp_weights(plain: str = "", te: str = "", bias: bool = True) -> WeightMap:
    """Map the parameters of ``plain.MLP`` to ``LayerNormMLP``'s."""
    layers = (("first", "fc1"), ("second", "fc2"))
    return {f"{plain}{first}.{kind}": f"{te}{second}_{kind}" for first, second in layers for kind in kinds(bias)}


def self_attention_weights(
    groups: int,
    head_dim: int,
    projections: Projections = "separate",
    plain: str = "",
    te: str = "",
    bias: bool = True,
    normed: bool = False,
) -> WeightMap:
    """Map the parameters of ``plain.Attention`` to ``MultiheadAttention``'s, which includes the norm if ``normed``."""
    module = f"{te}layernorm_qkv." if normed else f"{te}qkv."
    weights: WeightMap = {f"{plain}out.{kind}": f"{te}proj.{kind}" for kind in kinds(bias)}
    for kind in kinds(bias):
        names = [f"{plain}{name}.{kind}" for name in ("query", "key", "value")]
        if projections == "separate":
            weights = weights | {name: f"{module}{name.removeprefix(plain).replace('.', '_')}" for name in names}
        elif projections == "concatenated":
            weights = weights | {parity.stack(*names): f"{module}{kind}"}
        else:
            weights = weights | {parity.interleaved_qkv(*names, groups=groups, head_dim=head_dim): f"{module}{kind}"}
    return weights


def cross_attention_weights(
    groups: int,
    projections: Projections = "separate",
    plain: str = "",
    te: str = "",
    bias: bool = True,
    normed: bool = False,
) -> WeightMap:
    """Map the parameters of ``plain.Attention`` to ``MultiheadAttention(attention_type="cross")``'s."""
    query = f"{te}layernorm_query." if normed else f"{te}query_layer."
    prefix = "query_" if normed and projections == "separate" else ""
    weights: WeightMap = {f"{plain}out.{kind}": f"{te}proj.{kind}" for kind in kinds(bias)}
    for kind in kinds(bias):
        weights = weights | {f"{plain}query.{kind}": f"{query}{prefix}{kind}"}
        key, value = f"{plain}key.{kind}", f"{plain}value.{kind}"
        if projections == "separate":
            weights = weights | {key: f"{te}key_value.key_{kind}", value: f"{te}key_value.value_{kind}"}
        else:
            order = _key_next_to_value(groups) if projections == "interleaved" else tuple(range(2 * groups))
            weights = weights | {parity.reorder(parity.stack(key, value), order): f"{te}key_value.{kind}"}
    return weights


def _key_next_to_value(groups: int) -> tuple[int, ...]:
    pairs: Sequence[tuple[int, int]] = [(group, groups + group) for group in range(groups)]
    return tuple(block for pair in pairs for block in pair)
