"""Name bounds that a pair's inputs do not reach, so that no comparison shows them: caps, clamps and windows.

Each mistake in them is made at its own calls alone, on what golden's pass gave them. If that changes what they return
by less than one rounding of all elements together, no comparison can see it. Of the few that are left, the reference
computes the outputs. ``parity.coverage`` makes every known mistake in a whole pass each, and finds more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch

from parity.mistakes import activations, attention_mistakes
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.replay import outputs_with
from parity.numerics.errors import TINY, norm_of
from parity.passes.prepare import Prepared, kept_calls
from parity.trace.calls import mapped
from parity.trace.trace import Call, Site, Trace, Value, edit

_SHARE = 0.3  # of the standard deviation of rounding along one direction; limits are several of them
_COMPARES = ("gt", "ge", "lt", "le")


def unshown_mistakes(prepared: Prepared) -> tuple[Hypothesis, ...]:
    """Return bounds that a port may get wrong unseen, one mistake for each place, and keep them."""
    return prepared.cache.get("unshown", lambda: tuple(_find_unshown(prepared)))


def _find_unshown(prepared: Prepared) -> Sequence[Hypothesis]:
    trace, tried, found = kept_calls(prepared).trace, set[object](), dict[object, Hypothesis]()
    calls, least = {call.site: call for call in trace.calls}, _SHARE * torch.finfo(prepared.dtype).eps / 4
    for one in _list_bounds(trace):
        kind, place = but_for_its_number(one), (one.title, one.edits[0].site)
        if kind not in tried and place not in found and _measure_locally(one, trace, calls) <= least:
            found[place] = one
        tried.add(kind)
    passes = [prepared, *([prepared.on_probes()] if prepared.probed else [])]

    def are_unshown(*some: Hypothesis) -> bool:
        return all(_measure_outputs(each, some) <= least for each in passes)

    some = list(found.values())
    return some if some and are_unshown(*some) else [one for one in some if are_unshown(one)]


def _list_bounds(trace: Trace) -> Iterator[Hypothesis]:
    caps = chain(attention_mistakes.score_cap_hypotheses(trace), attention_mistakes.softcap_hypotheses(trace))
    bounds = chain(list_idle_conditions(trace), caps, activations.clamp_hypotheses(trace))
    return (one for one in bounds if one.scope == "all" and not one.adds)


def but_for_its_number(one: Hypothesis) -> tuple[object, ...]:
    """Return what mistakes share that differ only in a number."""
    name = one.name if one.value is None else ""
    return one.title, name, frozenset(edit.site for edit in one.edits)


def list_idle_conditions(trace: Trace) -> Iterator[Hypothesis]:
    """Yield comparisons of positions that a port may leave out, since a window is longer than the sequence."""
    for call in trace.calls:
        if call.name in _COMPARES and len(call.outputs) == 1:
            result = trace.tensor(call.outputs[0])
            of_positions = all(not trace.tensor(x).is_floating_point() for x in call.inputs)
            if of_positions and result.dtype is torch.bool and result.numel() > 1 and result.unique().numel() == 1:
                same = bool(result.flatten()[0])
                repair = f"compare positions as the reference does; here that is {same} for all, so nothing shows it"
                fixed = edit(call, (), partial(torch.full_like, fill_value=same))
                yield Hypothesis("window", f"condition left out, {call.described}", repair, (fixed,))


def _measure_locally(one: Hypothesis, trace: Trace, calls: Mapping[Site, Call]) -> float:
    """Return how far a mistake moves what its calls return, in relative roundings of all elements together."""
    squares = 0.0
    for each in one.edits:
        call = calls[each.site]
        try:
            with torch.no_grad():
                was = mapped(call.result, trace.tensor, Value)
                made = each.compute(was, *map(trace.tensor, each.needs))
            squares += _measure_change(made, was) ** 2
        except Exception:  # what a mistake computes may not fit, or be of several tensors
            return math.inf
    return math.sqrt(squares)


def _measure_outputs(prepared: Prepared, some: Sequence[Hypothesis]) -> float:
    outputs, golden = outputs_with(prepared, some, torch.float64), prepared.golden.outputs
    return max((_measure_change(x, golden[name]) for name, x in (outputs or {}).items()), default=math.inf)


def _measure_change(x: torch.Tensor, was: torch.Tensor) -> float:
    off = (x.double() - was.double()).masked_fill(x == was, 0.0)  # of two infinities as well
    size = norm_of(was.double().masked_fill(~was.isfinite(), 0.0))
    return norm_of(off) / max(size, TINY) * math.sqrt(was.numel())
