"""Single calls of a reference that a port computes otherwise, tried where no mistake with a known meaning explains.

Calls that a model makes in each of its layers are changed in all of them at once; and so are those of a loop, which a
module makes alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from torch import nn
from torch.utils._pytree import tree_map_only

from parity.diagnosis.functions.alternatives import LEFT_OUT, OTHER_WAY, alternatives
from parity.diagnosis.functions.other_numbers import Alternative
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.walk import with_number
from parity.watching.trace import Call, Trace, Value, edit

_NUMBER = re.compile(r"\d+")
_LONG = 12  # rounds of a loop, of which a single one is hardly wrong alone


def operation_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Every call of the reference, with each of its alternatives; of long loops, all rounds at once alone."""
    rounds = {call.site for calls in _in_loops(trace) if len(calls) > _LONG for call in calls}
    for calls in alike(trace):
        if calls[0].site not in rounds:
            yield from _all_otherwise(trace, calls, module)
    for calls in _of_one_number(trace):
        yield from _all_otherwise(trace, calls, module, (LEFT_OUT,))
    for calls in _there_and_back(trace):
        yield from _all_otherwise(trace, calls, module, (LEFT_OUT, OTHER_WAY))
    for calls in _in_loops(trace):
        yield from _all_otherwise(trace, calls, module)


def loop_operation_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Single calls of long loops, as of a scan over time, with each of their alternatives."""
    rounds = {call.site for calls in _in_loops(trace) if len(calls) > _LONG for call in calls}
    for calls in alike(trace):
        if calls[0].site in rounds:
            yield from _all_otherwise(trace, calls, module)


def _all_otherwise(
    trace: Trace, calls: Sequence[Call], module: nn.Module, known: Collection[str] = ()
) -> Iterator[Hypothesis]:
    """Calls that are all made in one other way, of those known or of any."""
    by_call = [{one.described: one for one in alternatives(trace, call)} for call in calls]
    for described in by_call[0]:
        if all(described in ones for ones in by_call) and (not known or described in known):
            yield _otherwise(calls, [ones[described] for ones in by_call], module)


def _in_loops(trace: Trace) -> Iterator[list[Call]]:
    """Several calls of a module's that differ in tensors and numbers alone, as those of a loop over layers or time."""
    groups: dict[tuple[object, ...], list[list[Call]]] = {}
    for calls in alike(trace):
        call = calls[0]
        shapes = tuple(tuple(trace.tensor(x).shape) for x in (*call.inputs, *call.outputs))
        others = tree_map_only(Value, lambda value: None, (call.args, call.kwargs))
        of_parameters = tuple(trace.parameter(x) is not None for x in call.inputs)
        path, invocation = call.site[:2]
        key = _NUMBER.sub("#", path), invocation, call.name, shapes, of_parameters, _NUMBER.sub("#", repr(others))
        groups.setdefault(key, []).append(calls)
    for same in groups.values():
        if len(same) > 1:
            yield [call for calls in same for call in calls]


def _of_one_number(trace: Trace) -> Iterator[list[Call]]:
    """Calls that add one number, or multiply by it, several times in a layer, or in different ones: DiT's 1 + scale."""
    groups: dict[tuple[str, float], list[list[Call]]] = {}
    for calls in alike(trace):
        made = with_number(calls[0])
        if made is not None and made[0] in ("add", "mul") and all(with_number(call) for call in calls):
            groups.setdefault((made[0], made[2]), []).append(calls)
    for same in groups.values():
        by_layer: dict[str, list[list[Call]]] = {}
        for calls in same:
            by_layer.setdefault(_NUMBER.sub("#", calls[0].site[0]), []).append(calls)
        several = [some for some in by_layer.values() if len(some) > 1]
        for some in [*several, same] if len(by_layer) > 1 else several:
            yield [call for calls in some for call in calls]


def _there_and_back(trace: Trace) -> Iterator[list[Call]]:
    """Calls that move elements, and move them back, as for Swin's shifted windows."""
    by_module: dict[str, list[list[Call]]] = {}
    for calls in alike(trace):
        if calls[0].name in ("roll", "flip"):
            by_module.setdefault(_NUMBER.sub("#", calls[0].site[0]), []).append(calls)
    for same in by_module.values():
        if len(same) > 1:
            yield [call for calls in same for call in calls]


def alike(trace: Trace) -> list[list[Call]]:
    """Calls of activations by what they are but for their layer's number."""
    alike: dict[tuple[str, int, str, int], list[Call]] = {}
    for call in trace.calls:
        path, invocation, function, count = call.site
        if any(trace.tensor(x).is_floating_point() for x in call.outputs):
            alike.setdefault((_NUMBER.sub("#", path), invocation, function, count), []).append(call)
    return list(alike.values())


def _otherwise(calls: Sequence[Call], instead: Sequence[Alternative], module: nn.Module) -> Hypothesis:
    first = calls[0]
    which = f"{ordinal(first.site[3] + 1)} {first.name!r} of {first.module}"
    others = f" and of {len(calls) - 1} more like it" if len(calls) > 1 else ""
    tuned = [one.tuned for one in instead]

    def with_another(value: float) -> Hypothesis:
        return _otherwise(calls, [family(value) for family in tuned if family is not None], module)

    return Hypothesis(
        "operation",
        f"{which}: {instead[0].described}",
        f"compute the {which}{others} as the reference does; {instead[0].described}",
        module,
        tuple(edit(call, call.inputs, one.compute) for call, one in zip(calls, instead, strict=True)),
        value=instead[0].value,
        tuned=with_another if all(tuned) else None,
        scope="call",
    )


def ordinal(count: int) -> str:
    """``1st``, ``2nd``, and so on."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{count}{'th' if 10 < count % 100 < 14 else endings.get(count % 10, 'th')}"
