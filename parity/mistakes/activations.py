"""Mistakes in activations, biases and clamps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.mistakes.alternatives import numbers, tunable
from parity.mistakes.hypothesis import (
    MOST_PLACES,
    Hypothesis,
    Mistake,
    Row,
    Scope,
    at_each_scope,
    each_place,
    more_like_it,
    titled,
    to_be_bounded,
    with_attributes,
)
from parity.mistakes.usual_numbers import USUAL
from parity.trace.trace import (
    CASTS,
    Call,
    Changed,
    Edit,
    Trace,
    Value,
    agree,
    back,
    binary,
    edit,
    grouped,
    instead,
    once_a_trace,
    other,
    passing_on,
    unnumbered,
    users,
    with_number,
)

# Mistakes in activations and gated units, whether called or written out.
#
# An activation is recognised by what it computes: on a sample of the traced elements, a result after a nonlinear
# function equals a known activation of a value before that function.


Pointwise = Callable[[Tensor], Tensor]


QUICK_ALPHA = 1.702
"""Factor inside the sigmoid of quick GELU and of gpt-oss's gated unit."""

ACTIVATIONS: dict[str, Pointwise] = {
    # TE's GELU comes first because it is the likelier one where 16 bits do not tell the two apart.
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "gelu (erf)": F.gelu,
    "quick gelu": lambda x: x * torch.sigmoid(QUICK_ALPHA * x),
    "silu": F.silu,
    "relu": F.relu,
    "squared relu": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
    "elu": F.elu,
    "leaky relu": F.leaky_relu,
}
GELUS = ("gelu (erf)", "gelu (tanh)", "quick gelu")
OF_TE = ("gelu (erf)", "gelu (tanh)", "quick gelu", "silu", "relu", "squared relu", "sigmoid")
"""Activations that TE's modules compute; only references and plain PyTorch modules compute the others."""


_NONLINEAR = frozenset(
    {"gelu", "silu", "relu", "sigmoid", "tanh", "erf", "clamp", "clamp_min", "maximum"}
    | {"mish", "hardswish", "softplus", "elu", "leaky_relu"}
)
_POINTWISE = CASTS | {"square"}
# A written-out GELU takes at most this many steps from its argument to its nonlinear function, and from there to its
# result.
_MOST_STEPS = 8
_SAMPLE = 2048


@dataclass(frozen=True)
class Activation:
    """``result = activation(x)``, element by element.

    Attributes:
        call: the last of the calls that compute it.
        x: its argument.
        name: a key of ``ACTIVATIONS``.
    """

    call: Call
    x: Value
    name: str

    def edits(self, name: str) -> tuple[Edit, ...]:
        """Return the edits that compute the activation of this name instead; empty if it is the same one."""
        if name == self.name:
            return ()
        return (instead(self.call, (self.x,), ACTIVATIONS[name]),)


@dataclass(frozen=True)
class GatedUnit:
    """``activation(min(gate, limit)) * (clamp(up, -limit, limit) + offset)``.

    Attributes:
        call: the product.
        gate: the argument of the activation, before it is clamped.
        up: the other factor, before it is clamped.
        activation: a key of ``ACTIVATIONS``.
        limit: infinite if nothing is clamped.
        offset: added to ``up``.
    """

    call: Call
    gate: Value
    up: Value
    activation: str
    limit: float = math.inf
    offset: float = 0.0

    def compute(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the unit's result."""
        if math.isfinite(self.limit):
            gate, up = gate.clamp(max=self.limit), to_be_bounded(up, self.limit).clamp(-self.limit, self.limit)
        return ACTIVATIONS[self.activation](gate) * (up + self.offset)

    def edits(self, **changes: object) -> tuple[Edit, ...]:
        """Return the edits that compute the unit with other attributes; empty if they are the same."""
        changed = replace(self, **changes)  # type: ignore[arg-type]
        if changed == self:
            return ()
        return (instead(self.call, (changed.gate, changed.up), changed.compute, Changed(self, changes)),)


def activations(trace: Trace) -> list[Activation]:
    """Return every known activation that the trace computes, in order."""
    found: dict[int, Activation] = {}
    for call in trace.calls:
        if call.name in _NONLINEAR and call.inputs and call.outputs:
            activation = _around(trace, call)
            if activation is not None:
                found[activation.x.number] = activation  # a squared relu replaces its relu, because it is found later
    return list(found.values())


@once_a_trace
def gated_units(trace: Trace) -> list[GatedUnit]:
    """Return every product of an activation and another value of the same shape, in order."""
    in_three = [unit for call in trace.calls if (unit := _in_three(trace, call)) is not None]
    known = {unit.call.site for unit in in_three}
    in_two = [unit for activation in activations(trace) if (unit := _gated(trace, activation)) is not None]
    return in_three + [unit for unit in in_two if unit.call.site not in known]


def activation_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's activations and gated units."""
    found, units = activations(trace), gated_units(trace)
    yield from at_each_scope(_others(found), found)
    by_name = grouped(found, lambda one: one.name)
    for name, alike in by_name.items() if len(by_name) > 1 else ():
        if len(alike) > 1:
            yield from _made_with(alike, "kind", f" for {name}")
    by_module = grouped(found, lambda one: unnumbered(one.call.module))
    for path, alike in by_module.items() if len(by_module) > 1 else ():
        if len(alike) > 1 and "#" in path:
            yield from _made_with(alike, "kind", f" in {alike[0].call.module}{more_like_it(len(alike))}")
    if 1 < len(found) <= MOST_PLACES:
        for place, one in zip(each_place([one.call.module for one in found]), found, strict=True):
            yield from _made_with([one], "one", f" in {place}")
    yield from at_each_scope(_unit_mistakes(units), units, lambda one: one.call.module)


def _made_with(some: list[Activation], scope: Scope, where: str) -> Iterator[Hypothesis]:
    """Yield the mistakes made with some of the reference's activations; messages name only those."""
    for one in at_each_scope(_others(some), some):
        yield replace(one, name=one.name + where, repair=one.repair + where, scope=scope)


def _others(found: list[Activation]) -> Iterator[Mistake[Activation]]:
    right = " or ".join(sorted({one.name for one in found}))
    # This comes first because a relu, too, leaves positive numbers as they are.
    repair = f"give TE the reference's activation, {right}; the port applies none"
    yield Mistake("activation", "activation missing", repair, lambda one: (passing_on(one.call, one.x),))
    for name in ACTIVATIONS:
        yield Mistake(
            "activation",
            f"activation {name}",
            f"give TE the reference's activation, {right}; it computes {name}",
            with_attributes(name=name),
            subtle=name in GELUS and all(one.name in GELUS for one in found),
            value=USUAL.leaky_slope if name == "leaky relu" else None,
            tuned=tunable(_leaky) if name == "leaky relu" else None,
        )


def _leaky(slope: float) -> Mistake[Activation]:
    return Mistake(
        "activation",
        f"activation leaky relu of slope {slope:.4g}",
        f"give TE the reference's activation; it computes a leaky relu with slope {slope:.4g}",
        lambda one: (instead(one.call, (one.x,), partial(F.leaky_relu, negative_slope=slope)),),
    )


def _unit_mistakes(units: list[GatedUnit]) -> Iterator[Mistake[GatedUnit]]:
    first = "exchange the halves of fc1_weight: the gate, which goes through the activation, comes first"
    swapped: dict[str, Row[GatedUnit]] = {
        "gate and up swapped": (first, lambda unit: unit.edits(gate=unit.up, up=unit.gate))
    }
    for name in OF_TE:
        swapped[f"gate and up swapped, activation {name}"] = (
            f"{first}; its activation is {name}",
            lambda unit, name=name: (  # type: ignore[misc]
                unit.edits(gate=unit.up, up=unit.gate, activation=name) if name != unit.activation else ()
            ),
        )
    yield from titled("gate-up-swapped", swapped)
    right = " or ".join(sorted({_clamping(unit.activation, unit.limit, unit.offset) for unit in units}))
    own = sorted({unit.limit for unit in units})
    by_sigmoid = ("silu", "quick gelu")

    def clamped(activation: str, offset: float, limit: float) -> Mistake[GatedUnit]:
        computed = _clamping(activation, limit, offset)
        return Mistake(
            "activation",
            f"gated unit {computed}",
            f"give TE's gated unit the reference's limit, alpha and offset ({right}); it computes {computed}",
            # Units with an activation that is not made of a sigmoid are never clamped.
            with_attributes(
                lambda unit: unit.activation in by_sigmoid, activation=activation, limit=limit, offset=offset
            ),
            subtle={(activation, offset)} == {(unit.activation, unit.offset) for unit in units}
            and limit in (math.inf, *USUAL.gate_limits),
            adds=own == [math.inf] and math.isfinite(limit),
        )

    for activation in by_sigmoid:
        for offset in (0.0, 1.0):
            another = partial(clamped, activation, offset)
            yield another(math.inf)
            yield from numbers(another, own, USUAL.gate_limits)


def _clamping(activation: str, limit: float, offset: float) -> str:
    alpha = QUICK_ALPHA if activation == "quick gelu" else 1.0
    return f"limit={limit:g} alpha={alpha:g} offset={offset:g}"


def _around(trace: Trace, core: Call) -> Activation | None:
    """Return the known activation computed with a nonlinear function; of several, the one that ends last."""
    arguments = _pointwise_before(trace, core.inputs[0])
    best: Activation | None = None
    for call in _pointwise_after(trace, core, arguments):
        result = _sample(trace, call.outputs[0])
        for x in arguments:
            for name, function in ACTIVATIONS.items():
                if agree(function(_sample(trace, x).double()), result):
                    best = Activation(call, x, name)
    return best


def _pointwise_before(trace: Trace, value: Value) -> list[Value]:
    """Return ``value`` and the values it is computed from elementwise, as in GELU's polynomial."""
    found = queue = [value]
    for _ in range(_MOST_STEPS):
        given = [x for made in queue for x in _pointwise_inputs(trace.producer(made))]
        shape = trace.tensor(value).shape
        queue = [x for x in dict.fromkeys(given) if x not in found and trace.tensor(x).shape == shape]
        found = found + queue
    return found


def _pointwise_inputs(call: Call | None) -> list[Value]:
    return call.inputs if call is not None and (binary(call) or call.name in _POINTWISE) else []


def _pointwise_after(trace: Trace, core: Call, arguments: list[Value]) -> list[Call]:
    """Return ``core`` and the calls that use only its result and the arguments, in order."""
    known = {value.number for value in arguments}
    made_with_core = {core.outputs[0].number}
    found = [core]
    for call in trace.calls:
        if call is core or not call.outputs:
            continue
        inputs = {value.number for value in _pointwise_inputs(call)}
        if inputs and inputs <= known | made_with_core:
            if inputs & made_with_core:
                found.append(call)
                made_with_core.add(call.outputs[0].number)
            else:
                known.add(call.outputs[0].number)
        if len(found) > _MOST_STEPS:
            break
    return found


def _sample(trace: Trace, value: Value) -> Tensor:
    return trace.tensor(value).flatten()[:_SAMPLE]


def _gated(trace: Trace, activation: Activation) -> GatedUnit | None:
    """Return the gated unit that multiplies an activation's result by another value of its shape."""
    shape = trace.tensor(activation.x).shape
    for call, result in users(trace, activation.call.outputs[0]):
        named = binary(call)
        factor = other(call, result)
        if named is None or named[0] != "mul" or not isinstance(factor, Value) or factor == result:
            continue
        if trace.tensor(factor).shape != shape or trace.parameter(factor):
            continue
        unit = _unit(trace, call, activation.x, factor, activation.name)
        if unit is not None:
            return unit
    return None


def _in_three(trace: Trace, call: Call) -> GatedUnit | None:
    """Return the gated unit that multiplies a gate, its sigmoid and another value, in any order."""
    factors = _factors(trace, call)
    shape = trace.tensor(call.outputs[0]).shape if len(call.outputs) == 1 else None
    if len(factors) != 3 or any(trace.tensor(x).shape != shape or trace.parameter(x) for x in factors):
        return None
    for sigmoid in factors:
        made = trace.producer(back(trace, sigmoid))
        if made is None or made.name != "sigmoid":
            continue
        scaled = with_number(trace.producer(back(trace, made.inputs[0])))
        x = scaled[1] if scaled is not None and scaled[0] == "mul" else made.inputs[0]
        name = "silu" if scaled is None or scaled[0] != "mul" else "quick gelu"
        rest = [factor for factor in factors if back(trace, factor) != back(trace, x) and factor != sigmoid]
        if len(rest) == 1:
            return _unit(trace, call, x, rest[0], name)
    return None


def _factors(trace: Trace, call: Call) -> list[Value]:
    """Return the factors of a product; a factor that is itself a product is replaced by its own factors."""
    inner = ((x, _factors_of_two(trace.producer(back(trace, x)))) for x in _factors_of_two(call))
    return [factor for x, factors in inner for factor in factors or [x]]


def _factors_of_two(call: Call | None) -> list[Value]:
    match binary(call):
        case ("mul", Value() as left, Value() as right):
            return [left, right]
    return []


def _unit(trace: Trace, call: Call, x: Value, factor: Value, activation: str) -> GatedUnit | None:
    """Return the gated unit that a product computes from ``x`` and another factor; None if it computes none."""
    gate, limit = _before_clamp(trace, x)
    up, offset = factor, 0.0
    match with_number(trace.producer(back(trace, up))):
        case ("add", up, offset):
            pass
    up, _ = _before_clamp(trace, up)
    unit = GatedUnit(call, gate, up, activation, limit, offset)
    return unit if agree(unit.compute(trace.tensor(gate), trace.tensor(up)), trace.tensor(call.outputs[0])) else None


def _before_clamp(trace: Trace, value: Value) -> tuple[Value, float]:
    """Return the value before it was clamped, and its upper limit, which is infinite if nothing was clamped."""
    call = trace.producer(back(trace, value))
    if call is None or call.name not in ("clamp", "clamp_max", "clip", "minimum"):
        return value, math.inf
    bounds = [bound for bound in (*call.args[1:], *call.kwargs.values()) if isinstance(bound, int | float)]
    return (call.inputs[0], float(max(bounds))) if bounds else (value, math.inf)


# Mistakes in biases.


@dataclass(frozen=True, eq=False)
class Bias:
    """The addition of a parameter of one dimension, by itself or inside a linear layer.

    Attributes:
        call: returns the sum.
        bias: the parameter.
        name: the parameter's name.
    """

    call: Call
    bias: Value
    name: str

    def edits(self, times: float) -> tuple[Edit, ...]:
        """Return the edits that add the bias ``times`` times."""
        return (edit(self.call, (self.bias,), lambda was, bias: was + (times - 1) * bias.to(was.dtype)),)

    def without_third(self, trace: Trace, third: int) -> tuple[Edit, ...]:
        """Return the edits that leave out a third of a fused QKV layer's bias; empty if the layer is not one."""
        width = trace.tensor(self.bias).shape[0] // 3
        if self.call.name == "add" or trace.tensor(self.call.inputs[self.call.name == "addmm"]).shape[-1] != width:
            return ()

        def compute(was: Tensor, bias: Tensor) -> Tensor:
            left_out = torch.zeros_like(bias)
            left_out[third * width : (third + 1) * width] = bias[third * width : (third + 1) * width]
            return was - left_out.to(was.dtype)

        return (edit(self.call, (self.bias,), compute),)


def biases(trace: Trace) -> list[Bias]:
    """Return every bias of a linear layer, in order."""
    found = []
    for call in trace.calls:
        named = binary(call)
        if call.name == "linear" and call.outputs:
            given = [*call.args[2:], *call.kwargs.values()]
        elif call.name == "addmm":
            given = [call.args[0]]
        elif named is not None and named[0] == "add":
            given = list(named[1:])
        else:
            continue
        for value in given:
            name = trace.parameter(value)
            if name is not None and trace.tensor(value).dim() == 1:
                found.append(Bias(call, value, name))
    return found


def bias_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's biases."""
    mistakes: list[Mistake[Bias]] = [
        Mistake("bias-dropped", "bias missing", "add the bias; the port leaves it out", with_attributes(times=0.0)),
        Mistake(
            "bias-added-twice", "bias twice", "add the bias once; the port adds it twice", with_attributes(times=2.0)
        ),
    ]
    for third, part in enumerate(("first", "second", "last")):
        name = f"{part} third of the bias missing"
        repair = f"add the whole bias of the fused layer; the port leaves out its {part} third ({'QKV'[third]} of QKV)"
        left_out = lambda one, third=third: one.without_third(trace, third)  # noqa: E731
        mistakes.append(Mistake("bias-dropped", name, repair, left_out))
    alike = lambda one: (unnumbered(one.name),)  # noqa: E731
    yield from at_each_scope(mistakes, biases(trace), lambda one: one.name, alike)


# Mistakes in clamps. OLMo's ``clip_qkv`` clamps queries, keys and values at both ends; gpt-oss clamps its gates only
# at the upper end.


@dataclass(frozen=True, eq=False)
class Clamp:
    """``call`` clamps ``x`` to at most ``limit`` and, if ``both`` ends are clamped, to at least ``-limit``."""

    call: Call
    x: Value
    limit: float
    both: bool

    def edits(self, limit: float, both: bool) -> tuple[Edit, ...]:
        """Return the edits that clamp with other settings; empty if they are the same."""
        if math.isclose(limit, self.limit) and both == self.both:
            return ()
        clamped = lambda was, x: to_be_bounded(x, limit).clamp(-limit if both else -math.inf, limit)  # noqa: E731
        return (edit(self.call, (self.x,), clamped),)


def clamp_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield clamps that are missing or have another limit or other ends, for all activations clamped alike."""
    found = filter(None, (_clamp(trace, call) for call in trace.calls))
    for right, alike in grouped(found, lambda one: (one.limit, one.both)).items():
        limit, both = right
        another = partial(_clamped_otherwise, right, both)
        known = another(math.inf), _clamped_otherwise(right, not both, limit)
        yield from at_each_scope(chain(known, numbers(another, [limit])), alike)


def _clamp(trace: Trace, call: Call) -> Clamp | None:
    """Return the clamp that a call computes, if it limits activations."""
    if call.name not in ("clamp", "clip") or not call.args or not isinstance(call.args[0], Value):
        return None
    given = dict(zip(("min", "max"), call.args[1:], strict=False)) | call.kwargs
    low, high = given.get("min"), given.get("max")
    x = trace.tensor(call.args[0])
    if not isinstance(low, int | float | None) or not isinstance(high, int | float) or not x.is_floating_point():
        return None
    known = high > 0.0 and low in (None, -high)
    return Clamp(call, call.args[0], float(high), low is not None) if x.dim() > 1 and known else None


def _clamped_otherwise(right: tuple[float, bool], both: bool, limit: float) -> Mistake[Clamp]:
    def ends(limit: float, both: bool) -> str:
        return f"between -{limit:.4g} and {limit:.4g}" if both else f"to at most {limit:.4g}"

    name, what = "clamp missing", "the port does not clamp them"
    if math.isfinite(limit):
        name, what = f"clamp {ends(limit, both)}", f"they are clamped {ends(limit, both)}"
    repair = f"clamp activations {ends(*right)}, as the reference does; {what}"
    return Mistake("operation", name, repair, with_attributes(limit=limit, both=both))
