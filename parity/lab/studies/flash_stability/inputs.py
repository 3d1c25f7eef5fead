"""Queries, keys and values to attend with, exact in a number format, so that only the attention itself deviates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.case.case import Rng
from parity.lab.studies.stepwise import FORMATS

# normal: outputs are means of numbers that cancel, and shrink with the number of keys.
# uniform: over [0, 1), as torch.rand; outputs stay near 1/2, and so does the accumulator's growth from tile to tile.
DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {"normal": Rng.normal, "uniform": Rng.uniform}
# Logits over which the staircase of keys climbs; the scores within a tile differ by far less.
_STAIRCASE_HEIGHT = 4.0
_STAIRCASE_STD = 0.1


@dataclass(frozen=True)
class Inputs:
    """What attention reads.

    Attributes:
        query: ``[queries, features]`` FP32.
        key, value: ``[keys, features]`` FP32.
    """

    query: Tensor
    key: Tensor
    value: Tensor


def draw(distribution: str, seed: int, queries: int, keys: int, head_dim: int, number_format: str) -> Inputs:
    """Random inputs from ``DISTRIBUTIONS``; the keys of a longer sequence are others, the queries are the same."""
    one_of = DISTRIBUTIONS[distribution]
    tensors = [
        one_of(Rng(seed, purpose), rows, head_dim)
        for purpose, rows in (("query", queries), ("key", keys), ("value", keys))
    ]
    return Inputs(*map(FORMATS[number_format].round, tensors))


def staircase(
    distribution: str, seed: int, keys: int, head_dim: int, number_format: str, tile: int, rises: int
) -> Inputs:
    """Inputs whose tiles of keys have each another largest score, in an order in which the maximum rises so often.

    Whatever the order, the keys are the same: softmax and golden output do not change, the running maximum does. The
    order is the lowest ``rises`` levels upwards, then the highest, then the others downwards.

    Args:
        distribution: of the values.
        tile: keys of a tile.
        rises: of each query's maximum after its first tile; less than the number of tiles.
    """
    inputs = draw(distribution, seed, keys, keys, head_dim, number_format)
    tiles = math.ceil(keys / tile)
    levels = torch.linspace(0.0, _STAIRCASE_HEIGHT, tiles)[_order(tiles, rises)]
    rng = Rng(seed, "staircase")
    query, key = (rng.normal(keys, head_dim, std=_STAIRCASE_STD) for _ in range(2))
    # One feature carries the levels: a constant in queries, whose product with the key's is the level.
    query[:, 0] = 1.0
    key[:, 0] = levels.repeat_interleave(tile)[:keys] * math.sqrt(head_dim)
    key_order, value = _tiles_in_order(_order(tiles, rises), tile, keys), inputs.value
    key[:, 1:] = key[key_order, 1:]
    return Inputs(FORMATS[number_format].round(query), FORMATS[number_format].round(key), value[key_order])


def _order(tiles: int, rises: int) -> list[int]:
    return [*range(rises), tiles - 1, *range(tiles - 2, rises - 1, -1)]


def _tiles_in_order(order: Sequence[int], tile: int, keys: int) -> Tensor:
    return torch.cat([torch.arange(index * tile, min((index + 1) * tile, keys)) for index in order])
