"""Find known mistakes of precision, each of which is another rounding of the reference.

A candidate's rounding errors are deterministic up to the order of sums. So if it rounds like one of these mistakes, the
reference under that rounding is nearer to it than under the precision's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parity.case.transfer import parameter_shapes
from parity.case.weight_map import Side, describe, names, pack, shape_of, unpack
from parity.judge.pictures import are_log_probs_of
from parity.mistakes.codes import finding, repairable
from parity.mistakes.hypothesis import MOST_PLACES, Hypothesis
from parity.mistakes.losses import log_softmaxes, returned_log_probs
from parity.mistakes.replay import tensors_with
from parity.numerics.errors import norm_of
from parity.numerics.formats import Format, Rounding, largest, spacing, tf32
from parity.numerics.freedom import FUSED
from parity.passes.all_passes import Tensors
from parity.passes.prepare import Prepared
from parity.result import Finding, TensorResult
from parity.search.failure import Budget, Failure
from parity.search.search import AS_WELL
from parity.trace.trace import Trace

if TYPE_CHECKING:
    from parity.te import Precision

_NEARER = 0.7
"""A mistaken rounding is reported if its distance is below this share of the distance to the precision's own."""

_LEFT = 2.0
"""A mistaken rounding may leave an error of this many times what the precision costs."""

_UNSTORED = 2.0
"""Outputs that are not rounded to the dtype they are stored in may leave this many times as much."""

_MANY = 64


@dataclass(frozen=True)
class _Mistake:
    """Another rounding.

    Attributes:
        title: the finding's title.
        what: what is computed, as the start of a sentence.
        repair: what to change.
        rounding: the rounding that replaces the precision's.
        inside: a context for the pass, for what a ``Rounding`` cannot express.
    """

    title: str
    what: str
    repair: str
    rounding: Rounding
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


def precision_findings(failure: Failure, budget: Budget) -> list[Finding]:
    """Return a finding on the rounding to which the candidate's tensors are nearest, unless it is the precision's."""
    wrong = [result for result in failure.results if not result.passed and result.finite]
    # A wrong forward pass spoils gradients in its own ways, so outputs count first. But what a handful of numbers tells
    # about their rounding is chance.
    outputs = [result for result in wrong if result.kind == "output" and math.prod(result.shape) >= _MANY]
    own = tensors_with(failure.prepared, (), failure.precision)
    if own is None or not wrong:
        return []
    nearest: dict[str, tuple[tuple[float, float], bool, _Mistake]] = {}  # by title

    def may_leave(computed: Mapping[str, Tensor]) -> bool:
        return all(_leaves_a_rounding(failure, one, {one.key: computed[one.name]}, _UNSTORED) for one in outputs)

    for mistake in _mistakes(failure.precision):
        if budget.spent():
            break
        precision = replace(failure.precision, replaced=mistake.rounding)
        with mistake.inside():
            other = tensors_with(failure.prepared, (), precision, freedom=FUSED, only_if=may_leave)
        if other is None:
            continue
        shares = {result.label: _share(failure, result, other, own) for result in wrong}
        share = max(shares[result.label] for result in outputs or wrong)
        if not all(_leaves_a_rounding(failure, result, other) for result in outputs or wrong):
            continue
        both = round(share, 2), max(shares.values())
        if share < _NEARER and (mistake.title not in nearest or both < nearest[mistake.title][0]):
            is_normal = all(_leaves_what_the_precision_costs(failure, result, other) for result in outputs or wrong)
            nearest[mistake.title] = both, is_normal, mistake
    least = min((both for both, *_ in nearest.values()), default=(0.0, 0.0))
    alike = [one for one in nearest.values() if all(x <= AS_WELL * y for x, y in zip(one[0], least, strict=True))]
    doubt = " It is one of these, which explain the error equally well." if len(alike) > 1 else ""
    return [
        finding(
            mistake.title,
            f"{mistake.what}: the candidate is {1 / max(share, 0.01):.2g} times nearer to a reference that rounds like "
            f"this than to one that rounds as {failure.precision.name} does. {mistake.repair}{doubt}",
            sure=is_normal and not doubt,
            repair=mistake.repair,
        )
        for (share, _), is_normal, mistake in alike
    ]


def log_prob_findings(failure: Failure, trace: Trace) -> Iterator[Finding]:
    """Yield a finding if log-probabilities in FP32 are all numbers of 16 bits, and rounding to these makes their error.

    The logits, the logarithm of the sum of their exponentials, and the difference of the two may be rounded.
    """
    names = returned_log_probs(trace, failure.prepared.golden.outputs)
    logits = [trace.tensor(one.x) for one in log_softmaxes(trace)]
    if not logits:
        return
    largest_terms = torch.stack([torch.stack((x.abs().amax(), x.logsumexp(-1).abs().amax())) for x in logits]).amax(0)
    for result in failure.outputs:
        candidate, golden = failure.candidate[result.key], failure.golden[result.key]
        if result.passed or result.name not in names:
            continue
        for dtype in (torch.bfloat16, torch.float16):
            steps = spacing(candidate.double(), dtype) + spacing(largest_terms.double(), dtype).sum()
            is_rounding = (candidate - golden).abs() <= 0.5 * steps + result.tolerance_max_abs
            if are_log_probs_of(candidate, dtype) and bool(is_rounding.all()):
                name = str(dtype).removeprefix("torch.")
                yield repairable(
                    "log-softmax-precision",
                    f"each number of {result.label} can be held in {name}, though it is returned in float32, and its "
                    f"error is no larger than this rounding and {failure.precision.name} explain",
                    "take log-probabilities in FP32, with logits.float().log_softmax(-1)",
                )
                return


def scale_hypotheses(prepared: Prepared, precision: Precision) -> Iterator[Hypothesis]:
    """Yield the mistakes that weights are multiplied by the scale of their quantization instead of its inverse."""
    if not precision.rounding.scales_whole_weights:
        return
    shapes = parameter_shapes(prepared.reference)
    matrices = [
        left
        for left in prepared.weights
        if len(shape_of(left, shapes)) > 1 and (prepared.outside_te | prepared.unquantized).isdisjoint(names(left))
    ]
    if not matrices:
        return
    yield _scaled_twice(prepared, matrices)
    for left in matrices if 1 < len(matrices) <= MOST_PLACES else ():
        yield _scaled_twice(prepared, [left], describe(prepared.weights[left]))


def _scaled_twice(prepared: Prepared, sides: Sequence[Side], place: str = "") -> Hypothesis:
    """Return the mistake that weights, all or those of one place, are multiplied by ``scale``, not ``scale_inv``."""
    shapes = parameter_shapes(prepared.reference)

    def read(reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
        others: dict[str, Tensor] = {}
        for left in sides:
            packed = pack(left, reference, next(iter(reference.values())))
            scale = torch.finfo(torch.float8_e4m3fn).max / packed.detach().abs().amax()
            # A weight's gradient is that of the quantized weight, which is what is multiplied.
            others |= unpack(left, packed + packed.detach() * (scale.square() - 1.0), shapes)
        return others

    of_one = f" of {place}" if place else ""
    return Hypothesis(
        "fp8-scale-inverted",
        f"weights{of_one} multiplied by their scale",
        f"multiply a quantized weight by scale_inv; {place or 'it'} is multiplied by scale",
        read=read,
        scope="one" if place else "all",
    )


def _share(failure: Failure, result: TensorResult, other: Tensors, own: Tensors) -> float:
    """Return the distance to another rounding, over the distance to the precision's own.

    It is that of the whole tensor or, if this is more, the median over the rows in which the two roundings differ,
    since a single token for which rounding chooses another expert may be most of a tensor's error.
    """
    candidate, rounded, right = (
        x.double().flatten(0, -2) if x.dim() > 1 else x.double()[None]
        for x in (failure.candidate[result.key], other[result.key], own[result.key])
    )
    pairs = (candidate - right, candidate - rounded, rounded - right)
    to_own, to_other, apart = (torch.linalg.vector_norm(x, dim=-1) for x in pairs)
    of_rows = (to_other / to_own)[(apart > 0.0) & (to_own > 0.0)]
    if not len(of_rows):
        return 1.0
    return max(norm_of(to_other) / norm_of(to_own), of_rows.median().item())


def _leaves_a_rounding(failure: Failure, result: TensorResult, other: Tensors, times: float = 1.0) -> bool:
    """Return whether another rounding leaves less error than ``times`` its own, and in FP8 also about the precision's.

    Saturation by a scale that is too large shrinks values, and so comes nearer to many wrong tensors.
    """
    candidate, rounded = failure.candidate[result.key].double(), other[result.key].double()
    is_nearer = norm_of(candidate - rounded) < times * norm_of(rounded - failure.golden[result.key])
    has_recipe = failure.precision.recipe is not None
    return is_nearer and (not has_recipe or _leaves_what_the_precision_costs(failure, result, other, times))


def _leaves_what_the_precision_costs(
    failure: Failure, result: TensorResult, other: Tensors, times: float = 1.0
) -> bool:
    """Return whether another rounding leaves about the precision's own error, or ``times`` as much."""
    left = norm_of(failure.candidate[result.key].double() - other[result.key].double())
    return left <= times * _LEFT * result.expected.relative_l2 * norm_of(failure.golden[result.key])


def _mistakes(precision: Precision) -> Iterator[_Mistake]:
    rounding = precision.rounding
    if precision.dtype is torch.float32:
        advice = "Keep autocast off, and inputs and weights in FP32"
        for name, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
            yield _Mistake("accumulation-precision", f"GEMMs read {name}", advice, _reading(_in(dtype)))
            yield _Mistake("accumulation-precision", f"results are stored in {name}", advice, Rounding(dtype))
        everything = "Set NVIDIA_TF32_OVERRIDE=0, or expect TF32 (10 bits) where true FP32 was promised"
        yield _Mistake(
            "tf32", "batched products, such as attention's, are TF32", everything, rounding, partial(_Batched, tf32)
        )
    advice = "Accumulate in FP32 (torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False)"
    for length in (16, 32, 64, 128):
        for stored, what in (
            (None, f"sums are rounded to BF16 after each {length} products"),
            (precision.dtype, f"sums of {length} products are stored and then added in BF16"),
        ):
            inside = partial(_Chunked, length, torch.bfloat16, stored)
            yield _Mistake("accumulation-precision", what, advice, rounding, inside)
    if precision.rounding.scales_whole_weights:
        yield from _of_scales(rounding)


def _of_scales(rounding: Rounding) -> Iterator[_Mistake]:
    update = (
        "Let the amax history update the scales: enter one autocast around each pass, which calls "
        "reduce_and_update at its end"
    )
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    yield _Mistake(
        "fp8-scale-stale",
        "inputs and weights are not scaled",
        update,
        replace(rounding, inputs=_unscaled(e4), weights=_unscaled(e4)),
    )
    yield _Mistake("fp8-gradient-scale", "gradients are not scaled", update, replace(rounding, gradients=_unscaled(e5)))
    for by in (2.0, 4.0, 8.0, 16.0, 1 / 16.0, 1 / 64.0, 1 / 256.0):
        end = "saturate" if by > 1 else "underflow"
        yield _Mistake(
            "fp8-scale-stale",
            f"scales of inputs and weights are {by:g} times what amax asks for, so that values {end}",
            f"{update}; margin=0",
            replace(rounding, inputs=_scaled(by, e4), weights=_scaled(by, e4)),
        )
        yield _Mistake(
            "fp8-margin",
            f"all scales are {by:g} times what amax asks for, so that values {end}",
            f"{update}; margin=0",
            replace(rounding, inputs=_scaled(by, e4), weights=_scaled(by, e4), gradients=_scaled(by, e5)),
        )


def _reading(to_format: Format) -> Rounding:
    return Rounding(torch.float32, to_format, to_format, to_format)


def _in(dtype: torch.dtype) -> Format:
    return lambda x, dim=-1, amax=None: x.to(dtype).to(x.dtype)


def _unscaled(dtype: torch.dtype) -> Format:
    """Return a format that casts without a scale; values that are too large saturate."""
    return lambda x, dim=-1, amax=None: _saturated(x, dtype)


def _scaled(by: float, dtype: torch.dtype) -> Format:
    """Return a format that multiplies by ``by`` times the scale that maps the largest magnitude to the format's own."""

    def to_format(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        amax = largest(x) if amax is None else amax
        scale = by * torch.finfo(dtype).max / amax if amax > 0 else torch.ones_like(amax)
        return _saturated(x * scale, dtype) / scale

    return to_format


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype).to(x.dtype)


_aten = torch.ops.aten


class _Batched(TorchDispatchMode):
    """Round the operands of batched GEMMs, which attention's products are."""

    def __init__(self, to_format: Format) -> None:
        super().__init__()
        self._to_format = to_format

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.bmm.default:
            args = tuple(self._to_format(x, -1) for x in args[:2])
        return func(*args, **(kwargs or {}))


class _Chunked(TorchDispatchMode):
    """Make GEMMs round their sum to ``dtype`` after every ``length`` products, whose sum may be ``stored`` first."""

    def __init__(self, length: int, dtype: torch.dtype, stored: torch.dtype | None) -> None:
        super().__init__()
        self._length = length
        self._dtype = dtype
        self._stored = stored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.mm.default:
            return self._product(args[0], args[1])
        if func is _aten.addmm.default and not kwargs:
            return args[0] + self._product(args[1], args[2])
        return func(*args, **(kwargs or {}))

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        total = left.new_zeros(left.shape[0], right.shape[1])
        for some, others in zip(left.split(self._length, 1), right.split(self._length, 0), strict=True):
            part = some @ others
            part = part if self._stored is None else part.to(self._stored).to(left.dtype)
            total = (total + part).to(self._dtype).to(left.dtype)
        return total
