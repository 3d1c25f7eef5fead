"""Mistakes in the order of layers and steps: exchanged, in sequence instead of in parallel, or never used."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.case.weight_map import Experts, Side, WeightMap, holds, names, shape_of
from parity.mistakes.activations import ACTIVATIONS, activations, biases
from parity.mistakes.alternatives import of_operands
from parity.mistakes.hypothesis import Hypothesis, Mistake, ReadWeights, at_each_scope, more_like_it
from parity.mistakes.norms import Norm, norms
from parity.mistakes.reads import reading_instead
from parity.mistakes.weight_maps import Mapped, Shapes, filled_from, unchanged
from parity.shown import few_of
from parity.trace.trace import (
    CASTS,
    LINEAR,
    RESHAPES,
    Call,
    Edit,
    Trace,
    Value,
    added,
    ancestors,
    back,
    back_along,
    binary,
    edit,
    grouped,
    instead,
    passing_on,
    unnumbered,
    users,
    with_number,
)

# Layers or experts whose weights TE holds in another order than the reference, and layers that are called twice.
#
# A weight map names them by number: ``layers.3.norm.weight``, or ``fc1.weight3`` of a ``GroupedLinear``.


_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")  # the first match is the layer's number, others are those of its parts
_EXPERT = re.compile(r"(?<=weight)\d+$|(?<=bias)\d+$")
_NUMBER = re.compile(r"\d+")
_MOST_NAMED = 12  # a message lists at most this many numbers of an order


@dataclass(frozen=True)
class _Stack:
    """Numbered parts of TE's module, all alike, and the reference's parts that the map fills them from.

    Attributes:
        title: the title of a finding about their order.
        what: the name of TE's parts, before their number; for experts the grouped layer that has them, empty for all.
        numbers: TE's numbers, in order.
        lefts: for each number, the reference's side of every parameter of the part.
        rights: for each number, TE's names of every parameter of the part.
        order: for each of the reference's parts, in the reference's order, the index in ``numbers`` of the part it
            fills.
    """

    title: str
    what: str
    numbers: tuple[int, ...]
    lefts: tuple[tuple[Side, ...], ...]
    rights: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]


def has_experts(weights: WeightMap) -> bool:
    """Return whether the map fills experts, stacked in one tensor or as the parts of TE's grouped layers."""
    return any(
        holds(side, Experts) or any(map(_EXPERT.search, names(side))) for sides in weights.items() for side in sides
    )


def layer_order_hypotheses(of: Mapped) -> Iterator[Hypothesis]:
    """Yield every likely order of a stack other than the reference's, and parts that compute in place of others."""
    for stack in _stacks(of.weights, of.shapes):
        for order in _orders(stack):
            yield _permuted(stack, order, of.shapes)
        yield from _repeated(stack, of.shapes, of.unused)


def _stacks(weights: WeightMap, shapes: Shapes) -> Iterator[_Stack]:
    for pattern, title in ((_LAYER, "layers-permuted"), (_EXPERT, "experts-permuted")):
        parts: dict[str, dict[int, dict[str, tuple[Side, str]]]] = defaultdict(lambda: defaultdict(dict))
        for left, right in weights.items():
            found = pattern.search(next(iter(names(right)), ""))
            if found is not None and any(names(left)):
                name = found.string
                alike = f"{name[: found.start()]}#{name[found.end() :]}"
                # A mixture's experts make one stack over all layers, and one for each grouped layer.
                of_experts = ("", _LAYER.sub("#", name).rpartition(".")[0])
                for what in (name[: found.start()],) if pattern is _LAYER else of_experts:
                    parts[what][int(found.group())][alike] = (left, name)
        alone = len(parts) == 2 and pattern is _EXPERT  # both stacks are of the same experts
        for what, by_number in list(parts.items())[: 1 if alone else None]:
            stack = _stack(title, what, by_number, shapes)
            if stack is not None:
                yield stack


def _stack(
    title: str, what: str, by_number: Mapping[int, Mapping[str, tuple[Side, str]]], shapes: Shapes
) -> _Stack | None:
    """Return the stack of these numbered parts; None if there is only one part or they are not alike."""
    numbers = tuple(sorted(by_number))
    alike = list(by_number[numbers[0]])
    if len(numbers) < 2 or any(set(by_number[number]) != set(alike) for number in numbers):
        return None
    lefts = tuple(tuple(by_number[number][name][0] for name in alike) for number in numbers)
    if any(len({shape_of(left, shapes) for left in same}) > 1 for same in zip(*lefts, strict=True)):
        return None
    rights = tuple(tuple(by_number[number][name][1] for name in alike) for number in numbers)
    return _Stack(title, what, numbers, lefts, rights, _order_of([sides[0] for sides in lefts]))


def _order_of(lefts: Sequence[Side]) -> tuple[int, ...]:
    """Return the reference's order by the number in its names that differs; if none does, the given order."""
    numbers = [tuple(map(int, _NUMBER.findall(next(iter(names(left)))))) for left in lefts]
    if len({len(one) for one in numbers}) == 1:
        for column in zip(*numbers, strict=True):
            if len(set(column)) == len(lefts):
                return tuple(sorted(range(len(lefts)), key=column.__getitem__))
    return tuple(range(len(lefts)))


def _orders(stack: _Stack) -> Iterator[tuple[int, ...]]:
    """Yield likely wrong orders of the reference's parts in TE: by the map's numbers, or as lists are often sorted."""
    count = len(stack.numbers)
    place = {source: number for number, source in enumerate(stack.order)}
    own = tuple(range(count))
    by_number = tuple(place[number] for number in own)  # differs from ``own`` if the map itself changes the order
    as_text = tuple(sorted(own, key=str))
    inverse = tuple(sorted(own, key=as_text.__getitem__))
    told = {own}
    for order in (by_number, own[::-1], own[1:] + own[:1], own[-1:] + own[:-1], as_text, inverse):
        if order not in told:
            told.add(order)
            yield order


def _permuted(stack: _Stack, order: Sequence[int], shapes: Shapes) -> Hypothesis:
    """Return the mistake that the part at each place has the weights of the reference's part at ``order[place]``."""
    numbers = [stack.numbers[source] for source in order]
    held = ", ".join(map(str, numbers[:_MOST_NAMED])) + (", ..." if len(numbers) > _MOST_NAMED else "")
    of_one = f" of {stack.what}" if stack.what else ""
    parts = f"TE's {stack.what}0, 1, ..." if stack.title == "layers-permuted" else f"TE's experts{of_one}"
    theirs = "layers" if stack.title == "layers-permuted" else "experts"
    return Hypothesis(
        stack.title,
        f"{theirs} in the order {held}" + (of_one if theirs == "experts" else ""),
        f"fill {parts} in the reference's order; they hold its {theirs} in the order {held}",
        read=_reading(stack, order, shapes),
    )


def _repeated(stack: _Stack, shapes: Shapes, unused: Container[str]) -> Iterator[Hypothesis]:
    """Yield the mistake of calling another part in place of those that get no gradient."""
    idle = [place for place, rights in enumerate(stack.rights) if all(name in unused for name in rights)]
    if stack.title != "layers-permuted" or not idle:
        return
    parts = range(len(stack.numbers))
    missing = ", ".join(f"{stack.what}{stack.numbers[place]}" for place in idle)
    for again in (place for place in parts if place not in idle):
        name = f"{stack.what}{stack.numbers[again]}"
        yield Hypothesis(
            "layer-repeated",
            f"{name} for {missing}",
            f"call TE's {missing}; the port calls {name} again instead",
            read=_reading(stack, [again if place in idle else place for place in parts], shapes),
        )


def _reading(stack: _Stack, order: Sequence[int], shapes: Shapes) -> ReadWeights:
    """Return a reading that fills each of the reference's parts from the one at ``order``, in the reference's order."""
    lefts = [stack.lefts[place] for place in stack.order]
    moved = ((lefts[place], lefts[source]) for place, source in enumerate(order) if source != place)
    pairs = (pair for sides in moved for pair in zip(*sides, strict=True))
    return filled_from([(filled, source, unchanged) for filled, source in pairs], shapes)


# Attention and MLP in parallel on one input, which ports put one after the other.
#
# A reference may sum the two branches in any order. Both may read one norm, as in GPT-J, Phi and Cohere, or each its
# own, as in GPT-NeoX.


_THROUGH = CASTS | {"dropout"}
_ENDS = RESHAPES | {"dropout", "mul"}  # these calls may follow a branch's last linear layer and its bias
_MOST_ANCESTORS = 400  # how far back a branch is followed


@dataclass(frozen=True)
class ParallelBlock:
    """``stream + factor * (first(norm(stream)) + second(norm(stream)))``, in any order.

    Attributes:
        stream: the value that bypasses both branches.
        first: the result of the branch that is computed first.
        factor: the factor of this result in the sum.
        norm: the norm of the stream that the second branch reads.
        readers: the linear layers of the second branch that read the norm, if the first branch reads it too or the norm
            is computed before the first branch's result; else none.
        shared: whether the first branch reads the norm too.
    """

    stream: Value
    first: Value
    factor: float
    norm: Norm
    readers: tuple[Call, ...]
    shared: bool

    @property
    def module(self) -> str:
        """The path of the innermost module that contains the norm and the first branch's result."""
        paths = [value.site[0].split(".") for value in (self.norm.call.outputs[0], self.first)]
        return ".".join(one for one, other in takewhile(lambda pair: pair[0] == pair[1], zip(*paths, strict=False)))

    def without_norm(self) -> tuple[Edit, ...]:
        """Return the edits that make the second branch read the stream itself instead of its norm."""
        return self._reading((self.stream,), lambda stream: stream) if self.shared else ()

    def in_sequence(self) -> tuple[Edit, ...]:
        """Return the edits that make the second branch read the sum of the stream and the first branch."""
        given = (self.stream, self.first, *self.norm.needs[1:])

        def normed(stream: Tensor, first: Tensor, *affine: Tensor) -> Tensor:
            return self.norm.compute(stream + self.factor * first, *affine)

        return self._reading(given, normed) if self.readers else (instead(self.norm.call, given, normed),)

    def _reading(self, given: tuple[Value, ...], normed: Callable[..., Tensor]) -> tuple[Edit, ...]:
        """Return the edits that give the readers ``normed(*given)`` in place of the norm's result."""
        return tuple(reading_instead(call, self.norm.call.outputs[0], normed, given) for call in self.readers)


def parallel_block_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield the mistakes that parallel blocks follow each other, or that one of them reads no norm."""
    one_by_one = (
        "let the MLP read what attention reads: parallel_attention_mlp=True; in the port, it reads attention's sum"
    )
    shared = "give both blocks the norm that they share; the MLP, or what is computed last, reads the layer's input"
    name = "parallel blocks, of which one reads no norm"
    mistakes = (
        Mistake("parallel-block", "sequential blocks", one_by_one, ParallelBlock.in_sequence),
        Mistake("norm-missing", name, shared, ParallelBlock.without_norm),
    )
    yield from at_each_scope(mistakes, parallel_blocks(trace), lambda block: block.module)


def parallel_blocks(trace: Trace) -> list[ParallelBlock]:
    """Return every pair of parallel blocks, in order."""
    normed = norms(trace)
    sums = (call for call in trace.calls if added(call))
    return [block for call in sums if (block := _block(trace, call, normed)) is not None] if normed else []


def _block(trace: Trace, call: Call, normed: Sequence[Norm]) -> ParallelBlock | None:
    terms = dict(_terms(trace, call))
    if len(terms) != 3 or len({trace.tensor(term).shape for term in terms}) > 1:
        return None
    branches = sorted((term for term in terms if ends_a_branch(trace, term)), key=lambda term: term.number)
    streams = [term for term in terms if term not in branches]
    if len(streams) != 1 or terms[streams[0]] != 1.0:
        return None
    (stream,), (first, second) = streams, branches
    source = back(trace, stream, _THROUGH)
    of_first, of_second = (ancestors(trace, branch, _MOST_ANCESTORS) for branch in (first, second))
    if first in of_second:
        return None
    for norm in normed:
        result = norm.call.outputs[0]
        if back(trace, norm.x, _THROUGH) == source and result in of_second:
            shared = result in of_first
            is_early = shared or result.number < first.number
            read = (call for call in trace.calls if call.name in LINEAR and result in call.inputs)
            readers = tuple(call for call in read if call.outputs[0] in of_second) if is_early else ()
            block = ParallelBlock(stream, first, terms[first], norm, readers, shared)
            return block if readers or not is_early else None
    return None


def _terms(trace: Trace, call: Call, factor: float = 1.0) -> Iterator[tuple[Value, float]]:
    """Yield the terms of a sum, each with its numeric factor; sums that nothing else reads are split as well."""
    for operand in call.inputs[:2]:
        value, times = back(trace, operand, _THROUGH), factor
        scaled = with_number(trace.producer(value))
        while (
            scaled is not None and scaled[0] in ("mul", "div") and scaled[2] and len(users(trace, value, _THROUGH)) == 1
        ):
            times = times * scaled[2] if scaled[0] == "mul" else times / scaled[2]
            value = back(trace, scaled[1], _THROUGH)
            scaled = with_number(trace.producer(value))
        producer = trace.producer(value)
        if producer is not None and added(producer) and len(users(trace, value, _THROUGH)) == 1:
            yield from _terms(trace, producer, times)
        else:
            yield value, times


def ends_a_branch(trace: Trace, value: Value) -> bool:
    """Return whether a linear layer computes the value, apart from its bias, its scale and its shape."""
    call = trace.producer(back_along(trace, value, _ENDS))
    while call is not None and call.outputs and _adds_bias(trace, call):
        call = trace.producer(back_along(trace, call.inputs[0], _ENDS))
    return call is not None and call.name in LINEAR


def _adds_bias(trace: Trace, call: Call) -> bool:
    named = binary(call)
    return named is not None and named[0] == "add" and trace.parameter(back(trace, named[2])) is not None


# Terms of sums that a port leaves out, such as shared experts or a whole layer: their parameters get no gradient.


_MOST_PARAMETERS = 3  # a message lists at most this many parameters
_FEW = 4  # a norm's gain is computed by at most this many calls, such as a cast or a sum


def unused_parameters(weights: WeightMap, unused: Container[str]) -> frozenset[str]:
    """Return the reference's names of the parameters that only the unused parameters of TE hold."""
    held = (left for left, right in weights.items() if all(name in unused for name in names(right)))
    return frozenset(name for left in held for name in names(left))


def unused_branch_hypotheses(trace: Trace, unused: frozenset[str]) -> Iterator[Hypothesis]:
    """Yield the mistake of leaving out all terms that are computed from unused parameters.

    Args:
        trace: the reference's trace.
        unused: names of the reference's parameters that get no gradient in the port.
    """
    made_of = _parameters(trace) if unused else {}
    edits: list[Edit] = []
    branches: dict[str, None] = {}
    for call in trace.calls if unused else ():
        for kept, left_out in _operands(trace, call):
            own = made_of.get(left_out.number, frozenset()) - made_of.get(kept.number, frozenset())
            if own and own <= unused:
                edits.append(edit(call, (kept,), lambda was, kept: kept.expand_as(was).clone()))
                branches |= dict.fromkeys(sorted(own))
    if len(branches) > 1:  # a single parameter has its own finding, which says enough
        places = list(branches)
        yield Hypothesis(
            "branch-missing",
            f"branch of {', '.join(places[:_MOST_PARAMETERS])} left out",
            f"add what {few_of(places, _MOST_PARAMETERS)} compute, as the reference does; the port leaves it out, "
            "and no gradient reaches them",
            tuple(edits),
        )


def unused_norm_hypotheses(trace: Trace, unused: frozenset[str]) -> Iterator[Hypothesis]:
    """Yield the mistake of leaving out norms whose weights get no gradient in the port; arguments as above."""
    bare = [norm for norm in norms(trace) if unused and _weights(trace, norm) & unused]
    if bare:
        places = list(dict.fromkeys(norm.call.module for norm in bare))
        yield Hypothesis(
            "norm-missing",
            f"norms of {', '.join(places[:_MOST_PARAMETERS])} left out",
            f"apply the norms that the reference has as {few_of(places, _MOST_PARAMETERS)}; the port skips them",
            tuple(passing_on(norm.call, norm.x) for norm in bare),
        )


def _weights(trace: Trace, norm: Norm) -> frozenset[str]:
    """Return the parameters that a norm's gain is computed from: the gain itself, or one that is stored minus 1."""
    made_of = () if norm.gain is None else (norm.gain, *ancestors(trace, norm.gain, _FEW))
    return frozenset(name for value in made_of if (name := trace.parameter(value)) is not None)


def _operands(trace: Trace, call: Call) -> Iterator[tuple[Value, Value]]:
    """Yield two added activations in both orders, as the one to keep and the one to leave out."""
    both = added(call)
    if both is not None and not any(map(trace.parameter, both)):
        yield from (both, both[::-1])


def _parameters(trace: Trace) -> dict[int, frozenset[str]]:
    """Return, by each value's number, the parameters that it is computed from."""
    found: dict[int, frozenset[str]] = {number: frozenset([name]) for number, name in trace.parameters.items()}
    for call in trace.calls:
        of_call = frozenset().union(*(found.get(value.number, frozenset()) for value in call.inputs))
        for value in call.outputs:
            found[value.number] = found.get(value.number, frozenset()) | of_call
    return found


# Two consecutive steps of a reference, which ports take in the other order.


_SCALES = frozenset({"mul", "div"})
_SHIFTS = frozenset({"add", "sub", "bias"})
_SAME_ORDER = CASTS | {"view", "reshape", "flatten", "unflatten"}  # these keep the order of elements
_OF_A_NORM = 16  # a written-out norm makes its result from up to this many values


@dataclass(frozen=True)
class Step:
    """A function of one activation, and of other values.

    Attributes:
        call: returns the result, and computes nothing that ``before`` cannot undo.
        x: the activation; None if it is not a value of the trace, as before a bias inside a linear layer.
        kind: the function's kind, such as ``mul``, ``norm`` or ``bias``.
        described: names it in messages.
        needs: the values that ``before`` and ``compute`` take.
        before: maps the result and the needs to the activation.
        compute: maps an activation and the needs to the result.
        operand: which one of two operands ``x`` is.
    """

    call: Call
    x: Value | None
    kind: str
    described: str
    needs: tuple[Value, ...]
    before: Callable[..., Tensor]
    compute: Callable[..., Tensor]
    operand: int = 0


@dataclass(frozen=True)
class _Pair:
    """``second`` reads the result of ``first``, reshaped or not, after the steps ``between``, which commute with it."""

    first: Step
    second: Step
    between: tuple[Step, ...]
    is_moved: bool

    def exchanged(self) -> Edit:
        """Return the edit that makes the second step come first."""
        first, second, steps = self.first, self.second, (self.first, *self.between)
        x = second.x if second.x is not None else first.call.outputs[0]
        needs = [value for step in (second, *steps) for value in step.needs]

        def compute(was: Tensor, result: Tensor, x: Tensor, *needs: Tensor) -> Tensor:
            given = iter(needs)
            of_second, *of_steps = ([next(given) for _ in step.needs] for step in (second, *steps))
            before = first.before(result, *of_steps[0])
            y = second.compute(before.reshape(x.shape) if self.is_moved else before, *of_second)
            for step, of_step in zip(steps, of_steps, strict=True):
                shape = result.shape if step is first else was.shape
                y = step.compute(y.reshape(shape) if self.is_moved else y, *of_step)
            return (y.reshape(was.shape) if self.is_moved else y).to(was.dtype)

        return edit(second.call, (first.call.outputs[0], x, *needs), compute)


def step_order_hypotheses(trace: Trace) -> Iterator[Hypothesis]:
    """Yield every two consecutive steps in the other order, in all layers or for all experts of a loop at once."""

    def kind(pair: _Pair) -> tuple[object, ...]:
        both = pair.first, pair.second
        return tuple((unnumbered(one.call.site[0]), one.kind, one.operand) for one in both)

    def place(pair: _Pair) -> tuple[object, ...]:
        return *kind(pair), pair.first.call.site[1:], pair.second.call.site[1:]

    found = list(_pairs(trace))
    alike, in_loops = (list(grouped(found, key).values()) for key in (place, kind))
    for pairs in (*alike, *(pairs for pairs in in_loops if pairs not in alike)):
        yield _exchanged(pairs)


def _pairs(trace: Trace) -> Iterator[_Pair]:
    """Yield every two steps that do not commute, if only the second reads the result of the first."""
    found = list(_steps(trace))
    first_ones = (one for one in found if one.kind != "linear")  # a linear layer's bias is a step of its own
    by_result = grouped(first_ones, lambda one: one.call.outputs[0].number)
    for second in found:
        if second.x is not None:
            for first, between, is_moved in _before(trace, second, second, by_result):
                if _fits(trace, first, second, is_moved or bool(between)):
                    yield _Pair(first, second, between, is_moved)


def _before(
    trace: Trace, second: Step, last: Step, by_result: Mapping[int, Sequence[Step]]
) -> Iterator[tuple[Step, tuple[Step, ...], bool]]:
    """Yield the steps before ``last`` that do not commute with the second, each with those in between.

    Each also has a flag for whether the result is reshaped. ``last`` is the second step itself, or one before it that
    commutes with it.
    """
    if last.x is None:
        return
    is_moved = back(trace, last.x) != back(trace, last.x, _SAME_ORDER)
    for step in by_result.get(back(trace, last.x, _SAME_ORDER).number, ()):
        if not _is_read_by(trace, step, last):
            continue
        if not any({step.kind, second.kind} <= kinds for kinds in (_SCALES, _SHIFTS)):
            yield step, (), is_moved
        elif last is second:
            for first, between, was_moved in _before(trace, second, step, by_result):
                yield first, (*between, step), is_moved or was_moved


def _is_read_by(trace: Trace, step: Step, last: Step) -> bool:
    """Return whether only ``last`` reads a step's result; a written-out norm may read it in several calls."""
    sites = {call.site for call, _ in users(trace, step.call.outputs[0], _SAME_ORDER)}
    inside = {last.call.site}
    if last.kind == "norm" and len(sites) > 1:
        made = map(trace.producer, ancestors(trace, last.call.outputs[0], _OF_A_NORM))
        inside |= {call.site for call in made if call is not None}
    return sites <= inside


def _fits(trace: Trace, first: Step, second: Step, is_far: bool) -> bool:
    """Return whether the first step can be applied to the second's result without changing its shape."""
    before, result = (trace.tensor(one.call.outputs[0]).shape for one in (first, second))
    if before == result:
        return True
    if is_far:  # the calls in between keep the order of elements
        return before.numel() == result.numel() and "linear" not in (first.kind, second.kind)
    others = [trace.tensor(value).shape for value in first.needs if value != first.x]
    try:
        return first.kind in _SCALES and all(torch.broadcast_shapes(shape, result) == result for shape in others)
    except RuntimeError:  # they do not broadcast
        return False


def _exchanged(pairs: Sequence[_Pair]) -> Hypothesis:
    others = more_like_it(len(pairs), ",", "so for ")
    order = f"{pairs[0].first.described} before {pairs[0].second.described}"
    return Hypothesis(
        "operation",
        f"not {order}{others}",
        f"take {order}, as the reference does{others}; the port has them in the opposite order",
        tuple(pair.exchanged() for pair in pairs),
        scope="call",
    )


def _steps(trace: Trace) -> Iterator[Step]:
    """Yield norms, activations, biases, linear layers with a bias, and functions of two operands, in no fixed order."""
    inside: set[int] = set()
    for norm in norms(trace):
        inside.add(norm.call.outputs[0].number)
        compute = lambda x, was, *affine, norm=norm: norm.compute(x, *affine)  # noqa: E731
        yield Step(norm.call, norm.x, "norm", f"the norm of {norm.call.module}", norm.needs, _first, compute)
    for activation in activations(trace):
        inside.add(activation.call.outputs[0].number)
        described = f"the {activation.name} of {activation.call.module}"
        of = lambda x, was, name=activation.name: ACTIVATIONS[name](x)  # noqa: E731
        yield Step(activation.call, activation.x, "activation", described, (activation.x,), _first, of)
    for bias in biases(trace):
        if bias.call.name in ("linear", "addmm"):
            yield Step(
                *(bias.call, None, "bias", bias.name, (bias.bias,)),
                lambda result, bias: result - bias,
                lambda x, bias: x + bias,
            )
            if bias.call.name == "linear":
                linear = lambda x, was, *parameters: F.linear(x, *parameters)  # noqa: E731
                x, described = bias.call.inputs[0], f"the layer of {bias.name}"
                yield Step(bias.call, x, "linear", described, tuple(bias.call.inputs), _first, linear)
    for call in trace.calls:
        if len(call.outputs) == 1 and call.outputs[0].number not in inside:
            yield from _of_two(trace, call)


def _first(result: Tensor, x: Tensor, *others: Tensor) -> Tensor:
    return x


def _of_two(trace: Trace, call: Call) -> Iterator[Step]:
    """Yield a sum, product, difference or quotient as a function of each operand that has its shape."""
    match binary(call):
        case (("add" | "sub" | "mul" | "div") as kind, left, right):
            pass
        case _:
            return
    shape = trace.tensor(call.outputs[0]).shape
    described = f"the {call.described}"
    for position, x in enumerate((left, right)):
        is_activation = isinstance(x, Value) and trace.parameter(x) is None and x not in call.outputs
        if not is_activation or len(shape) < 2 or trace.tensor(x).shape != shape:
            continue
        if trace.tensor(x).is_floating_point() and (position == 0 or kind != "div"):
            yield Step(
                *(call, x, kind, described, tuple(call.inputs)),
                of_operands(call, lambda was, *two, position=position: two[position]),
                _with_another(call, kind, position),
                position,
            )


def _with_another(call: Call, kind: str, position: int) -> Callable[..., Tensor]:
    """Return the function with another tensor in place of one operand."""

    def computed(x: Tensor, *two: Tensor) -> Tensor:
        result: Tensor = getattr(torch, kind)(*(x if i == position else one for i, one in enumerate(two)))
        return result

    return of_operands(call, computed)
