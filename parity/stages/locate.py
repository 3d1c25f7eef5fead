"""Find the stages in which a port departs from its reference: watch it once, match its values, judge every stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from parity.case import transfer
from parity.case.weight_map import names
from parity.judge.request import Request
from parity.numerics.freedom import FUSED, UNFUSED, Freedom
from parity.passes.all_passes import Tensors, run_candidate
from parity.passes.nominal_clock import OutOfTime
from parity.passes.prepare import Prepared
from parity.stages.effects import find_harmless
from parity.stages.graph import Graph, find_rows_read, traced_graph
from parity.stages.judge import Judged, is_flagged, judge_forward_and_backward
from parity.stages.match import Match, Matcher
from parity.stages.watch import Watch, Watched
from parity.stages.weight_rows import WeightRows, weight_rows
from parity.te.attention_backend import attention_backends
from parity.te.devices import classify
from parity.trace.calls import Misfit


@dataclass(frozen=True)
class Stages:
    """The stages of one pass.

    Attributes:
        all: all that were judged, in the reference's order, forward ones first.
        graph: the reference's calls.
        found: the matches, by the number of the reference's value.
        unmatched: the candidate's values that fit nothing.
        rows_read: rows that outputs read, as in ``graph.read``, where leaving out the others made no stage right.
    """

    all: tuple[Judged, ...]
    graph: Graph
    found: dict[int, Match]
    unmatched: tuple[Watched, ...]
    rows_read: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def flagged(self) -> tuple[Judged, ...]:
        """Those with a larger error than rounding explains."""
        return tuple(one for one in self.all if is_flagged(one))

    def count_flagged_values(self) -> int:
        """Return how many stages of the forward pass are flagged."""
        return sum(not one.stage.backward for one in self.flagged)


def judge_stages(request: Request, prepared: Prepared, freedoms: Sequence[Freedom] = (FUSED, UNFUSED)) -> Stages:
    """Run the candidate once, watched, and judge every stage of its pass; of a pass that was made already, only once.

    Args:
        request: the comparison.
        prepared: what is compared, with the inputs to run on, and the choices that the port was seen to make.
        freedoms: the kernels that the candidate is judged by, as in the verdict.

    Raises:
        Misfit: if the reference cannot be computed stage by stage: it trains itself, or makes other calls each time.
    """
    made = request.candidate_run
    known = {} if made is None else made.stages
    key = prepared, tuple(freedoms)
    try:
        if key not in known:
            known[key] = _watch_and_judge(request, prepared, freedoms)
        return known[key]
    except Exception as error:  # the reference's code may raise anything on values that it does not expect
        if isinstance(error, OutOfTime) or classify(error):
            raise
        raise Misfit("the reference cannot be computed stage by stage") from error


def _watch_and_judge(request: Request, prepared: Prepared, freedoms: Sequence[Freedom]) -> Stages:
    seen, candidate = _watch_candidate(request, prepared)
    graph = traced_graph(prepared)
    if any(call.name == "grad" for call in graph.trace.calls):
        raise Misfit("the reference computes gradients itself, as in a step of an optimizer")
    shapes = {name: tuple(x.shape) for name, x in prepared.candidate_weights.items()}
    rows = weight_rows(prepared.weights, shapes, transfer.parameter_shapes(prepared.reference))
    outputs = {name: x for (kind, name), x in candidate.items() if kind == "output"}
    judge = partial(_match_and_judge, request, prepared, freedoms, graph, seen, candidate, rows, outputs)
    found = judge()
    if harmless := find_harmless(graph, found.found, found.all):
        again = judge(harmless)
        found = again if len(again.flagged) < len(found.flagged) else found
    if found.flagged:
        held = dict(graph.read)
        find_rows_read(prepared, graph)
        again = judge() if graph.read.keys() - held.keys() else found
        if again.count_flagged_values() < found.count_flagged_values():
            return again
        found = replace(found, rows_read=dict(graph.read))
        graph.read = held  # a maximum has a gradient in few rows, and reads them all
    return found


def _watch_candidate(request: Request, prepared: Prepared) -> tuple[Sequence[Watched], Tensors]:
    """Return the values of the candidate's pass, in order, and its tensors; it runs once, unless it was recorded."""
    made = request.candidate_run
    if made is not None and made.values is not None:
        return made.values, made.tensors
    watch = Watch({name: tuple(names(left)) for left, right in prepared.weights.items() for name in names(right)})
    with attention_backends(request.attention):
        at = request.case, request.checked, prepared, request.precision, request.seed, request.kernels
        candidate, _ = run_candidate(*at, watching=watch.watching)
    return watch.seen, candidate


def _match_and_judge(
    request: Request,
    prepared: Prepared,
    freedoms: Sequence[Freedom],
    graph: Graph,
    seen: Sequence[Watched],
    candidate: Tensors,
    rows: Mapping[str, WeightRows],
    outputs: Mapping[str, Tensor],
    harmless: Collection[int] = (),
) -> Stages:
    # An FP32 GEMM may multiply in TF32, whose roundoff is FP16's.
    stored = torch.float16 if prepared.dtype is torch.float32 else prepared.dtype
    matcher = Matcher(graph, torch.finfo(stored).eps / 2.0, rows, prepared.weights)
    with torch.no_grad():
        matcher.match(seen, outputs)
    matched = {number: match for number, match in matcher.found.items() if number not in harmless}
    rounding = request.precision.rounding
    judged = judge_forward_and_backward(prepared, graph, matched, candidate, rounding, freedoms)
    return Stages(tuple(judged), graph, matched, tuple(matcher.unmatched))
