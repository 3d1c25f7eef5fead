"""Does a token's result depend on how it was batched, padded, packed, cut, recomputed or split, and whose fault is it?

The inputs are arranged in another way, the candidate runs on them, and its results are put back in their old order and
compared to the bit. If some differ, the rounding model runs on both arrangements: what changes there as much is the
recipe's doing, since one scale for a tensor couples its tokens, or a freedom of kernels. What neither explains is the
port's. The reference in FP64 shows first that the arrangement means the same, or that it depends on it itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parity.case.case import Rng, draw_inputs, mixed
from parity.case.decoding import prompted
from parity.comparison import catching, find_noisy_kernels, observe_port
from parity.judge.request import Request, run_again
from parity.mistakes.codes import finding
from parity.numerics.errors import TINY, norm_of
from parity.numerics.formats import Rounding
from parity.numerics.freedom import FUSED, FUSED_POINTWISE, UNFUSED, Freedom, Port
from parity.numerics.golden import in_fp64
from parity.numerics.kernel_choices import biased_kernels
from parity.passes.all_passes import Tensors, as_returned, run_model, tensors_of
from parity.passes.modes import usual_modes
from parity.passes.one_pass import named_inputs, run, with_inputs
from parity.passes.prepare import Cache, Prepared, build, calls_of, cast, prepare
from parity.passes.refusals import SAME_IN_FP64
from parity.result import Kind, Result, label_of
from parity.search.located import describe_place
from parity.settings import AXES
from parity.shown import raised
from parity.stages.judge import allowed_ratio
from parity.stages.locate import judge_stages
from parity.te import why_refused
from parity.te.recipes import REFUSED_SHAPES
from parity.te.state import checkpointed
from parity.trace.calls import Misfit
from parity.trace.effects import undisturbed
from parity.user_error import UserError

Verdict = Literal["none", "equal", "kernels", "recipe", "reference", "depends"]
_ORDER: tuple[Verdict, ...] = ("none", "equal", "kernels", "recipe", "reference", "depends")  # the worst comes last
_SMALL = 1e-6  # a tensor whose norm is a smaller share of the largest one's is 0 but for rounding
_GARBAGE = 30.0  # the size of what stands in padding; usual inputs have 1
_MOST_PARTS = 4  # micro-batches

Key = tuple[Kind, str]
Changes = dict[Key, float]  # by how much of its norm each tensor changes


@dataclass(frozen=True)
class Outcome:
    """What became of an axis.

    Attributes:
        axis: a name of ``AXES``.
        verdict: ``equal`` to the bit; ``kernels`` or ``recipe`` if that explains what differs, and ``reference`` if it
            differs in FP64; ``depends`` if nothing explains it, a finding; ``none`` if the axis does not apply.
        change: how much of its norm the tensor changes that changes most.
        told: in words, what changes, or why the axis does not apply.
    """

    axis: str
    verdict: Verdict
    change: float
    told: str


def try_axes(request: Request, axes: Iterable[str] = AXES) -> list[Outcome]:
    """Return what becomes of each of these axes.

    Raises:
        UserError: if the pair cannot be compared at this precision.
    """
    if reason := why_refused(request.precision, request.kernels):
        raise UserError(f"{request.case} does not run at {request.precision.name}: {reason}")

    def explain(error: BaseException) -> list[Outcome]:
        raise error if isinstance(error, UserError) else UserError(f"{request.case} cannot run: {raised(error)}")

    with usual_modes(), undisturbed(mixed(request.seed, "invariance")):
        return catching(lambda: list(map(_Subject(request).try_axis, axes)), explain)


def check_invariance_at(request: Request, result: Result) -> Result:
    """Return a comparison's result with the axes that its pair declares: a failure, if the candidate depends on one."""
    if not request.case.invariance or result.status not in ("passed", "failed"):
        return result
    try:
        outcomes = try_axes(request, request.case.invariance)
    except UserError as error:
        return replace(result, status="error", reason=f"invariance: {error}")
    told = [(one, f"{one.axis}: {one.told}") for one in outcomes if one.verdict != "equal"]
    found = [finding("not-invariant", text) for one, text in told if one.verdict == "depends"]
    notes = (*result.notes, *(text for one, text in told if one.verdict != "depends"))
    status, findings = "failed" if found else result.status, (*result.findings, *found)
    reason = result.reason or "its results depend on what they must not" * bool(found)
    return replace(result, status=status, reason=reason, findings=findings, notes=notes)


class _Excused(Exception):
    """Raised if an axis cannot be tried, with the verdict and its words."""

    def __init__(self, verdict: Verdict, told: str) -> None:
        super().__init__(told)
        self.verdict = verdict


@dataclass(frozen=True)
class _Tokens:
    """Sequences of a batch, documents of a packed row or positions of a sequence, which can be put in another order.

    Attributes:
        count: how many there are. In orders, the numbers from ``count`` on are those of others.
        inputs, outputs: the dimension along which a tensor holds them, by its name.
        borders: where documents begin and end, by the input's name; empty if nothing is packed.
    """

    count: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int] = field(default_factory=dict)
    borders: Mapping[str, Tensor] = field(default_factory=dict)

    def list_rows(self, order: Iterable[int], size: int) -> Tensor:
        """Return the places of these tokens along a dimension of this size; those of others come after it."""
        ends = next((x for x in self.borders.values() if int(x[-1]) == size), None)
        if ends is None and size % self.count:
            raise _Excused("none", f"a dimension of {size} does not hold {self.count} of equal size")
        sizes = torch.full((self.count,), size // self.count) if ends is None else ends.diff()
        starts = (sizes.cumsum(0) - sizes).tolist()
        spans = [(starts[one % self.count] + one // self.count * size, int(sizes[one % self.count])) for one in order]
        return torch.cat([torch.arange(start, start + length) for start, length in spans])

    def arrange(self, x: Tensor, others: Tensor, dim: int, order: Iterable[int]) -> Tensor:
        return _select_rows(torch.cat([x, others.to(x)], dim), dim, self.list_rows(order, x.shape[dim]))

    def arrange_inputs(
        self, own: Mapping[str, Tensor], others: Mapping[str, Tensor], order: Sequence[int]
    ) -> dict[str, Tensor]:
        lengths = {name: x.diff()[[one % self.count for one in order]] for name, x in self.borders.items()}
        borders = {name: torch.cat([x.new_zeros(1), x.cumsum(0).to(x.dtype)]) for name, x in lengths.items()}
        return {name: self.arrange(own[name], others[name], dim, order) for name, dim in self.inputs.items()} | borders


@dataclass(frozen=True, eq=False)
class _Way:
    """Another way to compute the same tokens.

    Attributes:
        told: how, in words.
        runs: the passes that compute it.
        run: runs the candidate.
        join: puts the passes' tensors in their usual order, without what is not compared.
        keep: leaves the same of the usual pass.
        ranks: how many processes compute it together, each of which rounds its part.
    """

    told: str
    runs: tuple[Prepared, ...]
    run: Callable[[Prepared], Tensors]
    join: Callable[[Sequence[Tensors]], Tensors] = lambda some: some[0]
    keep: Callable[[Tensors], Tensors] = dict
    ranks: int = 1


class _Subject:
    """A pair at one precision, size and seed."""

    def __init__(self, request: Request) -> None:
        self._request = replace(request, case=request.case.whole)
        self._at = self._request.case, request.checked, request.seed, request.kernels
        prepared = prepare(*self._at[:2], request.precision.dtype, *self._at[2:])
        self._base = replace(prepared, probe=None, probed={}, lookups=Counter(), cache=Cache())
        self._run = partial(run_again, self._request)
        self._own = self._run(self._base)
        self._base = as_returned(self._base, self._own)
        self._inputs = named_inputs(prepared.inputs, prepared.input_names)

    def try_axis(self, axis: str) -> Outcome:
        """Return the worst of what becomes of the ways along this axis."""
        try:
            is_padding = axis.startswith("padding")
            ways = [self._pad_tokens(axis)] if is_padding else getattr(self, f"_list_ways_{axis.replace('-', '_')}")()
            outcomes = [self._judge_way(axis, way) for way in ways]
        except _Excused as error:
            return Outcome(axis, error.verdict, 0.0, str(error))
        return max(outcomes, key=lambda one: (_ORDER.index(one.verdict), one.change))

    # The axes.

    def _list_ways_batch_size(self) -> Iterator[_Way]:
        count = self._batch.count
        before, behind = range(count, count + (count + 1) // 2), range(count + (count + 1) // 2, 2 * count)
        yield self._rearrange_tokens(self._batch, [[*before, *range(count), *behind]], "among as many others")
        if count > 1:
            yield self._rearrange_tokens(self._batch, [range(count // 2, count)], "in half of the batch")

    def _list_ways_batch_place(self) -> Iterator[_Way]:
        count = self._batch.count
        order, told = (range(count)[::-1], "in reverse order") if count > 1 else ((1, 0), "behind another one")
        yield self._rearrange_tokens(self._batch, [order], told)

    def _list_ways_micro_batches(self) -> Iterator[_Way]:
        parts = torch.arange(self._batch.count).tensor_split(min(self._batch.count, _MOST_PARTS))
        if len(parts) < 2:
            raise _Excused("none", "the batch holds one sequence")
        yield self._rearrange_tokens(self._batch, [x.tolist() for x in parts], f"in {len(parts)} micro-batches")

    def _list_ways_packing(self) -> Iterator[_Way]:
        if not self._borders:
            raise _Excused("none", "no argument of the inputs holds the borders of packed documents, from 0 on")
        yield self._rearrange_tokens(self._batch, [[i] for i in range(self._batch.count)], "each document by itself")

    def _list_ways_prefix(self) -> Iterator[_Way]:
        half = range(self._positions.count // 2)
        told = f"without what follows position {len(half) - 1}"
        yield self._rearrange_tokens(self._positions, [half], told, only="output")

    def _list_ways_decoding(self) -> Iterator[_Way]:
        longest = max((x.shape[1] for x in self._base.golden.outputs.values() if x.dim() > 1), default=1)
        for prompt in sorted({1, longest // 2, longest} - {0}):
            with prompted(prompt) as called:
                self._run(self._base)
            if not called:
                raise _Excused("none", "the port is not called by parity.Decoding")

            def decode(prepared: Prepared, prompt: int = prompt) -> Tensors:
                with prompted(prompt):
                    return self._run(prepared)

            yield _Way(f"decoded after a prompt of {prompt}", (self._base,), decode)

    def _list_ways_recompute(self) -> Iterator[_Way]:
        if self._base.evaluation:
            raise _Excused("none", "in evaluation mode there is no backward pass")
        if calls_of(self._base).trace.optimizers:
            raise _Excused("none", "a pass that makes an optimizer's steps cannot be computed again")

        def recompute(prepared: Prepared) -> Tensors:
            pair, cache = build(*self._at), Cache()
            call = checkpointed(self._request.kernels.te.checkpoint, pair.call_candidate)
            cache.get("pair", lambda: replace(pair, call_candidate=call))
            return self._run(replace(prepared, cache=cache))

        told = "computed again in the backward pass"
        made = self._vary_inputs({}, lambda outputs: self._base.cotangents, checkpointed(checkpoint, self._base.call))
        yield self._verify_way(_Way(told, (made,), recompute))

    def _list_ways_ranks(self) -> Iterator[_Way]:
        from parity.trainings.parallel import NO_RANKS, tensors_over_ranks

        request = self._request
        if not request.case.ranks or request.kernels.backend == "gpu":
            raise _Excused("none", NO_RANKS if request.case.ranks else "the pair is declared without ranks=[...]")
        for made in request.case.ranks:
            run = partial(tensors_over_ranks, request, made=made)
            yield _Way(f"over {made.label}", (self._base,), run, ranks=made.count)

    def _pad_tokens(self, axis: str) -> _Way:
        """Return the way with padding, as much as there are tokens, that one of the inputs marks."""
        tokens, excuses, garbage = self._positions, list[_Excused](), axis == "padding-garbage"
        own, others = range(tokens.count), range(tokens.count, 2 * tokens.count)
        side, order = ("left", [*others, *own]) if axis == "padding-left" else ("right", [*own, *others])
        padding = {name: self._make_padding(x, garbage) for name, x in self._inputs.items()}
        for name, marks in self._list_marks(tokens):
            if side == "left" and name not in tokens.inputs:
                raise _Excused("none", f"{name} holds lengths, which mark no padding on the left")
            told = f"with {'garbage' if garbage else 'zeros'} on the {side} that {name} marks as padding"
            try:
                return self._rearrange_tokens(tokens, [order], told, {**padding, name: marks})
            except _Excused as error:
                excuses.append(error)
        raise _join_excuses(excuses, "no argument of the inputs is a padding mask or holds lengths")

    def _make_padding(self, x: Tensor, garbage: bool) -> Tensor:
        if not x.is_floating_point():
            return x.flip(-1)
        return Rng(self._request.seed, "garbage").normal(*x.shape, std=_GARBAGE) if garbage else torch.zeros_like(x)

    def _list_marks(self, tokens: _Tokens) -> Iterator[tuple[str, Tensor]]:
        """Yield inputs that may mark padding, with what they hold there: of two values, the rarer one first."""
        sizes = {self._batch.count, tokens.count, 1}
        for name, x in self._inputs.items():
            if name in tokens.inputs and {*x.shape} <= sizes and x.numel() == self._batch.count * tokens.count:
                values = {*x.unique().tolist()}
                values |= {0, 1} if values <= {0, 1} else set()
                if len(values) == 2:
                    rarest = sorted(values, key=lambda value: int((x == value).sum()))
                    yield from ((name, torch.full_like(x, value)) for value in rarest)
            elif (
                x.shape == (self._batch.count,) and not x.is_floating_point() and 0 < x.min() <= x.max() <= tokens.count
            ):
                yield name, x

    # Which dimensions hold the batch and the positions.

    @cached_property
    def _borders(self) -> dict[str, Tensor]:
        sizes = {size for x in self._inputs.values() for size in x.shape}
        whole = {
            name: x for name, x in self._inputs.items() if x.dim() == 1 and len(x) > 1 and not x.is_floating_point()
        }
        return {n: x for n, x in whole.items() if x[0] == 0 and int(x[-1]) in sizes and bool((x.diff() >= 0).all())}

    @cached_property
    def _batch(self) -> _Tokens:
        """Return the batch, with the dimensions of outputs that grow with it.

        In FP64, sequences behind as many others, or in reverse order, have the same results.
        """
        tried, excuses = list[_Tokens](), list[_Excused]()
        if self._borders:
            ends = next(iter(self._borders.values()))
            sizes = {name: {int(ends[-1]), len(ends) - 1} & {*x.shape} for name, x in self._inputs.items()}
            dims = {name: self._inputs[name].shape.index(max(some)) for name, some in sizes.items() if some}
            tried.append(_Tokens(len(ends) - 1, dims, borders=self._borders))
        else:
            for dim in (0, 1):
                counts = [x.shape[dim] for x in self._inputs.values() if x.dim() > dim]
                same = {name: dim for name, x in self._inputs.items() if x.dim() > dim and x.shape[dim] == counts[0]}
                tried += [_Tokens(counts[0], same)] * bool(same)
        for tokens in tried:
            count = tokens.count
            try:
                (made,) = self._rearrange_tokens(
                    tokens, [[*range(count, 2 * count), *range(count)]], "behind others"
                ).runs
                tokens = replace(tokens, outputs=self._match_dims(made.golden.outputs))
                if count > 1:
                    self._rearrange_tokens(tokens, [range(count)[::-1]], "in reverse order")
                return tokens
            except _Excused as error:
                dim = next(iter(tokens.inputs.values()))
                excuses.append(_Excused(error.verdict, f"along dimension {dim} of the inputs, {error}"))
        raise _join_excuses(excuses, "no input is a tensor with dimensions")

    @cached_property
    def _positions(self) -> _Tokens:
        try:
            dim = 1 - next(iter(self._batch.inputs.values()))
        except _Excused as error:
            raise _Excused("none", "no dimension of the inputs is a batch") from error
        count = next((x.shape[dim] for x in self._inputs.values() if x.dim() > dim), 0)
        if self._borders or count < 2:
            raise _Excused("none", "the inputs have no dimension of positions besides that of the batch")
        at = {
            name: [d for d in (dim, x.dim() - 1, 0) if x.dim() > d and x.shape[d] == count]
            for name, x in self._inputs.items()
        }
        of_batch = self._batch.inputs
        return _Tokens(count, {name: dims[0] for name, dims in at.items() if dims and dims[0] != of_batch.get(name)})

    def _match_dims(self, outputs: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the dimension of each output whose size has changed with the number of tokens."""
        found: dict[str, int] = {}
        for name, x in outputs.items():
            own = self._base.golden.outputs[name]
            changed = [i for i, (one, other) in enumerate(zip(own.shape, x.shape, strict=False)) if one != other]
            if own.dim() != x.dim() or len(changed) > 1:
                raise _Excused("none", f"the reference's {name} becomes {list(x.shape)}, which was {list(own.shape)}")
            if changed:
                found[name] = changed[0]
        return found

    # Another order of the inputs, and the results in the old one.

    @cached_property
    def _others(self) -> dict[str, Tensor]:
        """Other inputs of the pair, or its own in another order if those have other shapes."""
        drawn = draw_inputs(build(*self._at), self._request.checked.size, Rng(self._request.seed, "neighbours"))
        others = named_inputs(cast(drawn, self._base.dtype), self._base.input_names)
        fit = all(others[name].shape == x.shape for name, x in self._inputs.items())
        return others if fit else {name: x.flip(-1) for name, x in self._inputs.items()}

    def _rearrange_tokens(
        self,
        tokens: _Tokens,
        orders: Sequence[Sequence[int]],
        told: str,
        padding: Mapping[str, Tensor] | None = None,
        only: str = "",
    ) -> _Way:
        """Return the way to compute tokens in other orders, each in a pass of its own.

        Args:
            tokens: what is put in order.
            orders: one for each pass.
            told: as in ``_Way``.
            padding: what the others are, by the input's name, if they are no tokens; else they are drawn.
            only: the kind of tensors that are compared; empty for all.

        Raises:
            _Excused: if the reference cannot compute it, or its results in FP64 differ.
        """
        count, is_padded = tokens.count, padding is not None
        given = self._others if padding is None else padding
        own = sorted(one for order in orders for one in order if one < count)
        is_whole = len(own) == count and (is_padded or sum(map(len, orders)) == count)
        outputs = dict(tokens.outputs)

        def arrange(order: Sequence[int], is_mean: bool) -> Prepared:
            def flow(made: dict[str, Tensor]) -> dict[str, Tensor]:
                if len(order) != count:
                    outputs.update(self._match_dims(made))
                flowing = {
                    name: x * (len(order) / count if is_mean else 1.0) for name, x in self._base.cotangents.items()
                }
                for name, dim in outputs.items():
                    x = self._base.cotangents[name]
                    flowing[name] = tokens.arrange(x, x.flip(dim) * (not is_padded), dim, order)
                return flowing

            return self._vary_inputs(tokens.arrange_inputs(self._inputs, given, order), flow)

        def gather(some: Sequence[Tensors], orders: Sequence[Sequence[int]]) -> Tensors:
            """Return the tokens' rows in their usual order, and what is summed over all of them."""
            gathered: Tensors = {}
            for kind, name in some[0]:
                dim = {"output": outputs, "input gradient": tokens.inputs}.get(kind, {}).get(name)
                parts = [one[kind, name] for one in some]
                if not kind.startswith(only):
                    continue
                if dim is not None:
                    size = self._own[kind, name].shape[dim]
                    rows = torch.cat([tokens.list_rows(order, size) for order in orders])
                    places = torch.isin(rows, tokens.list_rows(own, size)).nonzero()[:, 0]
                    gathered[kind, name] = _select_rows(torch.cat(parts, dim), dim, places[rows[places].argsort()])
                elif is_whole and (kind != "output" or is_single):
                    gathered[kind, name] = sum(x.double() for x in parts[1:]) + parts[0]
            return gathered

        is_single, excuse = len(orders) == 1, _Excused("none", "")
        join, keep = partial(gather, orders=orders), lambda tensors: gather([tensors], [range(count)])
        for is_mean in (False, True):
            try:
                runs = tuple(arrange(order, is_mean) for order in orders)
                return self._verify_way(_Way(told, runs, self._run, join, keep))
            except _Excused as error:
                excuse = error
        raise excuse

    def _verify_way(self, way: _Way) -> _Way:
        """Return the way; raise ``_Excused`` if it changes results of the reference in FP64."""
        golden = way.keep(tensors_of(self._base.golden))
        changes = _measure_changes(way.join([tensors_of(one.golden) for one in way.runs]), golden, golden)
        moved = {key: change for key, change in changes.items() if not change <= SAME_IN_FP64}
        if not moved:
            return way
        worst = max(moved, key=lambda key: moved[key])
        raise _Excused("reference", f"{way.told}, the reference's own {label_of(*worst)} changes by {moved[worst]:.2g}")

    def _vary_inputs(
        self,
        inputs: Mapping[str, Tensor],
        flow: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
        call: Callable[..., Any] | None = None,
    ) -> Prepared:
        """Return the pair with other inputs, gradients that flow to the outputs there, and golden by another call."""
        base, flowing = self._base, dict[str, Tensor]()
        given = with_inputs(base.inputs, base.input_names, inputs)

        def note(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
            flowing.update(flow(outputs))
            return flowing

        try:
            with in_fp64():
                at = base.reference.double(), call or base.call, cast(given, torch.float64), base.input_names, note
                golden = run(*at, differentiated=not base.evaluation)
        except _Excused:
            raise
        except Exception as error:  # the reference's code may raise anything on other shapes
            raise _Excused("none", f"the reference cannot compute it ({raised(error)})") from error
        return replace(base, inputs=given, cotangents=flowing, golden=golden, cache=Cache())

    # What explains a change.

    def _judge_way(self, axis: str, way: _Way) -> Outcome:
        try:
            made = way.join([way.run(one) for one in way.runs])
        except Exception as error:  # the port's code may raise anything on other shapes
            told = f"{way.told}, the candidate raises {raised(error)}"
            return Outcome(axis, "none" if any(one in told for one in REFUSED_SHAPES) else "depends", math.inf, told)
        golden = way.keep(tensors_of(self._base.golden))
        changes = _measure_changes(made, way.keep(self._own), golden)
        if not any(changes.values()):
            told = "all is equal to the bit" if changes else "nothing is left to compare"
            return Outcome(axis, "equal" if changes else "none", 0.0, f"{way.told}, {told}")

        for excuse in self._explain_changes(way, golden):
            verdict, why, explained = excuse
            if all(changes[key] <= allowed_ratio(golden[key].numel()) * explained[key] for key in changes):
                worst = max(changes, key=lambda key: changes[key])
                why = f"as {why} explain ({explained[worst]:.2g})"
                break
        else:
            verdict, worst = "depends", max(changes, key=lambda key: changes[key] / (explained[key] + TINY))
            why = f"of which rounding explains {explained[worst]:.2g}{self._locate_departure(way)}"
        told = f"{way.told}, {label_of(*worst)} changes by {changes[worst]:.2g} of its norm, {why}"
        return Outcome(axis, verdict, changes[worst], told)

    def _explain_changes(self, way: _Way, golden: Tensors) -> Iterator[tuple[Verdict, str, Changes]]:
        """Yield what may explain changes, in words, with the changes that it explains."""
        rounding, alike = self._request.precision.rounding, [(FUSED, FUSED), (UNFUSED, UNFUSED)]
        stored = Rounding(rounding.storage) if rounding.quantizes else rounding

        def measure_errors(rounding: Rounding, times: float) -> Changes:
            errors = _measure_changes(way.keep(self._run_model(self._base, rounding, FUSED)), golden, golden)
            return {key: times * error for key, error in errors.items()}

        by_chance = _measure_changes(way.keep(self._run(self._base)), way.keep(self._own), golden)
        yield "kernels", "two runs on the same inputs", by_chance
        yield "kernels", "sums in another order", self._model_changes(way, golden, stored, alike)
        explained = self._model_changes(way, golden, rounding, alike)
        if way.ranks > 1:
            added = measure_errors(stored, (2.0 * way.ranks) ** 0.5)
            explained = {key: max(explained[key], added[key]) for key in golden}
            yield "kernels", "roundings of what ranks add up", explained
        if rounding.quantizes:
            # Where scales couple tokens, a port that computes them in parts of its own may round all of them anew.
            errors, in_parts = measure_errors(rounding, 2**0.5), rounding.scales_whole_weights or way.ranks > 1
            coupled = [key for key, change in explained.items() if change or in_parts]
            explained |= {key: max(explained[key], errors[key]) for key in coupled}
            yield "recipe", "the recipe's scales", explained
        names = (*biased_kernels(rounding), *find_noisy_kernels(self._request, self._port))
        kernels = [FUSED, UNFUSED, replace(FUSED_POINTWISE, splits_of_k=2, jitter=0)]
        kernels += [*(replace(FUSED, kernels=(name,)) for name in names), *self._port.freedoms]
        by_kernels = self._model_changes(way, golden, rounding, [(FUSED, one) for one in kernels])
        yield "kernels", "other kernels", {key: explained[key] + by_kernels[key] + by_chance[key] for key in golden}

    @cached_property
    def _port(self) -> Port:
        return observe_port(self._request, self._base)

    def _model_changes(
        self, way: _Way, golden: Tensors, rounding: Rounding, freedoms: Iterable[tuple[Freedom, Freedom]]
    ) -> Changes:
        """Return the largest changes of the model, from the usual pass by one kernel to the way's by another."""
        found = dict.fromkeys(golden, 0.0)
        for one, other in freedoms:
            made = way.join([self._run_model(x, rounding, other) for x in way.runs])
            changes = _measure_changes(made, way.keep(self._run_model(self._base, rounding, one)), golden)
            found = {key: max(found[key], change) for key, change in changes.items()}
        return found

    def _run_model(self, prepared: Prepared, rounding: Rounding, freedom: Freedom) -> Tensors:
        return prepared.cache.get((rounding, freedom), lambda: run_model(prepared, rounding, freedom))

    def _locate_departure(self, way: _Way) -> str:
        """Say where the candidate first departs from the reference in one of the way's passes; empty if unknown."""
        for one in way.runs:
            with suppress(Misfit):
                if place := describe_place(judge_stages(self._request, one)):
                    return f"; it departs from the reference {place}"
        return ""


def _join_excuses(excuses: Sequence[_Excused], otherwise: str) -> _Excused:
    verdict: Verdict = max((one.verdict for one in excuses), key=_ORDER.index, default="none")
    return _Excused(verdict, "; ".join(map(str, excuses)) or otherwise)


def _measure_changes(tensors: Tensors, own: Tensors, golden: Tensors) -> Changes:
    """Return by how much tensors differ, in units of golden's norm, or of the largest norm if that is nearly 0."""
    sizes = {key: norm_of(x) for key, x in golden.items()}
    largest = max(sizes.values(), default=0.0)

    def measure(key: Key) -> float:
        off = (tensors[key].double() - own[key].double()).nan_to_num(nan=math.inf)
        size = sizes[key] if sizes[key] > _SMALL * largest else max(largest, TINY)
        return norm_of(off.masked_fill(tensors[key].isnan() & own[key].isnan(), 0.0)) / size

    return {key: measure(key) for key in golden}


def _select_rows(x: Tensor, dim: int, rows: Tensor) -> Tensor:
    return x.index_select(dim, rows.to(x.device))
