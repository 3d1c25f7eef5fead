"""Baseline and flash attention with a number format for each intermediate result, with gradients, and in a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Number formats of intermediate results: each rounds a tensor's values and leaves its dtype.
#
# A computation in a format is carried out in a wider dtype and rounded after each operation, which is what hardware
# does that computes in FP32 registers. FP32 carries every format but FP64.


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format.

    Attributes:
        name: as options and reports write it.
        mantissa_bits: stored ones, without the leading 1.
        round: FP32 or FP64 values to the nearest of the format, ties to even, in the dtype that they came in.
    """

    name: str
    mantissa_bits: int
    round: Callable[[Tensor], Tensor]


def carrier(names: Iterable[str]) -> torch.dtype:
    """Return the dtype to compute in where results are rounded to these formats."""
    return torch.float64 if "fp64" in names else torch.float32


@contextmanager
def full_fp32_products() -> Iterator[None]:
    """Let a GPU multiply FP32 matrices in FP32, whatever it has been told about TF32, within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _stored_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _saturating(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Round as NVIDIA GPUs cast to FP8 (``__NV_SATFINITE``): what is too large becomes the largest number."""
    largest = torch.finfo(dtype).max
    return lambda x: x.clamp(-largest, largest).to(dtype).to(x.dtype)


def _mantissa(bits: int) -> Callable[[Tensor], Tensor]:
    """Return a format with so many stored mantissa bits and the range of FP32."""
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
# Formats of a small range, each with one of the same mantissa and FP32's range, which no GPU has: what differs between
# the two is what the range costs.
UNLIMITED = {"e4m3": "e8m3", "e5m2": "e8m2"}
HARDWARE = tuple(name for name in FORMATS if name not in UNLIMITED.values())


# Baseline and flash attention with a number format for each intermediate result.
#
# Baseline computes all scores of a query before their softmax. Flash (Dao 2022, arXiv 2205.14135; here the form of
# FlashAttention-2, arXiv 2307.08691, algorithm 1) reads keys tile by tile, keeps a running maximum and sum, and
# rescales what it has accumulated whenever the maximum rises. In exact arithmetic the two are equal.
#
# Products and sums within one operation are in the carrier, as tensor cores accumulate; its result is rounded. Tensors
# are ``[..., queries or keys, features]``, equal in all but the last two dimensions.


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
        """Return ``x`` in the format of a step."""
        return FORMATS[getattr(self, step)].round(x)

    @property
    def carrier(self) -> torch.dtype:
        """The dtype to compute in."""
        return carrier(dataclasses.astuple(self))


STEPS = tuple(field.name for field in dataclasses.fields(Steps))


def everywhere(name: str) -> Steps:
    """Return each step in one format."""
    return Steps(*[name] * len(STEPS))


def as_kernels(algorithm: Algorithm, name: str) -> Steps:
    """Return what real kernels round to a format; the rest is FP32, or FP64 for FP64.

    Baseline stores its scores and probabilities in memory, and its softmax is FP32 inside, as PyTorch's is. Flash
    kernels keep all but the operand of the second product in FP32 registers (FlashAttention-2; cuDNN's graph in TE
    2.20.2, ``common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu``).
    """
    wide = everywhere("fp64" if name == "fp64" else "fp32")
    stored = dataclasses.replace(wide, probabilities=name, output=name)
    return dataclasses.replace(stored, scores=name) if algorithm == "baseline" else stored


@dataclass(frozen=True)
class Tiles:
    """Say how flash attention cuts up its scores.

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
    """Hold what an attention computes.

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
    """Attend in FP64, some rows at a time: memory grows with the number of keys and not with its square."""
    return baseline(query, key, value, everywhere("fp64"), causal).output


def baseline(query: Tensor, key: Tensor, value: Tensor, steps: Steps, causal: bool = False) -> Attended:
    """Compute ``softmax(q k^T / sqrt(features)) v``, some rows at a time, since rows are independent."""
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
    """Compute the same, tile by tile.

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
    """Return the tiles in the order of the loops; under a causal mask, those that are not wholly hidden."""
    rows = [slice(start, min(start + tiles.rows, queries)) for start in range(0, queries, tiles.rows)]
    columns = [slice(start, min(start + tiles.columns, keys)) for start in range(0, keys, tiles.columns)]
    if tiles.outer == "queries":
        pairs = ((row, column) for row in rows for column in columns)
    else:
        pairs = ((row, column) for column in columns for row in rows)
    return ((row, column) for row, column in pairs if not causal or column.start < row.stop)


def scores_of(query: Tensor, key: Tensor, steps: Steps, first_row: int | None, first_column: int = 0) -> Tensor:
    """Return scaled scores, minus infinity where the causal mask hides a key.

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
    """Hold what flash attention keeps of each query between two tiles.

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


# Gradients of ``stepwise_attention``'s two algorithms, with a number format for each intermediate result.
#
# Baseline has its probabilities in memory; flash recomputes them tile by tile from the log-sum-exp (FlashAttention-2,
# arXiv 2307.08691, algorithm 2). A gradient takes the format of what it is the gradient of: that of the scores' product
# ``dO V^T`` that of the scores, ``dS`` that of the probabilities, and what is summed over tiles that of the
# accumulator.


@dataclass(frozen=True)
class Gradients:
    """Shaped as the inputs, in the carrier, rounded as ``Steps.output``."""

    query: Tensor
    key: Tensor
    value: Tensor


def baseline_gradients(
    query: Tensor, key: Tensor, value: Tensor, output_grad: Tensor, steps: Steps, causal: bool
) -> Gradients:
    """Compute the gradients from ``dO`` and what the forward pass read."""
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
    """Compute the gradients from ``dO``, what the forward pass read and what it returned."""
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


# ``stepwise_attention`` in a model, in place of ``parity.reference.CoreAttention``.
#
# Both directions are operators of their own to PyTorch's dispatcher, so a rounding model around the whole network
# (``parity.rounding``) sees the attention as one operation and leaves what it rounds inside to itself.


@dataclass(frozen=True)
class Arithmetic:
    """Say how an attention computes.

    Attributes:
        algorithm: baseline or flash.
        format: name of ``FORMATS``; inputs are rounded to it first.
        everywhere: whether each step is rounded to it, or what kernels round.
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
        arithmetic: of the forward and backward pass.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend.

        Args:
            query: ``[batch, seq, heads, head_dim]`` FP32.
            key: ``[batch, seq, groups, head_dim]``; heads are shared out to the groups in order.
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
