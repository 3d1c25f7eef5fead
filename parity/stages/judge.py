"""Judge each stage: compute it again in the reference from the candidate's own values, and compare its end.

One pass of the reference does this for all stages. Whenever it comes to a value that was matched, it keeps what it has
computed, which is the end of a stage, and goes on with the candidate's value, where the next ones begin. Its backward
pass begins at each end with the candidate's gradient there, and so gives at each beginning the gradient that the
candidate should have.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from scipy.special import fdtri
from torch import Tensor, nn

from parity.numerics.aten import Phase
from parity.numerics.formats import Rounding
from parity.numerics.freedom import Freedom
from parity.numerics.golden import in_fp64
from parity.passes.all_passes import Tensors, tensors_of, under_model
from parity.passes.one_pass import named_inputs, named_outputs, run
from parity.passes.prepare import Prepared, cast
from parity.result import Kind
from parity.stages.graph import MOVES, Graph, laid_out_as
from parity.stages.layouts import Layout
from parity.stages.match import Evidence, Match
from parity.stages.token_rows import are_left_out
from parity.stages.watch import Watched
from parity.trace.calls import edited, is_in_place, mapped, tensors_in
from parity.trace.trace import Call, Edit, Site, Value

RATIO = 1.5
"""A stage with a larger error than this many times the expected one is flagged, unless it has so few numbers that this
happens by chance."""

GAIN = 10.0
"""So is one whose error's share along the value is larger than this many standard deviations of rounding."""

_LEAST = 0.4  # unit roundoffs; no stage is expected to be more precise, since its end is stored
_CHANCE = 1e-6  # of the stages of right ports may be off by more than is allowed for
_LEAST_IN_FP32 = 3e-6  # the same for a value that the candidate holds in FP32: sums of thousands of terms


@dataclass(frozen=True)
class Stage:
    """What lies between values that both sides compute.

    Attributes:
        end: the call whose value the stage ends with or, for a backward stage, whose value's gradient it computes.
        calls: the reference's calls in it, in order.
        begins: the calls whose values it begins with; empty if it begins with the inputs alone.
        evidence: why the end was matched.
        watched: the name of the candidate's function that returned the end.
        backward: whether gradients are computed.
        parameter: the parameter whose gradient a backward stage ends with; empty for a value's.
        number: the number of the value that a forward stage ends with; -1 for a backward one.
        changed_later: whether the candidate computed the end as the reference does, and then went on with another one.
    """

    end: Site
    calls: tuple[Call, ...]
    begins: tuple[Site, ...]
    evidence: Evidence
    watched: str
    backward: bool = False
    parameter: str = ""
    number: int = -1
    changed_later: bool = False

    @property
    def computes(self) -> bool:
        """Whether it computes, and does not only move elements."""
        return any(call.name not in MOVES for call in self.calls)


@dataclass(frozen=True, eq=False)
class Judged:
    """A stage and its error.

    Attributes:
        stage: the stage.
        error: the relative L2 error of the candidate's value or gradient at its end.
        expected: the error that the precision costs there, by the rounding model.
        gain: the error's share along the value, in standard deviations of rounding.
        by_chance: the ratio of error to expected error that roundings of so few numbers reach by chance.
        is_missing: whether the candidate has no gradient where the reference has one.
        exact: what the reference computes, ``[...]`` in FP64; None for a gradient.
    """

    stage: Stage
    error: float
    expected: float
    gain: float = 0.0
    by_chance: float = 1.0
    is_missing: bool = False
    exact: Tensor | None = field(default=None, repr=False)

    @property
    def ratio(self) -> float:
        """The error over the expected one."""
        return self.error / self.expected if self.expected else math.inf

    @property
    def is_large(self) -> bool:
        """Whether the error is larger than the expected one by more than chance explains."""
        return not self.ratio <= max(RATIO, self.by_chance)


def is_flagged(one: Judged) -> bool:
    """Return whether a stage's error is larger than rounding explains."""
    return one.is_missing or one.is_large or not abs(one.gain) <= GAIN


def allowed_ratio(count: int) -> float:
    """Return how many times as large a change of so many numbers may be as the one that explains it."""
    return max(RATIO, ratio_by_chance(count))


def judge_forward_and_backward(
    prepared: Prepared,
    graph: Graph,
    found: Mapping[int, Match],
    candidate: Tensors,
    rounding: Rounding,
    freedoms: Sequence[Freedom],
) -> list[Judged]:
    """Return all stages, judged, in the reference's order: forward ones first, then backward ones.

    Args:
        prepared: what was compared.
        graph: the reference's.
        found: the matches, by the number of the reference's value.
        candidate: the candidate's tensors, whose weight gradients end stages as well.
        rounding: the precision's.
        freedoms: how kernels may compute, as in the verdict.
    """
    passes = _Passes(prepared, graph, found)
    exact = passes.in_fp64()
    modelled = [passes.under(rounding, freedom) for freedom in freedoms]
    forward = [
        _judge_end(graph, stage, match, exact.ends[number], [one.ends[number] for one in modelled], rounding)
        for number, match in found.items()
        if number in exact.ends and all(number in one.ends for one in modelled)
        for stage in [_forward_stage(graph, found, match)]
    ]
    backward = [] if prepared.evaluation else list(_judge_backward(passes, exact, modelled, candidate, rounding))
    order = graph.order
    return [
        *sorted(forward, key=lambda one: order[one.stage.end]),
        *sorted(backward, key=lambda one: -order.get(one.stage.end, 0)),
    ]


def _forward_stage(graph: Graph, found: Mapping[int, Match], match: Match) -> Stage:
    calls, read = graph.between(match.value, found.keys())
    begins = tuple(
        sorted((_site_of(graph, found[number].value) for number in read), key=lambda one: graph.order.get(one, -1))
    )
    return Stage(
        _site_of(graph, match.value),
        tuple(calls),
        begins,
        match.evidence,
        match.watched.name,
        number=match.value.number,
        changed_later=match.replaced,
    )


def _judge_end(
    graph: Graph, stage: Stage, match: Match, exact: Tensor, modelled: Sequence[Tensor], rounding: Rounding
) -> Judged:
    """Judge what the candidate has at the end of a stage."""
    is_wide = match.watched.tensor.dtype is torch.float32
    least = least_of(rounding, is_wide)
    models = [x.double() if is_wide else rounding.store_part(x.float()).double() for x in modelled]
    rows = graph.rows_read(match.value, exact)
    mine, exact, *models = (_mask_unread(x.double(), rows) for x in (match.end, exact, *models))
    return replace(measure_error(stage, mine, exact, models, least), exact=exact)


def _mask_unread(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else torch.where(rows, x, 0.0)  # padding may be anything, also NaN


def least_of(rounding: Rounding, is_wide: bool = False) -> float:
    """Return the least error that is expected of a result, which is in FP32 if it is wide."""
    if is_wide and rounding.storage is not torch.float32:
        return _LEAST_IN_FP32
    # An FP32 GEMM may multiply in TF32, whose roundoff is FP16's.
    dtype = torch.float16 if rounding.storage is torch.float32 else rounding.storage
    return _LEAST * torch.finfo(dtype).eps / 2.0


def measure_error(stage: Stage, mine: Tensor, exact: Tensor, models: Sequence[Tensor], least: float) -> Judged:
    """Return the error at a stage's end.

    Args:
        stage: the stage.
        mine: what the candidate has.
        exact: what it should have, in FP64.
        models: what faithful kernels may have instead.
        least: the least relative error that is expected.
    """
    size = torch.linalg.vector_norm(exact).item()
    if size == 0.0:
        return Judged(stage, 0.0 if not mine.any() else math.inf, least)
    models = [x for x in models if bool(torch.isfinite(x).all())]
    if not models or not math.isfinite(size):
        return Judged(stage, 0.0, least)  # nothing is known of what to expect here
    error = torch.linalg.vector_norm(mine - exact).item() / size
    expected = max(least, *(torch.linalg.vector_norm(x - exact).item() / size for x in models))
    share, *shares = (((x - exact) * exact).sum().item() / size**2 for x in (mine, *models))
    count = _count_effective(exact)
    deviation = max(expected / math.sqrt(count), max(shares) - min(shares))
    # Roundings such as TF32's may lean, and whoever leaves one out leans less.
    usual = statistics.mean(shares)
    apart = share - min(max(share, min(usual, 0.0)), max(usual, 0.0))
    return Judged(stage, error, expected, apart / deviation, ratio_by_chance(count))


def ratio_by_chance(count: float) -> float:
    """Return the ratio of two rounding errors of as many independent numbers that one stage in a million exceeds.

    The squares of both are sums of ``count`` squares, so that their ratio has an F distribution.
    """
    return math.sqrt(fdtri(count, count, 1.0 - _CHANCE))


def _count_effective(x: Tensor) -> float:
    """Return how many independent roundings carry the share of an error along a tensor.

    Roundings are relative, so large numbers count for more. A matrix may also be the sum of few products of two
    vectors, as a weight's gradient is: then the roundings of each vector's numbers are all that there are.
    """
    squares = x.square()
    total = squares.sum().square()
    count = (total / squares.square().sum()).item()
    if x.dim() == 2:
        narrow = x if x.shape[0] <= x.shape[1] else x.T
        rank = (total / (narrow @ narrow.T).square().sum()).item()
        count = min(count, rank * len(narrow))
    return max(count, 1.0)


# Backward stages.


def _judge_backward(
    passes: _Passes, exact: _Forced, modelled: Sequence[_Forced], candidate: Tensors, rounding: Rounding
) -> Iterator[Judged]:
    graph, least = passes.graph, least_of(rounding)
    trained = {name for name, x in passes.prepared.reference.named_parameters() if x.requires_grad}
    has_inputs = any(kind == "input gradient" for kind, _ in exact.leaf_gradients)
    # A gradient goes on through a match that is no cut.
    readers = _stages_that_read(graph, {number: passes.found[number] for number in passes.cuts})
    for number, gradient in exact.gradients.items():
        match = passes.found[number]
        models = [one.gradients[number] for one in modelled if number in one.gradients]
        if not gradient.any() or len(models) < len(modelled):
            continue
        calls = readers(match.value)
        if not calls:
            continue
        stage = Stage(_site_of(graph, match.value), calls, (), match.evidence, match.watched.name, backward=True)
        mine = passes.gradient_of(match)
        if mine is None and not graph.needs_gradient(match.value, trained, has_inputs):
            continue
        if mine is None:
            yield Judged(stage, 1.0, least, is_missing=True)
        else:
            stored = [rounding.store_part(x.float()) for x in models]
            # What a mask or a ReLU makes zero may have any gradient there: it goes no further.
            passed_on = exact.ends[number] != 0.0
            mine, gradient, *stored = (torch.where(passed_on, x.double(), 0.0) for x in (mine, gradient, *stored))
            yield measure_error(stage, mine, gradient, stored, least)
    leaves = _find_leaves(passes.prepared, graph)
    for key, gradient in exact.leaf_gradients.items():
        mine = candidate.get(key)
        calls = readers(leaves[key]) if key in leaves else ()
        if mine is None or not calls or not gradient.any():
            continue
        kind, name = key
        stage = Stage(calls[0].site, calls, (), "weights", f"{kind} {name}", backward=True, parameter=name)
        stored = [rounding.store_part(one.leaf_gradients[key].float()).double() for one in modelled]
        yield measure_error(stage, mine.double(), gradient.double(), stored, least)


def _find_leaves(prepared: Prepared, graph: Graph) -> dict[tuple[Kind, str], Value]:
    """Return the values that are parameters and inputs, by their gradients' keys; inputs are told by their numbers."""
    found: dict[tuple[Kind, str], Value] = {}
    inputs = named_inputs(cast(prepared.inputs, torch.float64), prepared.input_names)
    for call in graph.trace.calls:
        for value in call.inputs:
            name = graph.trace.parameter(value)
            if name is not None:
                found["weight gradient", name] = value
            elif graph.trace.producer(value) is None and value.number not in graph.trace.buffers:
                tensor = graph.trace.tensor(value)
                same = (other for other, x in inputs.items() if x.shape == tensor.shape and torch.equal(x, tensor))
                found.update((("input gradient", other), value) for other in same)
    return found


def _site_of(graph: Graph, value: Value) -> Site:
    call = graph.trace.producer(value)
    return value.site if call is None else call.site


def _stages_that_read(graph: Graph, found: Mapping[int, Match]) -> Callable[[Value], tuple[Call, ...]]:
    """Return a function that returns the calls of the stages that begin with a value or a parameter."""
    users: dict[int, dict[Site, Call]] = {}
    for match in found.values():
        calls, read = graph.between(match.value, found.keys())
        given = read | {value.number for call in calls for value in call.inputs if graph.trace.producer(value) is None}
        for number in given:
            users.setdefault(number, {}).update((call.site, call) for call in calls)

    def calls_of(value: Value) -> tuple[Call, ...]:
        return tuple(sorted(users.get(value.number, {}).values(), key=lambda call: graph.order[call.site]))

    return calls_of


# The passes in which every stage begins with the candidate's values.


@dataclass
class _Forced:
    """What a pass computed.

    Attributes:
        ends: the values that stages end with, by number.
        gradients: the gradients at the values that stages begin with, by number.
        leaf_gradients: the gradients of parameters and inputs, by kind and name.
    """

    ends: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    leaf_gradients: Tensors = field(default_factory=dict)


class _Passes:
    def __init__(self, prepared: Prepared, graph: Graph, found: Mapping[int, Match]) -> None:
        self.graph = graph
        self.found = found
        self.prepared = prepared
        # These are laid out here, since under a rounding model even a copy is rounded.
        self._gradients = {number: self._find_gradient(match) for number, match in found.items()}
        self.cuts = {number for number, match in found.items() if self._may_cut(match)} - _read_beside(graph, found)

    def gradient_of(self, match: Match) -> Tensor | None:
        """Return the candidate's gradient at a match, in the reference's layout; None if it has none."""
        return self._gradients[match.value.number]

    def _find_gradient(self, match: Match) -> Tensor | None:
        gradient = match.watched.gradient
        if gradient is not None:
            return match.arrange(gradient)
        names = (name for name, value in self.graph.outputs.items() if value == match.value)
        name = next(names, None) if match.evidence == "output" else None
        return None if name is None else self.prepared.cotangents.get(name)

    def in_fp64(self) -> _Forced:
        self.prepared.reference.double()
        return self._run_pass(torch.float64, in_fp64())

    def under(self, rounding: Rounding, freedom: Freedom) -> _Forced:
        self.prepared.reference.float()
        return self._run_pass(torch.float32, under_model(self.prepared, rounding, freedom))

    def _run_pass(self, dtype: torch.dtype, model: AbstractContextManager[Phase | None]) -> _Forced:
        prepared, forced = self.prepared, _Forced()
        leaves: dict[int, Tensor] = {}
        differentiated = not prepared.evaluation

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            with edited(module, self._list_edits(forced.ends, leaves, differentiated)):
                returned = (prepared.call or nn.Module.__call__)(module, *args, **kwargs)
            return named_outputs(returned) | {str(number): x for number, x in forced.ends.items()}

        def gradients(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
            # ``run`` calls what a dict holds under a key ``output[key]`` if there is more than one.
            keys = {name: name[7:-1] if len(outputs) > 1 else name for name in outputs}
            return {name: self._given_gradient(keys[name], x) for name, x in outputs.items()}

        with model as phase:
            ran = run(
                prepared.reference,
                call,
                cast(prepared.inputs, dtype),
                prepared.input_names,
                gradients,
                before_backward=phase.begin_backward if phase else lambda: None,
                differentiated=differentiated,
            )
        forced.ends = {number: x.detach() for number, x in forced.ends.items()}
        forced.gradients = {number: x.grad for number, x in leaves.items() if x.grad is not None}
        forced.leaf_gradients = {key: x for key, x in tensors_of(ran).items() if key[0] != "output"}
        prepared.reference.zero_grad(set_to_none=True)
        return forced

    def _given_gradient(self, name: str, x: Tensor) -> Tensor:
        """Return the gradient with which the backward pass begins at an output or at the end of a stage."""
        if name.isdigit():
            gradient = self.gradient_of(self.found[int(name)]) if int(name) in self.cuts else None
        else:
            gradient = self.prepared.cotangents.get(name)
        return torch.zeros_like(x) if gradient is None else gradient.to(x.dtype).reshape(x.shape)

    def _may_cut(self, match: Match) -> bool:
        """Return whether a candidate's value is one through which all gradients of the reference's go."""
        gradient = match.watched.gradient
        if match.rows is not None and gradient is not None:
            alike = [other.rows for other in self.found.values() if other.watched is match.watched]
            if are_left_out(gradient, [rows for rows in alike if rows is not None]):
                return False
        if match.evidence in ("weights", "output"):
            return True
        is_whole = not isinstance(match.arrange, Layout) or match.arrange.is_whole
        is_alike = self.graph.bits(match.watched.lineage) == self.graph.lineage(match.value)
        return is_whole and is_alike and match.watched.is_result

    def _list_edits(self, ends: dict[int, Tensor], leaves: dict[int, Tensor], differentiated: bool) -> list[Edit]:
        """Return edits that keep what the matched calls return, and return the candidate's values instead."""
        by_call: dict[Site, tuple[Call, list[Match]]] = {}
        writes = any(map(is_in_place, self.graph.trace.calls))
        for match in self.found.values():
            call = self.graph.trace.producer(match.value)
            if call is not None and match.value in call.outputs:
                by_call.setdefault(call.site, (call, []))[1].append(match)
        cuts = self.cuts if differentiated else set()

        def exchange(match: Match, x: Tensor) -> Tensor:
            ends[match.value.number] = x
            held = self.graph.rows_read(match.value, x)
            begin = match.begin.to(x) if held is None else torch.where(held, match.begin.to(x), x.detach())
            begin = laid_out_as(begin, x.detach())
            if match.value.number not in cuts:
                # By its gradient the rounding model also tells an activation from a table, in evaluation as well.
                return _Exchanged.apply(x, begin)
            leaves[match.value.number] = begin.requires_grad_()
            return begin.clone() if writes else begin  # no call may write to a leaf

        return [Edit(site, (), _exchanging(*call_and_matches, exchange)) for site, call_and_matches in by_call.items()]


def _exchanging(
    call: Call, matches: Sequence[Match], exchange: Callable[[Match, Tensor], Tensor]
) -> Callable[[Any], Any]:
    """Return a function that exchanges the matched tensors among those that a call returns."""
    at = {call.outputs.index(match.value): match for match in matches}

    def exchanged(result: Any) -> Any:
        others = {id(x): exchange(at[place], x) for place, x in enumerate(tensors_in(result)) if place in at}
        return mapped(result, lambda x: others.get(id(x), x))

    return exchanged


class _Exchanged(torch.autograd.Function):
    """A function that returns another tensor, and passes its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return other.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _read_beside(graph: Graph, found: Mapping[int, Match]) -> set[int]:
    """Return the numbers of matched values from which the candidate computes less than the reference does.

    A port may compute a value twice, and read one for this and one for that. Each then gets a part of the gradient.
    """
    above: dict[int, int] = {}

    def ancestors(one: Watched) -> int:
        if id(one) not in above:
            above[id(one)] = 0  # of a value that was written to, an ancestor may be itself
            above[id(one)] = functools.reduce(
                lambda bits, each: bits | ancestors(each) | 1 << each.order, one.parents, 0
            )
        return above[id(one)]

    beside: set[int] = set()
    for match in found.values():
        _, read = graph.between(match.value, found.keys())
        if match.watched.parents:
            beside |= {one for one in read if not ancestors(match.watched) >> found[one].watched.order & 1}
    return beside
