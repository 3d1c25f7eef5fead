"""Which departures change nothing that follows, such as queries and keys that are turned by the same angle more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parity.stages.graph import MOVES, Graph, Values
from parity.stages.judge import Judged, is_flagged, measure_error
from parity.stages.match import Match
from parity.trace.calls import Misfit
from parity.trace.trace import Value


def find_harmless(graph: Graph, found: Mapping[int, Match], judged: Sequence[Judged]) -> frozenset[int]:
    """Return the matches between departures and the linear layers, or outputs, that follow, if these stay right.

    The reference computes them from the candidate's values, and from its own with as much rounding as is expected
    there. A departure that does no more than that is another way to the same numbers. One that is told by a lean alone
    may hide below that noise, so nothing is said of it.

    Args:
        graph: the reference's.
        found: the matches, by the number of the reference's value.
        judged: all stages.

    Returns:
        The numbers of the values, none of which need to be what the reference's are; empty if a departure matters.
    """
    departed = {one.stage.number: one for one in judged if is_flagged(one) and not one.stage.backward}
    if not departed or not all(one.is_large for one in departed.values()):
        return frozenset()
    ends = {match.value.number: match.value for match in found.values() if match.evidence in ("weights", "output")}
    for output in graph.outputs.values():
        calls, read = graph.between(output, found.keys())
        if output.number in found:
            ends[output.number] = output
        elif all(call.name in MOVES for call in calls):
            ends |= {number: found[number].value for number in read}
    between: dict[Value, set[int]] = {}
    for end in ends.values():
        calls, _ = graph.between(end, ends.keys())
        inner = {value.number for call in calls for value in call.outputs} & found.keys() - ends.keys()
        if inner & departed.keys():
            between[end] = {
                number
                for number in inner
                if number in departed or any(graph.is_above(found[one].value, found[number].value) for one in departed)
            }
    harmless = frozenset[int]().union(*between.values())
    if departed.keys() <= harmless and not any(_is_changed(graph, found, departed, end, harmless) for end in between):
        return harmless
    return frozenset()


def _is_changed(
    graph: Graph, found: Mapping[int, Match], departed: Mapping[int, Judged], end: Value, harmless: frozenset[int]
) -> bool:
    """Return whether the departures change a value by more than roundings at the same places do."""
    given = {number: match.begin for number, match in found.items() if number != end.number and number not in harmless}
    values = Values(graph, given)
    rng = torch.Generator().manual_seed(0)
    mine = {number: found[number].end for number in departed}
    exact: dict[int, Tensor] = {}
    rounded: dict[int, Tensor] = {}
    for number, one in departed.items():
        if one.exact is None:
            return True
        rows = graph.rows_read(found[number].value, one.exact)  # of the others, nothing is known
        exact[number] = one.exact if rows is None else torch.where(rows, one.exact, mine[number])
        # Uniform errors of this half-width have the norm that is expected.
        errors = torch.rand(one.exact.shape, generator=rng, dtype=torch.float64).to(one.exact.device) * 2.0 - 1.0
        rounded[number] = exact[number] * (1.0 + errors * one.expected * 3.0**0.5)
    try:
        computed = [
            values.assuming({found[number].value: x for number, x in each.items()}).get(end).double()
            for each in (mine, exact, rounded)
        ]
    except Misfit:
        return True
    stage = next(iter(departed.values())).stage
    return is_flagged(measure_error(stage, computed[0], computed[1], computed[2:], 0.0))
