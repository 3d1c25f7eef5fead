"""Baseline and flash attention with a number format for each intermediate result, as functions and as a module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Number formats of intermediate results. Each rounds a tensor's values and keeps its dtype.
#
# A computation in a format runs in a wider dtype, the carrier, and is rounded after each operation, as on hardware with
# FP32 registers. FP32 carries every format but FP64.


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format.

    Attributes:
        name: its name in options and reports.
        mantissa_bits: stored bits, without the leading 1.
        round: rounds FP32 or FP64 values to the nearest of the format, ties to even, and keeps their dtype.
    """

    name: str
    mantissa_bits: int
    round: Callable[[Tensor], Tensor]


def carrier(names: Iterable[str]) -> torch.dtype:
    """Return the dtype to compute in if results are rounded to these formats."""
    return torch.float64 if "fp64" in names else torch.float32


@contextmanager
def full_fp32_products() -> Iterator[None]:
    """Make a GPU multiply FP32 matrices in FP32 instead of TF32 within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _stored_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _saturating(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the rounding of NVIDIA's FP8 casts (``__NV_SATFINITE``), which clamp to the largest number."""
    largest = torch.finfo(dtype).max
    return lambda x: x.clamp(-largest, largest).to(dtype).to(x.dtype)


def _mantissa(bits: int) -> Callable[[Tensor], Tensor]:
    """Return the rounding to this many stored mantissa bits with the range of FP32."""
    dropped = 23 - bits

    def round_mantissa(x: Tensor) -> Tensor:
        encoded = x.float().view(torch.int32)
        is_odd = (encoded >> dropped) & 1
        rounded = (encoded + ((1 << (dropped - 1)) - 1) + is_odd) & -(1 << dropped)
        return rounded.view(torch.float32).to(x.dtype)

    return round_mantissa


FORMATS = {
    number_format.name: number_format
    for number_format in (
        NumberFormat("fp64", 52, lambda x: x),
        NumberFormat("fp32", 23, lambda x: x.float().to(x.dtype)),
        NumberFormat("tf32", 10, _mantissa(10)),
        NumberFormat("fp16", 10, _stored_as(torch.float16)),
        NumberFormat("bf16", 7, _stored_as(torch.bfloat16)),
        NumberFormat("e4m3", 3, _saturating(torch.float8_e4m3fn)),
        NumberFormat("e5m2", 2, _saturating(torch.float8_e5m2)),
        NumberFormat("e8m3", 3, _mantissa(3)),
        NumberFormat("e8m2", 2, _mantissa(2)),
    )
}
# Formats with a small range, each with a format of the same mantissa and FP32's range, which no GPU has. Comparing the
# two shows the cost of the small range.
UNLIMITED = {"e4m3": "e8m3", "e5m2": "e8m2"}
HARDWARE = tuple(name for name in FORMATS if name not in UNLIMITED.values())


# Baseline and flash attention with a number format for each intermediate result.
#
# Baseline computes all scores of a query before their softmax. Flash (Dao 2022, arXiv 2205.14135; here the form of
# FlashAttention-2, arXiv 2307.08691, algorithm 1) reads keys tile by tile, keeps a running maximum and sum, and
# rescales what it has accumulated whenever the maximum rises. In exact arithmetic the two are equal.
#
# Products and sums within one operation are in the carrier, as tensor cores accumulate. The operation's result is
# rounded. Tensors are ``[..., queries or keys, features]``, equal in all but the last two dimensions.


Algorithm = Literal["baseline", "flash"]
ALGORITHMS: tuple[Algorithm, ...] = ("baseline", "flash")


@dataclass(frozen=True)
class Steps:
    """The format of each intermediate result, as a name in ``FORMATS``.

    Attributes:
        scores: ``q k^T / sqrt(features)``.
        maximum: the largest score of a row; in flash attention, of the tiles so far.
        probabilities: the factors of the values: baseline's softmax, flash's ``exp(score - maximum)``.
        sum: the sum of ``exp(score - maximum)`` over a row; in flash attention, over the tiles so far. Its terms are
            not rounded, because kernels hold them in registers.
        rescaling: flash's factor ``exp(old maximum - new maximum)``.
        accumulator: flash's sum of probabilities times values over the tiles so far.
        output: the output of both algorithms.
    """

    scores: str
    maximum: str
    probabilities: str
    sum: str
    rescaling: str
    accumulator: str
    output: str

    def round(self, step: str, x: Tensor) -> Tensor:
        """Return ``x`` in the format of a step."""
        return FORMATS[getattr(self, step)].round(x)

    @property
    def carrier(self) -> torch.dtype:
        """The dtype to compute in."""
        return carrier(dataclasses.astuple(self))


STEPS = tuple(field.name for field in dataclasses.fields(Steps))


def everywhere(name: str) -> Steps:
    """Return steps that all have one format."""
    return Steps(*[name] * len(STEPS))


def as_kernels(algorithm: Algorithm, name: str) -> Steps:
    """Return steps that round only what real kernels round to a format. The others are FP32, or FP64 for FP64.

    Baseline stores its scores and probabilities in memory, and its softmax computes in FP32, as PyTorch's does. Flash
    kernels keep all but the operand of the second product in FP32 registers (FlashAttention-2; cuDNN's graph in TE
    2.20.2, ``common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu``).
    """
    wide = everywhere("fp64" if name == "fp64" else "fp32")
    stored = dataclasses.replace(wide, probabilities=name, output=name)
    return dataclasses.replace(stored, scores=name) if algorithm == "baseline" else stored


@dataclass(frozen=True)
class Tiles:
    """The tiles of flash attention's scores, and their order.

    Attributes:
        rows: queries of a tile.
        columns: keys of a tile.
        outer: the outer loop: over queries, as in FlashAttention-2, or over keys, as in the first FlashAttention.
    """

    rows: int
    columns: int
    outer: Literal["queries", "keys"] = "queries"


@dataclass(frozen=True)
class Attended:
    """Hold the results of an attention.

    Attributes:
        output: ``[..., queries, features]`` in the carrier, rounded as ``Steps.output``.
        lse: ``log(sum(exp(scores)))``, ``[..., queries, 1]``.
        rescalings: how often the maximum of a query rose after its first tile, on average; 0 for baseline.
    """

    output: Tensor
    lse: Tensor
    rescalings: float = 0.0


# The most scores in memory at a time, where rows can be computed separately.
SCORES_AT_ONCE = 1 << 21


def golden(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """Attend in FP64, some rows at a time, so that memory grows with the number of keys and not with its square."""
    return baseline(query, key, value, everywhere("fp64"), causal).output


def baseline(query: Tensor, key: Tensor, value: Tensor, steps: Steps, causal: bool = False) -> Attended:
    """Compute ``softmax(q k^T / sqrt(features)) v``, some rows at a time to save memory."""
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
    """Return baseline's probabilities ``[..., queries, keys]`` and log-sum-exp.

    Args:
        first_row: the position of the first query if the mask is causal, None if there is no mask.
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
    """Compute the same as ``baseline``, tile by tile.

    Args:
        maximum_known: whether to start from the largest score of each row, so that nothing is ever rescaled.
    """
    query, key, value = (x.to(steps.carrier) for x in (query, key, value))
    state = _start(query, key, value, steps, causal, maximum_known)
    for rows, columns in visits(query.shape[-2], key.shape[-2], tiles, causal):
        _visit(query, key, value, steps, state, rows, columns, causal)
    output = steps.round("output", state.accumulator / state.sum)
    return Attended(output, state.maximum + state.sum.log(), state.rises.item() / state.sum.numel())


def visits(queries: int, keys: int, tiles: Tiles, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Return the tiles in the order of the loops, without those that a causal mask hides completely."""
    rows = [slice(start, min(start + tiles.rows, queries)) for start in range(0, queries, tiles.rows)]
    columns = [slice(start, min(start + tiles.columns, keys)) for start in range(0, keys, tiles.columns)]
    if tiles.outer == "queries":
        pairs = ((row, column) for row in rows for column in columns)
    else:
        pairs = ((row, column) for column in columns for row in rows)
    return ((row, column) for row, column in pairs if not causal or column.start < row.stop)


def scores_of(query: Tensor, key: Tensor, steps: Steps, first_row: int | None, first_column: int = 0) -> Tensor:
    """Return scaled scores, with minus infinity where the causal mask hides a key.

    Args:
        first_row, first_column: positions of the first query and key; ``first_row`` is None if there is no mask.
    """
    scores = steps.round("scores", (query @ key.mT).div_(math.sqrt(query.shape[-1])))
    if first_row is None or first_row >= first_column + key.shape[-2] - 1:
        return scores
    rows = torch.arange(first_row, first_row + query.shape[-2], device=query.device)
    columns = torch.arange(first_column, first_column + key.shape[-2], device=query.device)
    return scores.masked_fill_(columns > rows[:, None], -math.inf)


@dataclass
class _State:
    """Hold the state of each query that flash attention keeps between two tiles.

    Attributes:
        maximum, sum: ``[..., queries, 1]``.
        accumulator: ``[..., queries, features]``.
        rises: how often the maximum rose after the first tile, summed over all queries; a scalar.
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
    """Update the state with one tile."""
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


# Gradients of both algorithms, with a number format for each intermediate result.
#
# Baseline has its probabilities in memory. Flash recomputes them tile by tile from the log-sum-exp (FlashAttention-2,
# arXiv 2307.08691, algorithm 2). Gradients take the formats of the forward pass: ``dO V^T`` takes that of the scores,
# ``dS`` that of the probabilities, and sums over tiles that of the accumulator.


@dataclass(frozen=True)
class Gradients:
    """Gradients in the shapes of the inputs, in the carrier, rounded as ``Steps.output``."""

    query: Tensor
    key: Tensor
    value: Tensor


def baseline_gradients(
    query: Tensor, key: Tensor, value: Tensor, output_grad: Tensor, steps: Steps, causal: bool
) -> Gradients:
    """Compute the gradients from ``dO`` and the inputs of the forward pass."""
    query, key, value, output_grad = (x.to(steps.carrier) for x in (query, key, value, output_grad))
    probabilities, _ = softmax(query, key, steps, 0 if causal else None)
    probability_grad = steps.round("scores", output_grad @ value.mT)
    inner = steps.round("sum", (probability_grad * probabilities).sum(-1, keepdim=True))
    score_grad = _score_grad(probabilities, probability_grad, inner, steps, query.shape[-1])
    return Gradients(
        query=steps.round("output", score_grad @ key),
        key=steps.round("output", score_grad.mT @ query),
        value=steps.round("output", probabilities.mT @ output_grad),
    )


def flash_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    output_grad: Tensor,
    steps: Steps,
    tiles: Tiles,
    causal: bool,
) -> Gradients:
    """Compute the gradients from ``dO`` and the inputs and results of the forward pass."""
    query, key, value, output_grad = (x.to(steps.carrier) for x in (query, key, value, output_grad))
    inner = steps.round("sum", (output_grad * attended.output).sum(-1, keepdim=True))
    sums = Gradients(*(torch.zeros_like(x) for x in (query, key, value)))
    for rows, columns in visits(query.shape[-2], key.shape[-2], tiles, causal):
        scores = scores_of(
            query[..., rows, :], key[..., columns, :], steps, rows.start if causal else None, columns.start
        )
        probabilities = scores.sub_(attended.lse[..., rows, :]).exp_()
        incoming = output_grad[..., rows, :]
        probability_grad = steps.round("scores", incoming @ value[..., columns, :].mT)
        score_grad = _score_grad(probabilities, probability_grad, inner[..., rows, :], steps, query.shape[-1])
        _add(sums.value, columns, steps.round("probabilities", probabilities).mT @ incoming, steps)
        _add(sums.query, rows, score_grad @ key[..., columns, :], steps)
        _add(sums.key, columns, score_grad.mT @ query[..., rows, :], steps)
    return Gradients(*(steps.round("output", x) for x in (sums.query, sums.key, sums.value)))


def _score_grad(probabilities: Tensor, probability_grad: Tensor, inner: Tensor, steps: Steps, head_dim: int) -> Tensor:
    """Return the gradient of ``q k^T``, before its scaling."""
    return steps.round("probabilities", probabilities * (probability_grad - inner) / math.sqrt(head_dim))


def _add(total: Tensor, part: slice, product: Tensor, steps: Steps) -> None:
    total[..., part, :] = steps.round("accumulator", total[..., part, :] + product)


# Both algorithms as a module that replaces ``parity.reference.CoreAttention`` in a model.
#
# Forward and backward are custom operators, so a rounding model around the whole network (``parity.rounding``) sees the
# attention as one operation and does not round inside it.


@dataclass(frozen=True)
class Arithmetic:
    """The algorithm and formats of an attention.

    Attributes:
        algorithm: baseline or flash.
        format: a name in ``FORMATS``; inputs are rounded to it first.
        everywhere: whether every step is rounded to the format, or only those that kernels round.
        tile: queries and keys of flash attention's tiles.
    """

    algorithm: Algorithm
    format: str
    everywhere: bool = False
    tile: int = 16

    @property
    def steps(self) -> Steps:
        return everywhere(self.format) if self.everywhere else as_kernels(self.algorithm, self.format)

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.tile, self.tile)


class StepwiseCore(nn.Module):
    """Causal attention in a given arithmetic, with grouped key-value heads.

    Args:
        arithmetic: the arithmetic of the forward and backward pass.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend.

        Args:
            query: ``[batch, seq, heads, head_dim]`` FP32.
            key: ``[batch, seq, groups, head_dim]``; consecutive heads share a group.
            value: as key.

        Returns:
            ``[batch, seq, heads * head_dim]`` FP32.
        """
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
        chosen = self.arithmetic
        output, _ = _attend(
            *(x.transpose(1, 2) for x in (query, key, value)),
            chosen.algorithm,
            chosen.format,
            chosen.everywhere,
            chosen.tile,
        )
        return output.transpose(1, 2).flatten(2)


@torch.library.custom_op("parity::stepwise_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, algorithm: str, number_format: str, everywhere: bool, tile: int
) -> tuple[Tensor, Tensor]:
    arithmetic = Arithmetic(algorithm, number_format, everywhere, tile)  # type: ignore[arg-type]  # an op takes no Literal
    query, key, value = (FORMATS[number_format].round(x) for x in (query, key, value))
    if algorithm == "baseline":
        attended = baseline(query, key, value, arithmetic.steps, causal=True)
    else:
        attended = flash(query, key, value, arithmetic.steps, arithmetic.tiles, causal=True)
    return attended.output, attended.lse


@torch.library.custom_op("parity::stepwise_attention_backward", mutates_args=())
def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    output_grad: Tensor,
    algorithm: str,
    number_format: str,
    everywhere: bool,
    tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    arithmetic = Arithmetic(algorithm, number_format, everywhere, tile)  # type: ignore[arg-type]  # an op takes no Literal
    query, key, value, output_grad = (FORMATS[number_format].round(x) for x in (query, key, value, output_grad))
    if algorithm == "baseline":
        found = baseline_gradients(query, key, value, output_grad, arithmetic.steps, causal=True)
    else:
        attended = Attended(output, lse)
        found = flash_gradients(
            query, key, value, attended, output_grad, arithmetic.steps, arithmetic.tiles, causal=True
        )
    return found.query, found.key, found.value


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.arithmetic = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(*ctx.saved_tensors, output_grad, *ctx.arithmetic), None, None, None, None


_attend.register_autograd(_backward, setup_context=_remember)
