"""Two residual branches that follow each other, and ports that take them in the other order, or side by side.

Cross-attention before self-attention, the MLP before attention, a Conformer's convolution behind its second MLP. A
branch is computed again of another input, call by call.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.diagnosis.functions.operations import ordinal
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.walk import CASTS, LINEAR, back, binary
from parity.watching.trace import Call, Edit, Trace, Value, edit

_NUMBER = re.compile(r"\d+")
_IN_BETWEEN = CASTS | {"dropout"}
_LAYERS = LINEAR | {"conv1d", "conv2d"}
_MOST_CALLS = 400  # of a branch


@dataclass(frozen=True, eq=False)
class Branch:
    """``stream + result``, where the result is computed of the stream.

    Attributes:
        sum: adds the two.
        stream: as the sum is given it.
        result: ditto.
        calls: that make the result of the stream, in order.
        given: what they are given besides.
    """

    sum: Call
    stream: Value
    result: Value
    calls: tuple[Call, ...]
    given: tuple[Value, ...]

    @property
    def described(self) -> str:
        """By its last layer, for messages."""
        last = [call for call in self.calls if call.name in _LAYERS][-1]
        return f"the branch that ends with the {ordinal(last.site[3] + 1)} {last.name!r} of {last.module}"

    def of(self, stream: Tensor, given: Sequence[Tensor]) -> Tensor:
        """The result for another stream."""
        made = dict(zip((value.number for value in self.given), given, strict=True))
        made[self.stream.number] = stream
        for call in self.calls:
            args, kwargs = tree_map_only(Value, lambda value: made[value.number], (call.args, call.kwargs))
            returned = call.function(*args, **kwargs)
            values = tree_leaves(call.result)
            tensors = tree_leaves(returned)
            made.update((value.number, x) for value, x in zip(values, tensors, strict=True) if isinstance(value, Value))
        return made[self.result.number]


def branch_order_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every two branches in the other order, and side by side; those of all layers at once."""
    found = [branch for call in trace.calls if (branch := _branch(trace, call)) is not None]
    by_sum = {one.sum.outputs[0].number: one for one in found}
    alike: dict[object, list[tuple[Branch, Branch]]] = defaultdict(list)
    for second in found:
        first = by_sum.get(back(trace, second.stream, _IN_BETWEEN).number)
        if first is not None and first.sum.outputs[0] not in second.given:
            sites = (first.sum.site, second.sum.site)
            alike[tuple((_NUMBER.sub("#", site[0]), *site[1:]) for site in sites)].append((first, second))
    for pairs in alike.values():
        one, other = (branch.described for branch in pairs[0])
        others = f", and so for {len(pairs) - 1} more like it" if len(pairs) > 1 else ""
        yield Hypothesis(
            "operation",
            f"not {one} before {other}{others}",
            f"compute {one} before {other}, as the reference does{others}; they are in the other order",
            module,
            tuple(_exchanged(*pair) for pair in pairs),
            scope="call",
        )
        yield Hypothesis(
            "parallel-block",
            f"{one} beside {other}{others}",
            f"compute {other} of the sum with {one}, as the reference does{others}; both are computed of one input",
            module,
            tuple(_side_by_side(*pair) for pair in pairs),
            scope="call",
        )


def _exchanged(first: Branch, second: Branch) -> Edit:
    count = len(first.given)

    def compute(was: Tensor, stream: Tensor, *given: Tensor) -> Tensor:
        after_second = stream + second.of(stream, given[count:])
        return (after_second + first.of(after_second, given[:count])).to(was.dtype)

    return edit(second.sum, (first.stream, *first.given, *second.given), compute)


def _side_by_side(first: Branch, second: Branch) -> Edit:
    def compute(was: Tensor, stream: Tensor, result: Tensor, *given: Tensor) -> Tensor:
        return (stream + result + second.of(stream, given)).to(was.dtype)

    return edit(second.sum, (first.stream, first.result, *second.given), compute)


def _branch(trace: Trace, call: Call) -> Branch | None:
    """The branch that a call adds; None where it adds none."""
    named = binary(call)
    if named is None or named[0] != "add" or len(call.inputs) != 2 or not all(isinstance(x, Value) for x in named[1:]):
        return None
    shapes = {tuple(trace.tensor(value).shape) for value in (*call.inputs, *call.outputs)}
    if len(shapes) > 1 or not trace.tensor(call.outputs[0]).is_floating_point():
        return None
    for stream, result in (named[1:], named[:0:-1]):
        calls, given = _between(trace, stream, result)
        if any(one.name in _LAYERS for one in calls):
            return Branch(call, stream, result, calls, given)
    return None


def _between(trace: Trace, stream: Value, result: Value) -> tuple[tuple[Call, ...], tuple[Value, ...]]:
    """The calls that make one value of another, and what they are given besides; none where they do not."""
    upstream: dict[int, Call] = {}
    queue = [result]
    while queue:
        value = queue.pop()
        call = trace.producer(value)
        if value == stream or call is None or value.number < stream.number or call.outputs[0].number in upstream:
            continue
        upstream[call.outputs[0].number] = call
        queue += call.inputs
        if len(upstream) > _MOST_CALLS:
            return (), ()
    made, calls = {stream.number}, []
    for call in sorted(upstream.values(), key=lambda one: one.outputs[0].number):
        if any(value.number in made for value in call.inputs):
            if {value.number for value in call.outputs} & {value.number for value in call.inputs}:
                return (), ()  # it writes to what it is given
            calls.append(call)
            made |= {value.number for value in call.outputs}
    if result.number not in made:
        return (), ()
    given = {value.number: value for call in calls for value in call.inputs if value.number not in made}
    return tuple(calls), tuple(given.values())
