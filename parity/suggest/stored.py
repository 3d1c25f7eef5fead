"""Read how modules say that they store their weights, and which layouts that speaks against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from parity.case.validate import of_te
from parity.case.weight_map import (
    Constant,
    Copies,
    InterleavedQKV,
    Rearrange,
    Reorder,
    SeparatedQKV,
    Shift,
    Side,
    Stack,
    Transpose,
    names,
)
from parity.suggest.layouts import Entries, Layout

# How query, key and value (or the latter two) are fused: group by group, or all of one after all of another.
Order = Literal["by group", "in turn"]
_BY_GROUP: frozenset[Order] = frozenset({"by group"})
_IN_TURN: frozenset[Order] = frozenset({"in turn"})
_ANY = _BY_GROUP | _IN_TURN
_NONE: frozenset[Order] = frozenset()

_FUSED_BY_TE = ("qkv.weight", "qkv.bias", "layernorm_qkv.weight", "layernorm_qkv.bias")
_FUSED_BY_TE_IN_CROSS_ATTENTION = ("key_value.weight", "key_value.bias")


@dataclass(frozen=True)
class Stored:
    """Hold what a module says about its parameters, by their names; about some it says nothing.

    Attributes:
        offsets: what was added to a norm's gain: -1.0 with TE's ``zero_centered_gamma``, else 0.0.
        orders: the orders of fused queries, keys and values.
        matrices: weights of linear layers that are stored as ``[out, in]``.
    """

    offsets: Mapping[str, float]
    orders: Mapping[str, Order]
    matrices: frozenset[str]


def stored(module: nn.Module) -> Stored:
    """Return what the module's parts say, PyTorch's by their class and TE's by their attributes.

    A class that is derived from one of PyTorch's and computes otherwise says nothing.
    """
    offsets: dict[str, float] = {}
    orders: dict[str, Order] = {}
    matrices: set[str] = set()
    from_te = of_te(module)
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        own = {f"{prefix}{name}": weight for name, weight in part.named_parameters(recurse=False)}
        if path in from_te:
            orders.update((f"{prefix}{name}", order) for name, order in _orders_in_te(part))
            matrices |= {name for name, weight in own.items() if weight.dim() == 2}
            if (centered := getattr(part, "zero_centered_gamma", None)) is not None:
                offset = -1.0 if centered else 0.0
                offsets |= {name: offset for name, weight in own.items() if weight.dim() == 1}
        elif isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward:
            matrices.add(f"{prefix}weight")
        elif type(part).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
            offsets[f"{prefix}weight"] = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            matrices |= {name for name, weight in own.items() if weight.dim() == 2}
            if part.num_heads > 1:
                orders |= {f"{prefix}in_proj_weight": "in turn", f"{prefix}in_proj_bias": "in turn"}
    return Stored(offsets, orders, frozenset(matrices))


def _orders_in_te(attention: nn.Module) -> Iterator[tuple[str, Order]]:
    """Yield the orders in a ``te.MultiheadAttention``; a single group is in both orders."""
    interleaved = getattr(attention, "qkv_weight_interleaved", None)
    if interleaved is not None and getattr(attention, "num_gqa_groups", 1) > 1:
        for name in (*_FUSED_BY_TE, *_FUSED_BY_TE_IN_CROSS_ATTENTION):
            yield name, "by group" if interleaved else "in turn"


def with_doubts(layouts: Sequence[Layout], reference: Stored, candidate: Stored) -> list[Layout]:
    """Return the layouts; those that contradict what the modules say become unusual and come last,
    unless all usual ones do.
    """
    doubted = [
        replace(layout, usual=layout.usual and not _contradicts(layout.entries, reference, candidate))
        for layout in layouts
    ]
    if not any(layout.usual for layout in doubted):
        return list(layouts)
    return sorted(doubted, key=lambda layout: not layout.usual)


def _contradicts(entries: Entries, reference: Stored, candidate: Stored) -> bool:
    return any(
        _offsets_differ(left, right, reference, candidate)
        or _is_transposed(left, right, reference, candidate)
        or not _orders(left, reference) & _orders(right, candidate)
        for left, right in entries
    )


def _offsets_differ(left: Side, right: Side, reference: Stored, candidate: Stored) -> bool:
    one, other = _offset(left, reference), _offset(right, candidate)
    return one is not None and other is not None and one != other


def _offset(side: Side, module: Stored) -> float | None:
    """Return what was added to a norm's gain to become this side; None if that is not known."""
    if isinstance(side, str):
        return module.offsets.get(side)
    if isinstance(side, Copies):
        return _offset(side.parts[0], module)
    if isinstance(side, Shift):
        before = _offset(side.parts[0], module)
        return None if before is None else before + side.by
    return None


def _is_transposed(left: Side, right: Side, reference: Stored, candidate: Stored) -> bool:
    """Return whether a weight that is stored as ``[out, in]`` on both sides is transposed between them."""
    return (
        candidate.matrices.issuperset(names(right))
        and _transposes(left, reference.matrices)
        and not _transposes(right, candidate.matrices)
    )


def _transposes(side: Side, matrices: frozenset[str]) -> bool:
    if isinstance(side, (str, Constant)):
        return False
    if isinstance(side, Transpose):
        return matrices.issuperset(names(side))
    return any(_transposes(part, matrices) for part in side.parts)


def _orders(side: Side, module: Stored) -> frozenset[Order]:
    """Return in which orders the queries, keys and values of a side may be; none if a term takes them in another."""
    if isinstance(side, str):
        return frozenset({module.orders[side]}) if side in module.orders else _ANY
    if isinstance(side, Constant):
        return _ANY
    if isinstance(side, InterleavedQKV):
        return _BY_GROUP
    parts = [_orders(part, module) for part in side.parts]
    if isinstance(side, Stack):
        return _IN_TURN if all(part & _IN_TURN for part in parts) else _NONE
    if isinstance(side, SeparatedQKV):
        return _IN_TURN if parts[0] & _BY_GROUP else _NONE
    if isinstance(side, Reorder):
        return _reordered(parts[0], side.order)
    return parts[0] if isinstance(side, (Transpose, Rearrange)) else _ANY


def _reordered(before: frozenset[Order], order: Sequence[int]) -> frozenset[Order]:
    """Return the orders after keys and values were put in turn head by head, or the other way round."""
    groups = len(order) // 2
    by_group = tuple(block for group in range(groups) for block in (group, groups + group))
    in_turn = (*range(0, 2 * groups, 2), *range(1, 2 * groups, 2))
    if tuple(order) == tuple(range(len(order))):
        return before
    if tuple(order) == by_group:
        return _BY_GROUP if before & _IN_TURN else _NONE
    if tuple(order) == in_turn:
        return _IN_TURN if before & _BY_GROUP else _NONE
    return _ANY
