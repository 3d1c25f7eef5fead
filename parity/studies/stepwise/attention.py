"""Baseline and flash attention with a number format for each intermediate result.

Baseline computes all scores of a query before their softmax. Flash (Dao 2022, arXiv 2205.14135; here the form of
FlashAttention-2, arXiv 2307.08691, algorithm 1) reads keys tile by tile, keeps a running maximum and sum, and rescales
what it has accumulated whenever the maximum rises. In exact arithmetic the two are equal.

Products and sums within one operation are in the carrier, as tensor cores accumulate; its result is rounded.
Tensors are ``[..., queries or keys, features]``, equal in all but the last two dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parity.studies.stepwise.number_formats import FORMATS, carrier

Algorithm = Literal["baseline", "flash"]
ALGORITHMS: tuple[Algorithm, ...] = ("baseline", "flash")


@dataclass(frozen=True)
class Steps:
    """Names of ``FORMATS``: that of each intermediate result.

    Attributes:
        scores: ``q k^T / sqrt(features)``.
        maximum: the largest score of a row; in flash attention, of the tiles so far.
        probabilities: what multiplies the values: baseline's softmax, flash's ``exp(score - maximum)``.
        sum: of ``exp(score - maximum)`` over a row, which are unrounded here, as kernels have them in registers; in
            flash attention, over the tiles so far.
        rescaling: flash's factor ``exp(old maximum - new maximum)``.
        accumulator: flash's sum of probabilities times values over the tiles so far.
        output: of both.
    """

    scores: str
    maximum: str
    probabilities: str
    sum: str
    rescaling: str
    accumulator: str
    output: str

    def round(self, step: str, x: Tensor) -> Tensor:
        """``x`` in the format of a step."""
        return FORMATS[getattr(self, step)].round(x)

    @property
    def carrier(self) -> torch.dtype:
        """The dtype to compute in."""
        return carrier(dataclasses.astuple(self))


STEPS = tuple(field.name for field in dataclasses.fields(Steps))


def everywhere(name: str) -> Steps:
    """Each step in one format."""
    return Steps(*[name] * len(STEPS))


def as_kernels(algorithm: Algorithm, name: str) -> Steps:
    """What real kernels round to a format; the rest is FP32, or FP64 for FP64.

    Baseline stores its scores and probabilities in memory, and its softmax is FP32 inside, as PyTorch's is. Flash
    kernels keep all but the operand of the second product in FP32 registers (FlashAttention-2; cuDNN's graph in TE
    2.20.2, ``common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu``).
    """
    wide = everywhere("fp64" if name == "fp64" else "fp32")
    stored = dataclasses.replace(wide, probabilities=name, output=name)
    return dataclasses.replace(stored, scores=name) if algorithm == "baseline" else stored


@dataclass(frozen=True)
class Tiles:
    """How flash attention cuts up its scores.

    Attributes:
        rows: queries of a tile.
        columns: keys of a tile.
        outer: what the outer loop goes over: tiles of queries, as FlashAttention-2 does, or of keys, as the first did.
    """

    rows: int
    columns: int
    outer: Literal["queries", "keys"] = "queries"


@dataclass(frozen=True)
class Attended:
    """What an attention computes.

    Attributes:
        output: ``[..., queries, features]`` in the carrier, rounded as ``Steps.output``.
        lse: ``log(sum(exp(scores)))``, ``[..., queries, 1]``.
        rescalings: how often the maximum of a query rose after its first tile, in the mean; 0 for baseline.
    """

    output: Tensor
    lse: Tensor
    rescalings: float = 0.0


# Scores that are in memory at a time where rows can be computed apart.
SCORES_AT_ONCE = 1 << 21


def golden(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """Attention in FP64, some rows at a time, in memory that grows with the number of keys and not with its square."""
    return baseline(query, key, value, everywhere("fp64"), causal).output


def baseline(query: Tensor, key: Tensor, value: Tensor, steps: Steps, causal: bool = False) -> Attended:
    """``softmax(q k^T / sqrt(features)) v``; some rows at a time, which changes nothing, since rows are independent."""
    query, key, value = (x.to(steps.carrier) for x in (query, key, value))
    rows = max(1, SCORES_AT_ONCE // (key.shape[-2] * math.prod(query.shape[:-2])))
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(*query.shape[:-1], 1)
    for start in range(0, query.shape[-2], rows):
        block = slice(start, start + rows)
        probabilities, lse[..., block, :] = softmax(query[..., block, :], key, steps, start if causal else None)
        output[..., block, :] = steps.round("output", probabilities @ value)
    return Attended(output, lse)


def softmax(query: Tensor, key: Tensor, steps: Steps, first_row: int | None) -> tuple[Tensor, Tensor]:
    """Baseline's probabilities ``[..., queries, keys]`` and log-sum-exp.

    Args:
        first_row: position of the first query where the mask is causal, None where there is none.
    """
    scores = scores_of(query, key, steps, first_row)
    maximum = steps.round("maximum", scores.amax(-1, keepdim=True))
    weights = scores.sub_(maximum).exp_()
    total = steps.round("sum", weights.sum(-1, keepdim=True))
    return steps.round("probabilities", weights.div_(total)), maximum + total.log()


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Steps,
    tiles: Tiles,
    causal: bool = False,
    maximum_known: bool = False,
) -> Attended:
    """The same, tile by tile.

    Args:
        maximum_known: start from the largest score of each row, so that nothing is ever rescaled.
    """
    query, key, value = (x.to(steps.carrier) for x in (query, key, value))
    state = _start(query, key, value, steps, causal, maximum_known)
    for rows, columns in visits(query.shape[-2], key.shape[-2], tiles, causal):
        _visit(query, key, value, steps, state, rows, columns, causal)
    output = steps.round("output", state.accumulator / state.sum)
    return Attended(output, state.maximum + state.sum.log(), state.rises.item() / state.sum.numel())


def visits(queries: int, keys: int, tiles: Tiles, causal: bool) -> Iterator[tuple[slice, slice]]:
    """The tiles in the order of the loops; under a causal mask, those that are not wholly hidden."""
    rows = [slice(start, min(start + tiles.rows, queries)) for start in range(0, queries, tiles.rows)]
    columns = [slice(start, min(start + tiles.columns, keys)) for start in range(0, keys, tiles.columns)]
    if tiles.outer == "queries":
        pairs = ((row, column) for row in rows for column in columns)
    else:
        pairs = ((row, column) for column in columns for row in rows)
    return ((row, column) for row, column in pairs if not causal or column.start < row.stop)


def scores_of(query: Tensor, key: Tensor, steps: Steps, first_row: int | None, first_column: int = 0) -> Tensor:
    """Scaled scores, minus infinity where the causal mask hides a key.

    Args:
        first_row, first_column: positions of the first query and key; ``first_row`` None where there is no mask.
    """
    scores = steps.round("scores", (query @ key.mT).div_(math.sqrt(query.shape[-1])))
    if first_row is None or first_row >= first_column + key.shape[-2] - 1:
        return scores
    rows = torch.arange(first_row, first_row + query.shape[-2], device=query.device)
    columns = torch.arange(first_column, first_column + key.shape[-2], device=query.device)
    return scores.masked_fill_(columns > rows[:, None], -math.inf)


@dataclass
class _State:
    """What flash attention keeps of each query between two tiles.

    Attributes:
        maximum, sum: ``[..., queries, 1]``.
        accumulator: ``[..., queries, features]``.
        rises: of the maximum after the first tile, over all queries; a scalar.
    """

    maximum: Tensor
    sum: Tensor
    accumulator: Tensor
    rises: Tensor


def _start(query: Tensor, key: Tensor, value: Tensor, steps: Steps, causal: bool, maximum_known: bool) -> _State:
    maximum = query.new_full((*query.shape[:-1], 1), -math.inf)
    if maximum_known:
        scores = scores_of(query, key, steps, 0 if causal else None)
        maximum = steps.round("maximum", scores.amax(-1, keepdim=True))
    accumulator = query.new_zeros(*query.shape[:-1], value.shape[-1])
    return _State(maximum, torch.zeros_like(maximum), accumulator, torch.zeros((), device=query.device))


def _visit(
    query: Tensor, key: Tensor, value: Tensor, steps: Steps, state: _State, rows: slice, columns: slice, causal: bool
) -> None:
    """Take in one tile."""
    scores = scores_of(query[..., rows, :], key[..., columns, :], steps, rows.start if causal else None, columns.start)
    old = state.maximum[..., rows, :]
    new = torch.maximum(old, steps.round("maximum", scores.amax(-1, keepdim=True)))
    state.rises += ((new > old) & old.isfinite()).sum()
    rescaling = steps.round("rescaling", (old - new).exp_())
    weights = scores.sub_(new).exp_()
    total = (state.sum[..., rows, :] * rescaling).add_(weights.sum(-1, keepdim=True))
    product = steps.round("probabilities", weights) @ value[..., columns, :]
    state.maximum[..., rows, :] = new
    state.sum[..., rows, :] = steps.round("sum", total)
    state.accumulator[..., rows, :] = steps.round(
        "accumulator", product.add_(state.accumulator[..., rows, :] * rescaling)
    )
