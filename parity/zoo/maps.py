"""Mistakes in a weight map: the reference's side of an entry read otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

from parity.case import Pair
from parity.reference import Attention
from parity.weights import Side
from parity.zoo.bug import Plant

Change = Callable[[Side], Side]


def left_sides(change: Change) -> Plant:
    """Each entry's left side is ``change(left)``."""
    return left_sides_of(lambda pair: change)


def left_sides_of(change_for: Callable[[Pair], Change]) -> Plant:
    """The same with a change that depends on the pair's sizes."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        change = change_for(pair)
        return dataclasses.replace(pair, weights={change(left): right for left, right in pair.weights.items()})

    return plant


def parameter(suffix: str, change: Change) -> Change:
    """Changes the reference parameter whose name ends so, where it stands alone in an entry."""
    return lambda left: change(left) if isinstance(left, str) and left.endswith(suffix) else left


def exchanged(first: str, second: str) -> Plant:
    """The parameters whose names end so go to each other's place."""

    def plant(pair: Pair, te: ModuleType) -> Pair:
        named = {suffix: left for left in pair.weights for suffix in (first, second) if str(left).endswith(suffix)}
        exchange = {named[first]: named[second], named[second]: named[first]}
        weights = {exchange.get(left, left): right for left, right in pair.weights.items()}
        return dataclasses.replace(pair, weights=weights)

    return plant


def attention_of(pair: Pair) -> Attention:
    """The reference's attention.

    Raises:
        StopIteration: if it has none.
    """
    return next(module for module in pair.reference.modules() if isinstance(module, Attention))


@dataclasses.dataclass(frozen=True)
class Heads:
    """How an attention's channels are shared out."""

    heads: int
    groups: int
    head_dim: int


def heads_of(pair: Pair) -> Heads:
    """Of the reference's attention."""
    attention = attention_of(pair)
    query, key = attention.q_proj.out_features, attention.k_proj.out_features
    return Heads(query // attention.head_dim, key // attention.head_dim, attention.head_dim)
