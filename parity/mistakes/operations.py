"""Mistakes in single operations: left out, replaced, scaled, or with their operands exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parity.mistakes.activations import ACTIVATIONS
from parity.mistakes.alternatives import LEFT_OUT, OTHER_WAY, again, alternatives, numbers
from parity.mistakes.hypothesis import MOST_PLACES, Hypothesis, Mistake, at_each_scope, more_like_it
from parity.trace.trace import (
    CASTS,
    JOINS,
    LINEAR,
    RESHAPES,
    Call,
    Edit,
    Site,
    Trace,
    Value,
    added,
    argument,
    back,
    binary,
    edit,
    grouped,
    instead,
    unnumbered,
    users,
    with_number,
)

# Single calls that a port computes in another way, tried if no mistake with a known meaning explains the error.
#
# Calls that a model makes in each layer are changed in all layers at once. So are those that a module makes in each
# round of a loop.


_LONG = 12  # in a loop of more rounds, one round alone is hardly ever wrong


def operation_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield each call of the reference with each of its alternatives; calls of long loops in all rounds at once."""
    rounds = {call.site for calls in _in_loops(trace) if len(calls) > _LONG for call in calls}
    for calls in alike(trace):
        if calls[0].site not in rounds:
            yield from _all_otherwise(trace, calls)
    for calls in _of_one_number(trace):
        yield from _all_otherwise(trace, calls, (LEFT_OUT,))
    for calls in _there_and_back(trace):
        yield from _all_otherwise(trace, calls, (LEFT_OUT, OTHER_WAY))
    for calls in _in_turns(trace):
        yield from _all_otherwise(trace, calls)
    for calls in _in_loops(trace):
        yield from _all_otherwise(trace, calls)


def loop_operation_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield single calls of long loops, such as scans over time, with each of their alternatives."""
    rounds = {call.site for calls in _in_loops(trace) if len(calls) > _LONG for call in calls}
    for calls in alike(trace):
        if calls[0].site in rounds:
            yield from _all_otherwise(trace, calls)


def _all_otherwise(trace: Trace, calls: Sequence[Call], known: Collection[str] = ()) -> Iterator[Hypothesis]:
    """Yield the alternatives that these calls share, or only the ``known`` ones, made in all calls at once."""
    by_call = [{one.name: one for one in alternatives(trace, call)} for call in calls]
    for described in by_call[0]:
        if all(described in ones for ones in by_call) and (not known or described in known):
            yield _otherwise(calls, [ones[described] for ones in by_call])


def _in_loops(trace: Trace) -> Iterator[list[Call]]:
    """Yield a module's calls that differ only in tensors and numbers, such as those of a loop over layers or time."""

    def kind(calls: Sequence[Call]) -> tuple[object, ...]:
        call = calls[0]
        # The first dimension may be that of an expert's tokens.
        shapes = tuple(tuple(trace.tensor(x).shape[1:]) for x in (*call.inputs, *call.outputs))
        others = tree_map_only(Value, lambda value: None, (call.args, call.kwargs))
        of_parameters = tuple(trace.parameter(x) is not None for x in call.inputs)
        path, invocation = call.site[:2]
        return unnumbered(path), invocation, call.name, shapes, of_parameters, unnumbered(repr(others))

    yield from _several(grouped(alike(trace), kind).values())


def _of_one_number(trace: Trace) -> Iterator[list[Call]]:
    """Yield calls that add or multiply by the same number in a layer or across layers, such as DiT's 1 + scale."""

    def number(calls: Sequence[Call]) -> tuple[str, float] | None:
        made = with_number(calls[0])
        is_one = made is not None and made[0] in ("add", "mul") and all(with_number(call) for call in calls)
        return (made[0], made[2]) if made is not None and is_one else None

    groups = grouped(alike(trace), number)
    for same in (groups[key] for key in groups if key is not None):
        by_layer = grouped(same, _layer)
        yield from _several([*by_layer.values(), *([same] if len(by_layer) > 1 else [])])


def _there_and_back(trace: Trace) -> Iterator[list[Call]]:
    """Yield calls that move elements and move them back, as for Swin's shifted windows."""
    moving = [calls for calls in alike(trace) if calls[0].name in ("roll", "flip")]
    yield from _several(grouped(moving, _layer).values())


def _in_turns(trace: Trace) -> Iterator[list[Call]]:
    """Yield calls that take every second or third element of a tensor, such as gates and ups of gpt-oss's experts."""

    def step(calls: Sequence[Call]) -> int:
        index = calls[0].args[1]
        last = index[-1] if isinstance(index, tuple) and index else index
        return last.step if isinstance(last, slice) and isinstance(last.step, int) else 1

    taken = [calls for calls in alike(trace) if calls[0].name == "getitem" and step(calls) > 1]
    yield from _several(grouped(taken, lambda calls: (_layer(calls), step(calls))).values())


def _several(groups: Iterable[Sequence[Sequence[Call]]]) -> Iterator[list[Call]]:
    """Yield the calls of each group that holds more than one list of alike calls."""
    yield from (list(chain.from_iterable(same)) for same in groups if len(same) > 1)


def _layer(calls: Sequence[Call]) -> str:
    return unnumbered(calls[0].site[0])


def alike(trace: Trace) -> list[list[Call]]:
    """Return calls that compute activations; those that differ only in their layer's number are in one group."""
    computing = [call for call in trace.calls if any(trace.tensor(x).is_floating_point() for x in call.outputs)]
    return list(grouped(computing, lambda call: (unnumbered(call.site[0]), *call.site[1:])).values())


def _otherwise(calls: Sequence[Call], instead: Sequence[Mistake[Call]]) -> Hypothesis:
    which, wrong, others = calls[0].described, instead[0].name, more_like_it(len(calls), of="of ")
    tuned = [one.tuned for one in instead]

    def with_another(value: float) -> Hypothesis:
        return _otherwise(calls, [family(value) for family in tuned if family is not None])

    return Hypothesis(
        "operation",
        f"{which}: {wrong}",
        f"compute the {which}{others} as the reference does; {wrong}",
        tuple(made for call, one in zip(calls, instead, strict=True) for made in one.edits(call)),
        value=instead[0].value,
        tuned=with_another if all(tuned) else None,
        scope="call",
    )


# Factors and activations that only a port applies to the inputs or results of linear layers.


_EXTRA = ("silu", "gelu (tanh)", "relu")


def scaled_linear_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield linear layers whose results are multiplied by a number, alike ones of all layers or experts together.

    The last layers come first, because a factor on their input often has the same effect.
    """
    for which, calls in reversed(_linear_layers(trace)):
        for value in (2.0, 0.5):
            yield Hypothesis(
                "factor",
                f"{which} times {value:.4g}",
                f"leave what {which} returns as it is, as the reference does; the port multiplies it by {value:.4g}",
                tuple(edit(call, (), partial(torch.mul, other=value)) for call in calls),
                value=value,
                scope="call",
            )


def extra_activation_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield linear layers whose input or result a port activates, alike ones together."""
    for which, calls in _linear_layers(trace):
        for name, what in product(_EXTRA, ("reads", "returns")):
            yield Hypothesis(
                "activation",
                f"{name} of what {which} {what}",
                f"leave what {which} {what} as it is, as the reference does; the port applies {name} to it",
                tuple(_activated(call, ACTIVATIONS[name], what) for call in calls),
                scope="call",
            )


def _linear_layers(trace: Trace) -> list[tuple[str, list[Call]]]:
    """Return linear layers with a parameter, alike ones together, each group with its name in messages."""
    groups = (calls for calls in alike(trace) if calls[0].name in LINEAR)
    some = [calls for calls in groups if any(trace.parameter(value) is not None for value in calls[0].inputs)]
    return [(f"the {calls[0].described}{more_like_it(len(calls), of='of ')}", calls) for calls in some]


def _activated(call: Call, function: Callable[[Tensor], Tensor], what: str) -> Edit:
    if what == "returns":
        return edit(call, (), function)
    of_activated = lambda args, kwargs: call.function(function(args[0]), *args[1:], **kwargs)  # noqa: E731
    return edit(call, call.inputs, again(call, of_activated))


# Special tokens that a port puts and reads at the other end, such as a class token last or registers first.
#
# Tables and rotations by position stay as they are, so they meet other tokens.


_MOST = 16  # at most this many special tokens are looked for


@dataclass(frozen=True)
class _Join:
    """``call`` joins ``first`` tokens and ``second`` others along dimension ``dim``."""

    call: Call
    dim: int
    first: int
    second: int


def joined_token_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield the mistake of joining two parts in the other order; later calls read each part at its new place."""
    for call in trace.calls:
        join = _join(trace, call)
        readers = [] if join is None else list(_readers(trace, join))
        for rank in sorted({rank for rank, _ in readers}):
            edits = [one for other, one in readers if other <= rank]
            what = f"the {call.described}"
            yield Hypothesis(
                "operation",
                f"parts of {what} exchanged, and where they are read in {rank} dimensions",
                f"join the parts of {what} in the reference's order; they are in the other order, and are read "
                "there, while tables and rotations by position are as before",
                (edit(call, call.inputs, _exchanged(call)), *edits),
                scope="call",
            )


def _join(trace: Trace, call: Call) -> _Join | None:
    if call.name not in JOINS or len(call.inputs) != 2:
        return None
    whole, first, second = (trace.tensor(value).shape for value in (*call.outputs, *call.inputs))
    if not len(whole) == len(first) == len(second):  # torch.cat also takes an empty tensor of one dimension
        return None
    dims = [dim for dim in range(len(whole) - 1) if first[dim] + second[dim] == whole[dim]]
    if len(dims) != 1 or not 0 < min(first[dims[0]], second[dims[0]]) <= _MOST:
        return None
    sizes = first[dims[0]], second[dims[0]]
    return _Join(call, dims[0], *sizes) if sizes[0] != sizes[1] else None


def _exchanged(call: Call) -> Callable[..., Tensor]:
    dim = argument(call, 1, "dim", 0)
    return lambda was, first, second: torch.cat((second, first), dim)


def _readers(trace: Trace, join: _Join) -> Iterator[tuple[int, Edit]]:
    """Yield the edits of later calls that read one part alone, each with the number of dimensions of its tensor."""
    total = join.first + join.second
    for call in trace.calls:
        is_later = call.outputs and call.outputs[0].number > join.call.outputs[0].number
        if call.name != "getitem" or not is_later or len(call.inputs) != 1:
            continue
        shape = trace.tensor(call.inputs[0]).shape
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        plain = all(isinstance(part, (int, slice)) for part in index)
        for dim, part in enumerate(index if plain else ()):
            moved = _moved(part, join) if shape[dim] == total else None
            if moved is not None:
                changed = (*index[:dim], moved, *index[dim + 1 :])
                yield len(shape), edit(call, call.inputs, lambda was, x, changed=changed: x[changed])
                break


def _moved(part: Any, join: _Join) -> int | slice | None:
    """Return the index of the same tokens after the exchange; None if it does not select one part alone."""
    total = join.first + join.second
    if isinstance(part, int):
        place = part % total
        return place + join.second if place < join.first else place - join.first
    start, stop, step = part.indices(total)
    if step != 1 or (start, stop) not in ((0, join.first), (join.first, total)):
        return None
    return slice(join.second, total) if start == 0 else slice(0, join.second)


# Factors on the wrong term of a sum: a gate or a LayerScale on the stream, not on the branch.


_BETWEEN = CASTS | {"dropout"}  # these calls may lie between a product and the sum


@dataclass(frozen=True)
class _Term:
    """``x`` times ``factor``, which is a value or a number."""

    x: Value
    factor: Any = 1.0


@dataclass(frozen=True)
class _Sum:
    """``call`` adds two terms, at least one of which has a factor."""

    call: Call
    terms: tuple[_Term, _Term]

    def exchanged(self) -> Edit:
        """Return the edit that gives each term the other's factor."""
        first, second = self.terms
        factors = (second.factor, first.factor)
        values = [factor for factor in factors if isinstance(factor, Value)]

        def compute(x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
            tensors = iter(given)
            of_x, of_y = (next(tensors) if isinstance(factor, Value) else factor for factor in factors)
            return x * of_x + y * of_y

        return instead(self.call, (first.x, second.x, *values), compute)


def exchanged_factor_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield the exchange of factors in each sum, in all layers at once, and in all sums that are scaled alike."""
    by_call = [[_sums(trace, call) for call in calls] for calls in alike(trace)]
    groups = [list(sums) for ways in by_call for sums in zip(*ways, strict=False)]
    by_scaled = grouped(groups, lambda sums: tuple(term.factor != 1.0 for term in sums[0].terms))
    several = [list(chain.from_iterable(some)) for some in by_scaled.values() if len(some) > 1]
    yield from (_exchanged_factors(sums) for sums in (*groups, *several))


def _exchanged_factors(sums: Sequence[_Sum]) -> Hypothesis:
    which = f"the {sums[0].call.described}{more_like_it(len(sums), of='of ')}"
    return Hypothesis(
        "operation",
        f"factors of {which} exchanged",
        f"multiply the terms that {which} adds as the reference does; in the port, each has the other's factor",
        tuple(one.exchanged() for one in sums),
        scope="call",
    )


def _sums(trace: Trace, call: Call) -> list[_Sum]:
    """Return the sum that a call computes, once for every way to tell factors from the values they multiply."""
    both = added(call)
    if both is None or "alpha" in call.kwargs:
        return []
    shape = trace.tensor(call.outputs[0]).shape
    ways = product(*(_terms(trace, one, shape) for one in both))
    return [_Sum(call, (one, other)) for one, other in ways if one.factor != other.factor]


def _terms(trace: Trace, value: Value, shape: Sequence[int]) -> list[_Term]:
    """Return a term with its factor; if both operands of a product have the sum's shape, in both ways."""
    match binary(trace.producer(back(trace, value, _BETWEEN))):
        case ("mul", left, right):
            ways = [_Term(x, factor) for x, factor in ((left, right), (right, left)) if isinstance(x, Value)]
        case _:
            ways = [_Term(value)]
    return [one for one in ways if trace.tensor(one.x).shape == shape and trace.tensor(one.x).dim() > 1]


# Factors of a reference, in whose place a port has another number or none.
#
# For example LoRA's ``alpha / rank``, a residual branch scaled by depth, embeddings times ``sqrt(hidden)``, or scaled
# logits.


_POINTWISE = CASTS | {"add", "sub", "mul", "div", "truediv", "tanh", "masked_fill", "where", "cat", "view", "reshape"}
_FUNCTIONS = frozenset({"sigmoid", "tanh", "erf", "exp"})  # an activation's own constants are not factors


@dataclass(frozen=True, eq=False)
class Factor:
    """``call`` multiplies activations by ``value``, or divides them by its inverse."""

    call: Call
    value: float


def factors(trace: Trace) -> list[Factor]:
    """Return every multiplication of activations by a positive number other than 1, except in scores and functions."""
    of_attention = scales_of_attention(trace)
    found = [factor for call in trace.calls if (factor := _factor(trace, call)) is not None]
    return [factor for factor in found if factor.call.site not in of_attention]


def scales_of_attention(trace: Trace) -> set[Site]:
    """Return the calls that scale and mask scores, and those that make queries and keys."""
    softmaxes = (call for call in trace.calls if call.name == "softmax")
    return {call.site for softmax in softmaxes for call in _scales(trace, softmax)}


def factor_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every known mistake that could have been made with the reference's factors."""
    for value, alike in grouped(factors(trace), lambda one: one.value).items():
        mistakes = numbers(partial(_instead, value), [value], (1.0,))
        modules = list(dict.fromkeys(factor.call.module for factor in alike if factor.call.site[0]))
        where = f" in {', '.join(modules)}" if 0 < len(modules) <= MOST_PLACES else ""
        yield from at_each_scope(mistakes, alike, lambda one: one.call.module, where=where)


def _scales(trace: Trace, softmax: Call) -> Iterator[Call]:
    """Yield the calls between a product of queries and keys and its softmax, and those that make queries and keys."""
    queue = list(softmax.inputs[:1])
    while queue:
        call = trace.producer(queue.pop())
        if call is None:
            continue
        yield call
        if call.name in _POINTWISE:
            queue += call.inputs
        elif call.name in LINEAR or call.name in ("bmm", "baddbmm"):
            yield from filter(None, (trace.producer(back(trace, x, RESHAPES)) for x in call.inputs))


def _factor(trace: Trace, call: Call) -> Factor | None:
    match with_number(call) or _with_buffer(trace, call):
        case ("mul", x, value) if value > 0.0:
            pass
        case ("div", x, divisor) if divisor > 0.0:
            value = 1.0 / divisor
        case _:
            return None
    tensor = trace.tensor(x)
    is_activation = tensor.dim() > 1 and tensor.is_floating_point() and trace.parameter(x) is None
    if not is_activation or value == 1.0 or len(call.outputs) != 1:
        return None
    is_of_function = any(user.name in _FUNCTIONS for user, _ in users(trace, call.outputs[0]))
    return None if is_of_function else Factor(call, value)


def _with_buffer(trace: Trace, call: Call) -> tuple[str, Value, float] | None:
    """Return the function, the tensor and the number of a call whose number a buffer holds, such as Gemma's scale."""
    match binary(call):
        case (name, Value() as left, Value() as right):
            for x, number in ((left, right), (right, left)) if name == "mul" else ((left, right),):
                holder = trace.tensor(number)
                made = trace.producer(back(trace, number))
                is_number = holder.dim() == 0 and (made is None or not made.inputs)  # such as torch.tensor(0.5)
                if is_number and trace.parameter(back(trace, number)) is None:
                    return name, x, holder.item()
    return None


def _instead(right: float, value: float) -> Mistake[Factor]:
    def edits(factor: Factor) -> tuple[Edit, ...]:
        if math.isclose(value, right, rel_tol=1e-4):
            return ()
        return (edit(factor.call, (), lambda was: was * (value / right)),)

    return Mistake(
        "factor",
        f"factor {value:.4g} for {right:.4g}",
        f"multiply by {right:.4g}, as the reference does; in all, the port multiplies by {value:.4g}",
        edits,
    )
