"""Describe an error beyond its verdict: where it lies, its distribution, and its effect on log-probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parity.judge.judge import worth_a_picture
from parity.mistakes.losses import returned_log_probs
from parity.numerics.errors import CachedTensor, Deviations, GoldenTensor, GoldenTensors, norm_of
from parity.passes.all_passes import Tensors
from parity.passes.prepare import Prepared, kept_calls
from parity.result import Histogram, Picture, Profile, TensorResult

PARTS, PARTS_OF_A_PASS = 64, 16  # parts of an axis, at most
BINS, FIRST, WIDTH = 40, -5.0, 0.25  # from 1/100,000 of the expected error to 100,000 times it, four bins a decade
_BINS_OF_TWO = math.log10(2.0) / WIDTH  # how many bins a factor of two takes
_FEWEST = 16  # elements that make a histogram worth drawing
_CHUNK = 2**20  # elements whose logarithms are in memory at once


def pictured(
    tensors: Sequence[TensorResult], golden: GoldenTensors, candidate: Tensors, models: Sequence[Tensors]
) -> tuple[TensorResult, ...]:
    """Return the verdicts, with a picture for the worst of them.

    Args:
        tensors: the verdicts.
        golden: by kind and name of the tensor.
        candidate: the candidate's tensors.
        models: the rounding model's; the largest of their errors is the expected one.
    """
    parts = PARTS_OF_A_PASS if all(tensor.passed for tensor in tensors) else PARTS
    worth = {tensor.label for tensor in worth_a_picture(tensors) if tensor.key in golden}
    return tuple(
        dataclasses.replace(tensor, picture=_make_picture(golden[tensor.key], tensor, candidate, models, parts))
        if tensor.label in worth
        else tensor
        for tensor in tensors
    )


def _make_picture(
    truth: GoldenTensor, tensor: TensorResult, candidate: Tensors, models: Sequence[Tensors], parts: int
) -> Picture | None:
    """Return a tensor's picture; None if there is no error of any kind."""
    deviations: Deviations = truth.deviations([candidate[tensor.key], *(model[tensor.key] for model in models)])
    error, *model_errors = deviations.errors
    expected = _zero_non_finite(max(model_errors, key=lambda one: one.norm if one.is_finite else -1.0))
    spoiled = None if error.is_finite else ~error.values.isfinite()
    error = _zero_non_finite(error)
    unit = expected.root_mean_square or error.root_mean_square
    if not unit and spoiled is None:
        return None
    axes = [axis for axis, length in enumerate(error.values.shape) if length > 1]
    return Picture(
        unit=_round_to_three_digits(unit),
        profiles=tuple(_make_profile(axis, error, expected, spoiled, parts) for axis in axes),
        histogram=_make_histogram(error.values, expected.values, unit)
        if error.values.numel() >= _FEWEST and unit
        else None,
    )


def _zero_non_finite(error: CachedTensor) -> CachedTensor:
    """Return an error with 0 for elements that are not finite, since these have no size."""
    return error if error.is_finite else CachedTensor(error.values.nan_to_num(0.0, 0.0, 0.0))


def _make_profile(
    axis: int, error: CachedTensor, expected: CachedTensor, spoiled: Tensor | None, parts: int
) -> Profile:
    length = error.values.shape[axis]
    span = math.ceil(length / parts)
    others = tuple(dim for dim in range(error.values.dim()) if dim != axis)
    elements = error.values.numel() // length

    def sizes(one: CachedTensor) -> tuple[float, ...]:
        squares = one.squares_over(others) if others else one.squares
        means = (_sum_parts(squares, span) / (elements * _sum_parts(torch.ones_like(squares), span))).sqrt()
        return tuple(map(_round_to_three_digits, means.tolist()))

    counts = None if spoiled is None else spoiled.sum(others) if others else spoiled
    return Profile(
        axis=axis,
        span=span,
        error=sizes(error),
        expected=sizes(expected),
        spoiled=() if counts is None else tuple(map(int, _sum_parts(counts.float(), span).tolist())),
    )


def _sum_parts(values: Tensor, span: int) -> Tensor:
    """Return the sums over parts of ``span`` consecutive values; the last part may have fewer."""
    padding = -len(values) % span
    return torch.nn.functional.pad(values, (0, padding)).view(-1, span).sum(-1)


def _make_histogram(error: Tensor, expected: Tensor, unit: float) -> Histogram:
    of_error, exact = _count_by_bin(error, unit)
    of_expected, exact_of_expected = _count_by_bin(expected, unit)
    return Histogram(FIRST, WIDTH, of_error, of_expected, (exact, exact_of_expected))


def _count_by_bin(values: Tensor, unit: float) -> tuple[tuple[int, ...], int]:
    """Return how many elements each bin has, and how many elements are 0."""
    counts, exact = values.new_zeros(BINS, dtype=torch.int64), 0
    for chunk in values.flatten().split(_CHUNK):
        # FP32 is exact enough to tell bins apart, and its logarithms take a quarter of the time. That of 0 is -inf.
        bins = (chunk.abs() / unit).float().log2_().mul_(_BINS_OF_TWO).sub_(FIRST / WIDTH).clamp_(0, BINS - 1)
        counts += torch.bincount(bins.int(), minlength=BINS)
        exact += chunk.numel() - int(chunk.count_nonzero())
    counts[0] -= exact
    return tuple(counts.tolist()), exact


def _round_to_three_digits(value: float) -> float:
    """Return a number rounded to three digits, which are all that a picture shows."""
    return float(f"{value:.3g}")


# The first position at which an output is wrong, judged by the error that is expected at each position.


_CHANCE = 3.0  # deviations by which the norm of few elements may exceed another's
_FEWEST_POSITIONS = 3  # with two positions, one comes first by chance
_LIKELY = 0.01
_TINY = 1e-30


@dataclass(frozen=True)
class FirstWrong:
    """The position from which an output is wrong.

    Attributes:
        dim: the dimension that counts positions.
        index: the first position that is wrong, at least 1: those before it are right.
        count: how many positions there are.
        error: the relative error there.
        expected: the relative error that is expected there.
    """

    dim: int
    index: int
    count: int
    error: float
    expected: float


def first_wrong(
    result: TensorResult, computed: Tensor, golden: Tensor, models: Sequence[Tensor], row: int | None = None
) -> FirstWrong | None:
    """Return where an output begins to be wrong; None if it is wrong from the start, or not clearly from a position on.

    Positions are looked for in the second dimension, as in ``[batch, seq, ...]``, then in the first.

    Args:
        result: the output's verdict.
        computed: the candidate's.
        golden: the reference's in FP64.
        models: the rounding model's.
        row: the only row of the batch to look at; None for all.
    """
    if computed.shape != golden.shape or (row is not None and golden.dim() < 2):
        return None
    dims = (1,) if row is not None else (1, 0) if golden.dim() > 1 else (0,) * golden.dim()
    for dim in dims:
        some = [x.double() if row is None else x.double()[row : row + 1] for x in (computed, golden, *models)]
        found = _first_along(dim, result, *some)
        if found is not None:
            return found
    return None


def _first_along(
    dim: int, result: TensorResult, computed: Tensor, golden: Tensor, *models: Tensor
) -> FirstWrong | None:
    if golden.shape[dim] < _FEWEST_POSITIONS:
        return None
    count, each = golden.shape[dim], golden.numel() // golden.shape[dim]
    sizes = _compute_position_norms(golden, dim).clamp(min=_TINY)
    errors = _compute_position_norms(computed - golden, dim)
    # A model's error at one position may be small by chance, so the error over all positions counts as well.
    typical = result.expected.relative_l2 * norm_of(golden) / count**0.5
    expected = (
        torch.stack([_compute_position_norms(model - golden, dim) for model in models]).amax(0).clamp(min=typical)
    )
    allowed = max(result.tolerance_relative_l2 / max(result.expected.relative_l2, _TINY), 1.0)
    wrong = (errors > allowed * (1.0 + _CHANCE / each**0.5) * expected).nonzero().flatten().tolist()
    if not wrong or wrong[0] == 0:
        return None
    at = wrong[0]
    # If positions are right by chance as often as they are from here on, all before may be right by chance as well.
    if (1.0 - len(wrong) / (count - at)) ** at > _LIKELY:
        return None
    return FirstWrong(dim, at, count, float(errors[at] / sizes[at]), float(expected[at] / sizes[at]))


def _compute_position_norms(x: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(x.movedim(dim, 0).reshape(x.shape[dim], -1), dim=1)


def first_wrong_told(
    results: Sequence[TensorResult], candidate: Tensors, golden: Tensors, models: Sequence[Tensors]
) -> Iterator[str]:
    """Yield a sentence for each failed output that is right up to some position."""
    for result in results:
        if result.kind != "output" or result.passed or not result.finite:
            continue
        key = result.key
        found = first_wrong(result, candidate[key], golden[key], [model[key] for model in models])
        if found is not None:
            where = f"position {found.index}" if found.dim == 1 else f"index {found.index} of dimension {found.dim}"
            yield (
                f"{result.label} is right before {where} (of {found.count}, counted from 0); there its "
                f"relative error is {found.error:.2g}, but {found.expected:.2g} is expected"
            )


# How far log-probabilities of tokens are off, in the numbers that trainers of language models watch.


# The logarithm of a probability of 1 may be rounded to either side of 0.
_ROUNDING = 1e-6


def log_prob_outputs(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the outputs that are log-probabilities of tokens, and keep them for the next precision."""

    def names() -> tuple[str, ...]:
        outputs = {name: x for name, x in prepared.golden.outputs.items() if x.dim() and _has_one_sign(x)}
        if not outputs:
            return ()
        return returned_log_probs(kept_calls(prepared).trace, outputs)

    return prepared.cache.get("log probs", names)


_FEWEST_LOG_PROBS = 4  # the chance that this many have only 16 bits each is one in 2**64


def are_log_probs_of(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether log-probabilities that are returned in FP32 were taken in fewer bits."""
    return x.dtype is torch.float32 and x.numel() >= _FEWEST_LOG_PROBS and torch.equal(x.to(dtype).to(x.dtype), x)


def _has_one_sign(x: Tensor) -> bool:
    """Return whether numbers are all negative or all positive except for rounding, as log-probabilities are."""
    return bool((x < _ROUNDING).all()) or bool((x > -_ROUNDING).all())


def describe_pictures(
    names: Sequence[str], candidate: Tensors, golden: Tensors, models: Sequence[Tensors]
) -> Iterator[str]:
    """Yield a sentence for each output of log-probabilities.

    The ratio of probabilities is the reference's over the candidate's, as a trainer's over its engine's. KL is the
    average of ``ratio - 1 - log(ratio)`` over the tokens (Schulman's k3). Tokens whose golden log-probability is 0 are
    padding and are left out.

    Args:
        names: the names of these outputs.
        candidate, golden: all tensors.
        models: the rounding model's, which show the effect of rounding alone.
    """
    for name in names:
        right, computed = golden["output", name].double(), candidate["output", name]
        counts = right != 0
        if computed.shape != right.shape or not bool(counts.any()):
            continue
        sign = -1.0 if bool((right[counts] > 0).all()) else 1.0  # a loss per token is a negative log-probability
        off = sign * (computed.double() - right) * counts
        if not bool(off.isfinite().all()):
            continue
        of_models = [sign * (model["output", name].double() - right) * counts for model in models]
        at = ", ".join(str(index) for index in np.unravel_index(int(off.abs().argmax()), off.shape))
        ratios = (-off[counts]).exp()
        yield (
            f"log-probabilities of {name} are off by {_average_magnitude(off, counts):.2g} on average (by rounding "
            f"alone, {_describe_range(_average_magnitude(one, counts) for one in of_models)}), and by at most "
            f"{off.abs().max():.2g}, at [{at}] (by rounding alone, "
            f"{_describe_range(float(one.abs().max()) for one in of_models)}); ratios of probabilities are "
            f"{ratios.min():.4g} to {ratios.max():.4g}; KL {_estimate_kl(off[counts]):.2g} (by rounding alone, "
            f"{_describe_range(_estimate_kl(one[counts]) for one in of_models)})"
            f"{_of_their_dtype(computed, right, counts)}"
        )


def _average_magnitude(off: Tensor, counts: Tensor) -> float:
    return off[counts].abs().mean().item()


def _estimate_kl(off: Tensor) -> float:
    """Return the average of ``ratio - 1 - log(ratio)``, with the ratio ``exp(-off)``."""
    return (torch.expm1(-off) + off).mean().item()


def _describe_range(values: Iterator[float]) -> str:
    """Return one number, or the least and the largest."""
    told = sorted(f"{value:.2g}" for value in values)
    return " to ".join(dict.fromkeys((told[0], told[-1])))


def _of_their_dtype(computed: Tensor, right: Tensor, counts: Tensor) -> str:
    """Say how much log-probabilities lose by being returned in 16 bits; return an empty text for other dtypes."""
    if computed.dtype not in (torch.bfloat16, torch.float16):
        return ""
    lost = (right.to(computed.dtype).double() - right)[counts].abs().mean().item()
    name = str(computed.dtype).removeprefix("torch.")
    return f"; returning them in {name} instead of FP32 alone makes an error of {lost:.2g} on average"
