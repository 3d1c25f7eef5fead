"""Recognise norms in a trace, and yield mistakes in them: eps, kind, rounding, groups."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.mistakes.alternatives import numbers
from parity.mistakes.hypothesis import (
    Hypothesis,
    Mistake,
    Row,
    at_each_scope,
    low_dtypes,
    rounded_to,
    short,
    titled,
    with_attributes,
)
from parity.mistakes.usual_numbers import USUAL
from parity.result import NO_CODE, Code
from parity.trace.trace import (
    RESHAPES,
    Call,
    Changed,
    Edit,
    Trace,
    Value,
    agree,
    back,
    binary,
    chain,
    instead,
    once_a_trace,
    other,
    passing_on,
    users,
    with_number,
)

# Norms, whether called or written out, and mistakes in them.


_IN_LIST = re.compile(r"(.+?)\.\d+\.")  # matches the path of a module in a list of layers


@dataclass(frozen=True)
class Norm:
    """``(x - mean) / sqrt(mean of squares + eps) * gain + bias`` over the last dimension.

    If squares are summed instead of averaged, TE calls this L2Normalization. TE divides by the number of channels and
    adds eps inside the root; ``x.std(-1)`` divides by one less, and many references add eps to it.

    Attributes:
        call: the last of the calls that compute it.
        x: the value to normalise.
        centred: whether the mean is subtracted: LayerNorm if so, else RMSNorm.
        eps: added to the mean of squares; None for RMSNorm's default, the dtype's machine epsilon.
        gain: ``[width]``, or None.
        bias: ``[width]``, or None.
        summed: whether the sum of squares replaces their mean, so that every row has length 1.
        unbiased: whether the squares are divided by one less than the number of channels; only for LayerNorm.
        eps_outside: whether eps is added to the root and not inside it.
        statistics: dtype to which mean and mean of squares are rounded; None for the computation's own.
        root: dtype to which the reciprocal root is rounded; None for the computation's own.
        before_gain: dtype to which the normalised value is rounded before it is scaled; None for the computation's own.
        times: how often the norm is applied, each time to the previous result.
    """

    call: Call
    x: Value
    centred: bool
    eps: float | None
    gain: Value | None = None
    bias: Value | None = None
    summed: bool = False
    unbiased: bool = False
    eps_outside: bool = False
    statistics: torch.dtype | None = None
    root: torch.dtype | None = None
    before_gain: torch.dtype | None = None
    times: int = 1

    def compute(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """Return the norm of ``x``, given its gain and bias if it has them."""
        for _ in range(self.times):
            x = self.scaled(self.normalized(x), *parameters)
        return x

    def normalized(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` before gain and bias."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        if self.centred:
            x = x - rounded_to(x.mean(-1, keepdim=True), self.statistics)
        squares = x.square()
        size = squares.sum(-1, keepdim=True) if self.summed else squares.mean(-1, keepdim=True)
        if self.unbiased:
            size = size * (x.shape[-1] / max(x.shape[-1] - 1, 1))
        size = rounded_to(size, self.statistics)
        root = 1.0 / (size.sqrt() + eps) if self.eps_outside else torch.rsqrt(size + eps)
        reciprocal = rounded_to(root, self.root)
        return rounded_to(x * reciprocal, self.before_gain)

    def scaled(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """Return the normalised value times the gain, plus the bias, if the norm has them."""
        affine = iter(parameters)
        y = y if self.gain is None else y * next(affine)
        return y if self.bias is None else y + next(affine)

    @property
    def needs(self) -> tuple[Value, ...]:
        """The values that ``compute`` takes."""
        return tuple(value for value in (self.x, self.gain, self.bias) if value is not None)

    def edits(self, **changes: object) -> tuple[Edit, ...]:
        """Return the edits that compute the norm with other attributes; empty if they are the same."""
        changed = replace(self, **changes)  # type: ignore[arg-type]
        if changed == self:
            return ()
        return (instead(self.call, self.needs, changed.compute, Changed(self, changes)),)


@once_a_trace
def norms(trace: Trace) -> list[Norm]:
    """Return every norm over the last dimension that the trace computes, in order."""
    seeming = [norm for call in trace.calls if (norm := _called(call) or _written_out(trace, call)) is not None]
    return [norm for one in seeming if (norm := _as_computed(trace, one)) is not None]


def _as_computed(trace: Trace, norm: Norm) -> Norm | None:
    """Return the norm with the divisor that reproduces its result; None if it only looks like a norm."""
    result = trace.tensor(norm.call.outputs[0])
    for one in (norm, replace(norm, unbiased=True)) if norm.centred else (norm,):
        if agree(one.compute(*map(trace.tensor, one.needs)), result):
            return one
    return None


def norm_hypotheses(trace: Trace, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's norms.

    Args:
        trace: the reference's trace.
        dtype: the dtype in which the port stores activations.
    """
    found = norms(trace)
    mistakes = _mistakes(found, dtype)
    yield from at_each_scope(mistakes, found, lambda one: one.call.module, lambda one: kinds(one, trace))


def kinds(norm: Norm, trace: Trace) -> list[str]:
    """Return a norm's kinds: by its channels, few for queries and keys, and by the list of layers that it is in."""
    of_size = f"norms of {trace.tensor(norm.x).shape[-1]} channels"
    in_list = _IN_LIST.match(f"{norm.call.module}.")
    return [of_size, *([f"{of_size} in {in_list[1]}"] if in_list else [])]


def _mistakes(found: Sequence[Norm], dtype: torch.dtype) -> Iterator[Mistake[Norm]]:
    named = sorted({norm.eps for norm in found if norm.eps is not None})
    right = " or ".join(f"{eps:g}" for eps in named) or "the machine epsilon, PyTorch's default"

    def with_eps(eps: float) -> Mistake[Norm]:
        repair = f"give TE's norm the reference's eps, {right}; it computes with eps={eps:.4g}"
        code = Code((f"eps={eps:.4g}",), (f"eps={named[0]:g}",)) if len(named) == 1 else NO_CODE
        return Mistake(
            "norm-eps", f"norm eps={eps:.4g}", repair, with_attributes(eps=eps), eps in told_apart, code=code
        )

    told_apart = _told_apart(named)
    yield from numbers(with_eps, named, (*USUAL.norm_eps, *USUAL.large_norm_eps))
    # BF16 in an FP16 port is not a subtle mistake.
    for low in low_dtypes(dtype):
        yield from _rounded_statistics(low, subtle=dtype in (low, torch.float32))
    if dtype is not torch.float32:
        name, late = f"norm rounded to {short(dtype)} before its weight", "scale by the norm's weight in FP32"
        repair = f"{late} and round after that, as TE does; the normalised value is rounded to {short(dtype)} first"
        early = with_attributes(lambda norm: norm.gain is not None, before_gain=dtype)
        yield Mistake("norm-rounding", name, repair, early, subtle=True)
    yield from titled("norm-kind", _KINDS)
    yield from titled("norm-statistics", _DIVISORS, subtle=True)
    yield from titled("norm-eps", _PLACES_OF_EPS)
    yield Mistake(
        "norm-statistics",
        "norm variance over n and eps inside the root",
        "write the norm as the reference has it, in plain PyTorch: TE divides the sum of squares by n, not n - 1, and "
        "adds eps inside the root, not outside",
        with_attributes(lambda norm: norm.unbiased and norm.eps_outside, unbiased=False, eps_outside=False),
    )
    missing = "add the norm that the reference has; TE's module passes on what it is given"
    yield Mistake("norm-missing", "norm missing", missing, lambda norm: (passing_on(norm.call, norm.x),))
    once = "apply the norm once, as the reference does; its result is normalised and scaled again"
    yield Mistake("norm-twice", "norm twice", once, with_attributes(lambda norm: norm.gain is not None, times=2))


def _is_rms(norm: Norm) -> bool:
    return not norm.centred and not norm.summed


def _is_layer_norm(norm: Norm) -> bool:
    return norm.centred and not norm.summed


_KINDS: dict[str, Row[Norm]] = {
    "LayerNorm for RMSNorm": (
        'give TE\'s module normalization="RMSNorm", as the reference has it; it subtracts the mean',
        with_attributes(_is_rms, centred=True),
    ),
    "RMSNorm for LayerNorm": (
        'give TE\'s module normalization="LayerNorm", as the reference has it; it does not subtract the mean',
        with_attributes(_is_layer_norm, centred=False),
    ),
    "L2Normalization for RMSNorm": (
        "give TE RMSNorm, as the reference has it; it divides by the root of the squares' sum (L2Normalization), not "
        "of their mean, or the port divides what follows by the root of their number",
        with_attributes(_is_rms, summed=True),
    ),
    "RMSNorm for L2Normalization": (
        "give TE L2Normalization, as the reference has it; it divides by the root of the squares' mean (RMSNorm), not "
        "of their sum, or the port multiplies what follows by the root of their number",
        with_attributes(lambda norm: norm.summed, summed=False),
    ),
}
_DIVISORS: dict[str, Row[Norm]] = {
    "norm variance over n, not n - 1": (
        "divide the sum of squares by n - 1, one less than there are channels, as the reference's std or var does, "
        "or multiply the weight of TE's LayerNorm by sqrt((n - 1) / n): TE divides by n",
        with_attributes(lambda norm: norm.unbiased, unbiased=False),
    ),
    "norm variance over n - 1, not n": (
        "divide the sum of squares by the number of channels (unbiased=False), as the reference does, or multiply the "
        "weight of TE's LayerNorm by sqrt(n / (n - 1)) where that cannot be; the port divides it by n - 1",
        with_attributes(lambda norm: _is_layer_norm(norm) and not norm.unbiased, unbiased=True),
    ),
}
_PLACES_OF_EPS: dict[str, Row[Norm]] = {
    "norm eps inside the root, not outside": (
        "add eps to the root, as the reference does; TE adds it to the variance, inside the root",
        with_attributes(lambda norm: norm.eps_outside, eps_outside=False),
    ),
    "norm eps outside the root, not inside": (
        "add eps to the variance, inside the root, as the reference and TE's norms do; the port adds it to the root",
        with_attributes(lambda norm: not norm.eps_outside, eps_outside=True),
    ),
}


def _told_apart(right: Sequence[float]) -> list[float]:
    """Return usual eps none of which changes norms of eps ``right`` by 0.5 to 1.5 times as much as another does.

    A matched filter cannot tell such changes apart, because all point along one line.
    """
    kept: list[float] = []
    for eps in USUAL.norm_eps:
        if not right or not any(all(abs(eps - one) <= 0.5 * abs(one - own) for own in right) for one in kept):
            kept.append(eps)
    return kept


def _rounded_statistics(low: torch.dtype, subtle: bool) -> Iterator[Mistake[Norm]]:
    rounded: dict[str, dict[str, Any]] = {
        "statistics": dict(statistics=low, root=low),
        "reciprocal root": dict(root=low),
        "mean of squares": dict(statistics=low),
    }
    for what, changes in rounded.items():
        repair = f"take the norm's mean and root in FP32; {what} rounded to {short(low)}"
        yield Mistake("norm-statistics", f"norm {what} in {short(low)}", repair, with_attributes(**changes), subtle)


def _called(call: Call) -> Norm | None:
    """Return the norm that a call of one of PyTorch's functions computes."""
    if call.name == "normalize":
        return _normalized(call)
    if call.name not in ("rms_norm", "layer_norm") or not call.outputs:
        return None
    bound = inspect.signature(F.rms_norm if call.name == "rms_norm" else F.layer_norm).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if len(given["normalized_shape"]) != 1:
        return None
    return Norm(call, given["input"], call.name == "layer_norm", given["eps"], given["weight"], given.get("bias"))


def _normalized(call: Call) -> Norm | None:
    """Return the norm of an ``F.normalize`` over the last dimension; its eps is the least length it divides by."""
    bound = inspect.signature(F.normalize).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["p"] != 2 or given["dim"] != -1 or not call.outputs or not isinstance(given["input"], Value):
        return None
    return Norm(call, given["input"], False, given["eps"] ** 2, summed=True)


def _written_out(trace: Trace, call: Call) -> Norm | None:
    """Return the norm whose root or reciprocal root is ``call``, with a mean of squares before and scaling after it."""
    eps = 0.0
    match with_number(call):
        case ("pow", variance, exponent) if abs(exponent) == 0.5:
            pass
        case _ if call.name in ("rsqrt", "sqrt") and call.inputs:
            variance = call.inputs[0]
        case _ if call.name == "std" and call.inputs and call.outputs:
            variance = call.outputs[0]
        case _:
            return None
    if call.name != "std":
        match with_number(trace.producer(variance)):
            case ("add", variance, eps):
                pass
    source = _averaged(trace, back(trace, variance))
    if source is None:
        return None
    x, centred, summed, differences = source
    for user, _ in users(trace, call.outputs[0]):
        match with_number(user):
            case ("add", _, number) if not eps and user.outputs:
                norm = _scaled_by(trace, user.outputs[0], Norm(user, x, centred, number, summed=summed), differences)
                return None if norm is None else replace(norm, eps_outside=True)
    return _scaled_by(trace, call.outputs[0], Norm(call, x, centred, eps, summed=summed), differences)


def _scaled_by(trace: Trace, root: Value, norm: Norm, differences: set[Value]) -> Norm | None:
    """Return the norm that multiplies or divides one of these differences by a root."""
    for user, value in users(trace, root):
        named = binary(user)
        if named and named[0] in ("mul", "div") and back(trace, other(user, value)) in differences:
            return _with_parameters(trace, replace(norm, call=user))
        if named and named[0] == "div" and isinstance(named[1], float | int):  # 1 / sqrt(...)
            for scaled, by in users(trace, user.outputs[0]):
                if back(trace, other(scaled, by)) in differences:
                    return _with_parameters(trace, replace(norm, call=scaled))
    return None


def _averaged(trace: Trace, variance: Value) -> tuple[Value, bool, bool, set[Value]] | None:
    """Return the input of a mean or sum of squares.

    Returns:
        The input, whether its mean was subtracted, whether squares are summed, and the values that may be scaled.
    """
    call = trace.producer(variance)
    if call is None or not call.inputs:
        return None
    if call.name in ("var", "std"):
        x = back(trace, call.inputs[0])
        centred = {made.outputs[0] for made, _ in users(trace, x) if made.name == "sub" and made.outputs}
        return x, True, False, centred
    squares = trace.producer(back(trace, call.inputs[0]))
    summed = call.name == "sum"
    if not (summed or call.name == "mean") or squares is None or not squares.inputs:
        return None
    match binary(squares):
        case ("pow", Value() as root, 2 | 2.0):
            pass
        case ("mul", Value() as root, same) if same == root:
            pass
        case _ if squares.name == "square":
            root = squares.inputs[0]
        case _:
            return None
    root = back(trace, root)
    difference = binary(trace.producer(root))
    if difference and difference[0] == "sub":
        x, mean = (back(trace, operand) for operand in difference[1:])
        subtracted = trace.producer(mean)
        if subtracted is not None and subtracted.name == "mean":
            return x, True, summed, set(_differences(trace, x, mean))
    return root, False, summed, {root}


def _differences(trace: Trace, x: Value, mean: Value) -> Iterator[Value]:
    """Yield each subtraction of the mean: some norms subtract once for the squares and again for the result."""
    for call, value in users(trace, x):
        match binary(call):
            case ("sub", left, right) if left == value and back(trace, right) == mean:
                yield call.outputs[0]


def _with_parameters(trace: Trace, norm: Norm) -> Norm:
    """Return the norm with the gain and bias that are applied next, if there are any."""
    width = trace.tensor(norm.x).shape[-1:]

    def applied(wanted: str, call: Call) -> tuple[Call, Value | None]:
        for user, value in users(trace, call.outputs[0]):
            named, parameter = binary(user), other(user, value)
            is_affine = named is not None and named[0] == wanted and isinstance(parameter, Value)
            if is_affine and trace.tensor(parameter).shape == width:
                return user, parameter
        return call, None

    call, gain = applied("mul", norm.call)
    call, bias = applied("add", call)
    return replace(norm, call=call, gain=gain, bias=bias)


# Norms over more or fewer channels than the reference's: those of one head, of a group, or of all heads.


_FEWEST = 16  # a group has at least this many channels


@dataclass(frozen=True)
class _Grouped:
    """A norm, and other ways to group its channels.

    Attributes:
        norm: the reference's norm.
        axis: the dimension of its input that was split off the channels; None if there is none.
        channels: how many there are in all heads or groups together.
        parts: other numbers of channels that could be normalised at a time.
    """

    norm: Norm
    axis: int | None
    channels: int
    parts: frozenset[int]

    def edits(self, channels: int) -> tuple[Edit, ...]:
        """Return the edits that normalise this many channels at a time; empty if that is not among ``parts``."""
        if channels not in self.parts:
            return ()
        norm, axis = self.norm, self.axis

        def computed(x: Tensor, *parameters: Tensor) -> Tensor:
            whole = x if axis is None else _with_last(x, axis)
            y = norm.normalized(whole.unflatten(-1, (-1, channels))).reshape(whole.shape)
            y = y if axis is None else y.unflatten(-1, (x.shape[axis], -1)).movedim(-2, axis)
            return norm.scaled(y, *parameters)

        return (instead(norm.call, norm.needs, computed),)


def norm_group_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield norms of each head instead of all heads at once, the reverse, and other numbers of groups.

    OLMo 2 and OLMoE normalise the queries of all heads at once; TE's ``qk_norm_type`` and most models normalise those
    of each head.
    """
    found = [_grouped(trace, norm) for norm in norms(trace)]
    known: dict[str, Row[_Grouped]] = {
        "norm of all channels at once": (
            "normalise the channels of each head, or group, by themselves, as the reference does; the port normalises "
            "all at once",
            lambda one: one.edits(one.channels),
        )
    }
    right = "normalise as many channels at a time as the reference does, such as those of one head, or of all heads"
    for part in sorted({part for one in found for part in one.parts - {one.channels}}):
        repair = f"{right}; the port takes {part} at a time"
        known[f"norm of {part} channels at a time"] = repair, lambda one, part=part: one.edits(part)  # type: ignore[misc]
    places = lambda one: one.norm.call.module  # noqa: E731
    yield from at_each_scope(titled("norm-groups", known), found, places, lambda one: kinds(one.norm, trace))


def _grouped(trace: Trace, norm: Norm) -> _Grouped:
    x, axis = trace.tensor(norm.x), _axis(trace, norm)
    whole = x.shape[-1] * (1 if axis is None else x.shape[axis])
    shapes = (trace.tensor(made).shape for made in chain(trace, norm.call.outputs[0], RESHAPES))
    cut = {shape[-1] for shape in shapes if whole in (shape[-1] * size for size in shape[:-1])}
    usual = {whole // count for count in USUAL.norm_groups if whole % count == 0 and whole // count >= _FEWEST}
    return _Grouped(norm, axis, whole, frozenset({whole, *cut, *usual} - {x.shape[-1]}))


def _axis(trace: Trace, norm: Norm) -> int | None:
    x, whole = trace.tensor(norm.x), trace.tensor(back(trace, norm.x, RESHAPES))
    for axis, size in enumerate(x.shape[:-1]):
        if size > 1 and _are_rows_of(_with_last(x, axis), whole):
            return axis
    return None


def _with_last(x: Tensor, axis: int) -> Tensor:
    """Return ``x`` with one more dimension merged into the channels."""
    return x.movedim(axis, -2).flatten(-2)


def _are_rows_of(x: Tensor, whole: Tensor) -> bool:
    """Return whether two tensors have the same rows in any order, judged by their first channel."""
    if x.shape[-1:] != whole.shape[-1:] or x.numel() != whole.numel():
        return False
    return torch.equal(*(tensor[..., 0].flatten().sort().values for tensor in (x, whole)))
