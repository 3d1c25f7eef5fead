"""Terms of sums that a port leaves out, told by the parameters that get no gradient: shared experts, a whole layer."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.norms.norms import Norm, norms
from parity.diagnosis.walk import ancestors, binary
from parity.watching.trace import Call, Edit, Trace, Value, edit
from parity.weights.notation import WeightMap
from parity.weights.sides import names

_MOST_NAMED = 3  # of the parameters that a message lists
_FEW = 4  # calls, of which a norm's gain is made: a cast, a sum


def unused_parameters(weights: WeightMap, unused: Container[str]) -> frozenset[str]:
    """The reference's names of parameters that only these of TE hold."""
    held = (left for left, right in weights.items() if all(name in unused for name in names(right)))
    return frozenset(name for left in held for name in names(left))


def unused_branch_hypotheses(trace: Trace, module: nn.Module, unused: frozenset[str]) -> Iterator[Hypothesis]:
    """That every term is left out that is added and made of unused parameters, as far as they tell it from the other.

    Args:
        trace: of the reference.
        module: the reference.
        unused: its parameters, by name, which get no gradient in the port.
    """
    made_of = _parameters(trace) if unused else {}
    edits: list[Edit] = []
    branches: dict[str, None] = {}
    for call in trace.calls if unused else ():
        for kept, left_out in _operands(trace, call):
            own = made_of.get(left_out.number, frozenset()) - made_of.get(kept.number, frozenset())
            if own and own <= unused:
                edits.append(edit(call, (kept,), _instead))
                branches |= dict.fromkeys(sorted(own))
    if len(branches) > 1:  # of a single one its own finding says enough
        named, more = _listed(list(branches))
        yield Hypothesis(
            "branch-missing",
            f"branch of {named} left out",
            f"add what {named}{more} compute, as the reference does; it is left out, and no gradient reaches them",
            module,
            tuple(edits),
        )


def unused_norm_hypotheses(trace: Trace, module: nn.Module, unused: frozenset[str]) -> Iterator[Hypothesis]:
    """That the norms are left out whose weights get no gradient in the port; arguments as above."""
    bare = [norm for norm in norms(trace) if unused and _weights(trace, norm) & unused]
    if bare:
        named, more = _listed([norm.call.module for norm in bare])
        yield Hypothesis(
            "norm-missing",
            f"norms of {named} left out",
            f"call the norms that the reference has as {named}{more}; what they are given is passed on",
            module,
            tuple(edit(norm.call, (norm.x,), lambda was, x: x.to(was.dtype)) for norm in bare),
        )


def _listed(places: Sequence[str]) -> tuple[str, str]:
    """The first of them, and how many there are besides; empty for none."""
    others = len(places) - _MOST_NAMED
    return ", ".join(places[:_MOST_NAMED]), f" and {others} more" if others > 0 else ""


def _weights(trace: Trace, norm: Norm) -> frozenset[str]:
    """The parameters of which a norm's gain is made: itself, or one that is stored less 1."""
    made_of = () if norm.gain is None else (norm.gain, *ancestors(trace, norm.gain, _FEW))
    return frozenset(name for value in made_of if (name := trace.parameter(value)) is not None)


def _instead(was: Tensor, kept: Tensor) -> Tensor:
    return kept.expand_as(was).clone()


def _operands(trace: Trace, call: Call) -> Iterator[tuple[Value, Value]]:
    """Of a sum of two activations what would be kept and what left out, either way."""
    match binary(call):
        case ("add", Value() as left, Value() as right):
            if trace.parameter(left) is None and trace.parameter(right) is None:
                yield from ((left, right), (right, left))


def _parameters(trace: Trace) -> dict[int, frozenset[str]]:
    """By each value's number, of which parameters it is made."""
    found: dict[int, frozenset[str]] = {number: frozenset([name]) for number, name in trace.parameters.items()}
    for call in trace.calls:
        of_call = frozenset().union(*(found.get(value.number, frozenset()) for value in call.inputs))
        for value in call.outputs:
            found[value.number] = found.get(value.number, frozenset()) | of_call
    return found
