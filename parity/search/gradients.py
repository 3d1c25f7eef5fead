"""Explain gradients that are wrong although outputs are right, and failures of modules that return only a loss."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, product
from posixpath import commonpath
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.mistakes.codes import finding, repairable
from parity.mistakes.hypothesis import Hypothesis, more_like_it
from parity.mistakes.losses import cross_entropy_hypotheses, label_shift_hypotheses, loss_hypotheses
from parity.mistakes.operations import factor_hypotheses
from parity.mistakes.replay import Passes, tensors_with
from parity.mistakes.residuals import Residual, residuals
from parity.numerics.errors import TINY, norm_of
from parity.passes.all_passes import Tensors
from parity.passes.prepare import Prepared
from parity.result import Finding, Kind, TensorResult
from parity.search.factors import doubt_about, factor_of, readable, shared_factor
from parity.search.failure import Budget, Failure, agrees, explains, few_outputs
from parity.search.in_full import Explanation, is_far_off, verified
from parity.search.reruns import run_changed
from parity.trace.calls import is_in_place
from parity.trace.trace import Call, Edit, Trace, Value, detached, edit, ordinal, parameters_around, unnumbered

# Paths through which a port's gradients do not flow back: in the residual stream, or wherever values fork or join.
#
# Outputs are then right. Parameters before that place get wrong gradients, and parameters after it get right ones.


_LITTLE = 0.3  # the right path leaves at most this share of a gradient's error, or what rounding costs
_MOST_TRIED = 64  # paths that are tried, the nearest to what fails first


@dataclass(frozen=True)
class _Path:
    """A path that is detached: the end of a message after ``lacks what comes back through``, its edits, and its place.

    The place is the number of calls before it; it is 0 if paths are not ordered by place.
    """

    described: str
    edits: tuple[Edit, ...]
    after: int


def detached_path_findings(
    failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget
) -> Iterator[Finding]:
    """Yield a finding on the path through which nothing flows back, if that explains every gradient.

    Args:
        failure: a failure whose outputs are right.
        failed: the gradients that failed.
        trace: the reference's trace.
        budget: the search's budget.
    """
    # If a gradient is far off, another one may fail only because there was no second look, which needs all else right.
    failed = [result for result in failed if is_far_off(result)] or failed
    names = {result.name for result in failed if result.kind == "weight gradient"}
    # The detached place comes after each parameter whose gradient is wrong; the nearest such place is the likeliest.
    last = max((_first_use(trace, name) for name in names), default=-1)
    together, single = _paths(trace)
    behind = _nearest(single, last)
    right = {result.name for result in failure.results if result.kind == "weight gradient" and result.passed}
    others = _forks_and_joins(trace, names, right)
    passes, wanted = Passes(failure.prepared), {result.key for result in failed}
    for path in [*[*together, *behind][:_MOST_TRIED], *others[:_MOST_TRIED]]:
        if budget.spent():
            return
        hypothesis = Hypothesis("gradient-path-missing", path.described, "", path.edits)
        if _may_explain(failure, failed, passes.under((hypothesis,), wanted=wanted)) and _explains(failure, hypothesis):
            yield repairable(
                "gradient-path-missing",
                f"gradients lack what flows back through {path.described}; without it in the reference, too, all agree",
                "look there for detach, no_grad, or a tensor that is created anew",
            )
            return


def _may_explain(failure: Failure, failed: Sequence[TensorResult], golden: Tensors | None) -> bool:
    """Return whether little error is left in what failed, or no more than rounding costs."""
    if golden is None or all(torch.equal(golden[result.key], failure.golden[result.key]) for result in failed):
        return False  # nothing flows back through it in the reference, either

    def little_is_left(key: tuple[Kind, str]) -> bool:
        candidate = failure.candidate[key].double()
        return norm_of(candidate - golden[key]) <= _LITTLE * norm_of(candidate - failure.golden[key])

    return all(little_is_left(result.key) or agrees(failure, result, golden) for result in failed)


def _explains(failure: Failure, one: Hypothesis) -> bool:
    """Return whether every tensor is right without the path, up to the larger rounding error with and without it."""
    if explains(failure, tensors_with(failure.prepared, (one,))):
        return True
    explanation = verified(failure, (one,))
    return explanation is not None and explanation.complete


def _first_use(trace: Trace, name: str) -> int:
    """Return the number of the first call that reads a parameter; -1 for none."""
    numbers = {number for number, known in trace.parameters.items() if known == name}
    uses = (i for i, call in enumerate(trace.calls) if any(value.number in numbers for value in call.inputs))
    return next(uses, -1)


def _paths(trace: Trace) -> tuple[list[_Path], list[_Path]]:
    """Return the paths of several residual connections at once, then those of each."""
    found = residuals(trace)
    order = {call.site: i for i, call in enumerate(trace.calls)}
    by_number = [[one for one in found if one.number == number] for number in sorted({one.number for one in found})]
    groups = {"all residual sums": found} if len(by_number) > 1 else {}
    groups |= {f"each layer's {ordinal(some[0].number)} sum": some for some in by_number}
    kinds = {"the stream of": _skip, "the branch of": _branch, "what the branch is made from, of": _branch_input}
    together = [
        _Path(f"{what} {where}", edits, max(order[one.site] for one in edits))
        for where, some in groups.items()
        for what, of_one in kinds.items()
        if len(some) > 1 and (edits := tuple(one for residual in some for one in of_one(trace, residual)))
    ]
    single = [
        _Path(f"{what} the {ordinal(one.number)} sum in {one.call.module}", edits, order[one.call.site])
        for one in found
        for what, of_one in {**kinds, "stream and branch of": _both}.items()
        if (edits := of_one(trace, one))
    ]
    return together, single


def _nearest(paths: Iterable[_Path], last: int) -> list[_Path]:
    """Return the paths after the call of this number, the nearest first."""
    return sorted((path for path in paths if path.after > last), key=lambda path: path.after)


def _forks_and_joins(trace: Trace, wrong: Set[str], right: Set[str]) -> list[_Path]:
    """Return the paths that begin where a value is read by several calls, or end where a call joins activations.

    A value of several readers is detached for all of them or for one. Calls that differ only in their layer's number
    are tried together, then each alone. Along a path without forks and joins, it makes no difference where it is
    detached. A detached value must depend on each parameter whose gradient is wrong. The likeliest path depends on the
    fewest parameters whose gradients are right, and comes first.

    Args:
        trace: the reference's trace.
        wrong, right: the names of parameters with such gradients.
    """
    made_from = {call.site: before for call, (before, _) in zip(trace.calls, parameters_around(trace), strict=True)}
    alike: dict[Hashable, list[tuple[str, tuple[Edit, ...], Set[str]]]] = defaultdict(list)

    def note(what: str, call: Call, value: Value, users: Sequence[Call], *place: Hashable) -> None:
        where = unnumbered(call.site[0]), *call.site[1:], *place
        edits = tuple(detached(user, value) for user in users)
        maker = trace.producer(value)
        parameters = made_from[maker.site] if maker is not None else set()
        alike[where].append((f"{what}the {call.described}", edits, parameters))

    for call in trace.calls:
        activations = (x for x in call.inputs if trace.parameter(x) is None and trace.tensor(x).is_floating_point())
        given = {} if is_in_place(call) else {value.number: value for value in activations}
        for position, value in enumerate(given.values()):
            if len({user.site for user in trace.users(value)}) > 1 or len(given) > 1:
                operand = f"the {ordinal(position + 1)} operand of " if len(given) > 1 else ""
                note(operand, call, value, [call], "operand", position)
        for position, value in enumerate(call.outputs):
            users = [user for user in trace.users(value) if not is_in_place(user)]
            if len(users) > 1 and trace.tensor(value).is_floating_point():
                result = f"the {ordinal(position + 1)} result of " if len(call.outputs) > 1 else "the result of "
                note(result, call, value, users, position)
    found: list[tuple[int, _Path]] = []
    for some in alike.values():
        for several in [some, *([one] for one in some if len(some) > 1)]:
            behind = set().union(*(parameters for _, _, parameters in several))
            if wrong <= behind:
                edits = tuple(chain.from_iterable(edits for _, edits, _ in several))
                described = f"{several[0][0]}{more_like_it(len(several))}"
                found.append((len(behind & right), _Path(described, edits, 0)))
    return [path for _, path in sorted(found, key=lambda one: one[0])]


def _skip(trace: Trace, one: Residual) -> tuple[Edit, ...]:
    return (edit(one.call, (one.stream, one.branch), lambda was, x, y: (x.detach() + y).to(was.dtype)),)


def _branch(trace: Trace, one: Residual) -> tuple[Edit, ...]:
    return (edit(one.call, (one.stream, one.branch), lambda was, x, y: (x + y.detach()).to(was.dtype)),)


def _branch_input(trace: Trace, one: Residual) -> tuple[Edit, ...]:
    """Return the edits that detach the norm's result or, if there is no norm, what other calls read of the stream."""
    if one.norm is not None:
        return (edit(one.norm.call, (), _without_gradient),)
    calls = [call for call in trace.users(one.stream) if call.site != one.call.site]
    return tuple(detached(call, one.stream) for call in calls if not is_in_place(call))


def _both(trace: Trace, one: Residual) -> tuple[Edit, ...]:
    """Return the edits that detach everything that a layer, or its second part, is given."""
    made = trace.producer(one.stream)
    return (edit(made, (), _without_gradient),) if made is not None and made.outputs == [one.stream] else ()


def _without_gradient(was: Tensor) -> Tensor:
    return was.detach()


# Embeddings whose padding row gets no gradient (``nn.Embedding(padding_idx=...)``) on only one side.


_MOST_OF_IT = 0.9  # the share of the square of a gradient's error that lies in the row


def padding_row_findings(
    failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget
) -> Iterator[Finding]:
    """Yield a finding on a table's row that gets a gradient from lookups only in the port, or only in the reference."""
    wrong = {result.name for result in failed if result.kind == "weight gradient"}
    for call in trace.calls:
        given = _arguments(call)
        name = trace.parameter(given["weight"]) if given else None
        if name not in wrong or budget.spent():
            continue
        row = given["padding_idx"]
        is_left_out = row is not None
        if row is None:
            row = _row_that_differs(failure, name)
        if row is None:
            continue
        hypothesis = _looked_up(call, given, None if is_left_out else row, failure)
        explanation = verified(failure, (hypothesis,))
        if explanation is not None and explanation.complete:
            row %= len(trace.tensor(given["weight"]))
            told = (
                f"give the embedding of {name} padding_idx={row}, as the reference has it: the port's row {row} gets a "
                "gradient where it is looked up"
                if is_left_out
                else f"leave out padding_idx={row} of the embedding of {name}, as the reference does: the port's row "
                f"{row} gets no gradient where it is looked up"
            )
            yield finding("padding-row", f"every gradient agrees if you {told}", repair=told)
            return


def _arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of ``F.embedding`` by name; empty for another call."""
    if call.name != "embedding" or call.function is not F.embedding:
        return {}
    bound = inspect.signature(F.embedding).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return bound.arguments if isinstance(bound.arguments["input"], Value) else {}


def _looked_up(call: Call, given: dict[str, Any], padding_idx: int | None, failure: Failure) -> Hypothesis:
    def compute(was: Tensor, index: Tensor, table: Tensor) -> Tensor:
        return F.embedding(index, table, padding_idx, scale_grad_by_freq=given["scale_grad_by_freq"])

    changed = edit(call, (given["input"], given["weight"]), compute)
    return Hypothesis("padding-row", "padding row", "", (changed,))


def _row_that_differs(failure: Failure, name: str) -> int | None:
    """Return the one row that has nearly all of the gradient's error, if there is one."""
    key = "weight gradient", name
    error = failure.candidate[key].double() - failure.golden[key]  # type: ignore[index]
    by_row = error.square().flatten(1).sum(1)
    row = int(by_row.argmax())
    return row if by_row[row] > _MOST_OF_IT * by_row.sum() else None


# Gradients that are wrong although the outputs are right.


_CLEARLY = 0.5  # another rounding must bring the error below this share
# A factor of some gradients must be at least this far from 1: subtle mistakes leave smaller ones, in single tensors.
_SCALED = 0.01


def gradient_findings(failure: Failure, trace: Trace, budget: Budget) -> list[Finding]:
    """Return the findings that explain the gradients of a comparison whose outputs passed; empty if there are none."""
    failed = [result for result in failure.results if not result.passed and result.finite]
    for explain in (
        _scaled,
        _one_path_missing,
        padding_row_findings,
        detached_path_findings,
        _one_microbatch,
        _rounded_sums,
    ):
        if not budget.spent() and (found := list(explain(failure, failed, trace, budget))):
            return found
    return []


def partly_scaled_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if some failed gradients are the right ones times one factor, which spoils those before them.

    Other mistakes may look like it, so it is only for failures that nothing else explains. Outputs are right.
    """
    failed = [result for result in failure.results if not result.passed and result.finite]
    alike = [result for result in failed if factor_of(failure, result)]
    factor = shared_factor(failure, alike)
    if factor is None or len(alike) < 2 or abs(factor - 1.0) < _SCALED:
        return
    where = commonpath([result.name.replace(".", "/") for result in alike]).replace("/", ".")
    repair = f"look for what scales the gradient behind {where or 'these'}, or that of a branch"
    yield finding(
        "gradient-scale",
        f"{len(alike)} of {len(failed)} wrong gradients, {alike[0].label} among them, are {readable(factor)} times "
        f"what they should be, and otherwise right; this would make the gradients before them wrong as well; {repair}",
        sure=False,  # whether it explains the others is not known
        repair=repair,
    )


def _scaled(failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget) -> Iterator[Finding]:
    """Yield a finding if every failed gradient is the right one times one factor."""
    factor = shared_factor(failure, failed)
    if factor is None:
        return
    if factor == 0.0 and len(failed) > 1 and (paths := list(detached_path_findings(failure, failed, trace, budget))):
        yield from paths
        return
    gradients = [result for result in failure.results if result.kind != "output"]
    if len(failed) < len(gradients) and abs(factor - 1.0) < _SCALED:
        return
    which = "every gradient" if len(failed) == len(gradients) else ", ".join(result.label for result in failed)
    are = "are" if 1 < len(failed) < len(gradients) else "is"
    if factor == 0.0:
        repair = "look for detach, no_grad, or a tensor that is created anew; nothing flows back there"
        yield repairable("gradient-scale", f"{which} {are} 0", repair)
        return
    repair = f"divide by {readable(factor)}, which may be a loss scale or a number of tokens or ranks"
    if len(failed) < len(gradients):  # a loss scale would multiply all of them
        repair = (
            "look for what scales or reduces these gradients by themselves, such as a hook, or a bias or weight that "
            "is used once too often, and for a branch whose part of the outputs is too small to show there"
        )
    doubt = doubt_about(factor)
    what = "they" if are == "are" else "it"
    told = f"{which} {are} {readable(factor)} times what {what} should be, and otherwise right; {repair}{doubt}"
    yield finding("gradient-scale", told, sure=not doubt, repair=repair)


def _one_path_missing(
    failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget
) -> Iterator[Finding]:
    """Yield a finding if a parameter that is used more than once gets the gradient of only some of its uses."""
    names = {result.name for result in failed if result.kind == "weight gradient"}
    for number, name in trace.parameters.items():
        uses = [call for call in trace.calls if number in {value.number for value in call.inputs}]
        if name not in names or len(uses) < 2:
            continue
        for call in uses:
            value = next(value for value in call.inputs if value.number == number)
            title = "embeddings-not-tied" if any(use.name == "embedding" for use in uses) else "gradient-path-missing"
            hypothesis = Hypothesis(title, title, "", (detached(call, value),))
            if explains(failure, tensors_with(failure.prepared, (hypothesis,))):
                lacks = f"the gradient of {name} lacks what comes through {call.name} in {call.module}"
                if len({use.site[::2] for use in uses}) == 1 and _adds_to_main_grad(failure):
                    yield repairable(
                        "gradient-accumulation",
                        f"{lacks} at one of its {len(uses)} calls; once the reference's lacks it as well, "
                        "the two agree",
                        "keep main_grad, to which TE adds (fuse_wgrad_accumulation), between the calls, and leave "
                        "overwrite_main_grad off",
                    )
                    return
                yield repairable(
                    title,
                    f"{lacks}; once the reference's lacks it as well, the two agree",
                    "use the same parameter there, and not a copy or a detached view",
                )
                return


def _adds_to_main_grad(failure: Failure) -> bool:
    """Return whether TE's modules write gradients to buffers, where a later call may overwrite an earlier one's."""
    found: list[str] = []

    def look(module: nn.Module) -> tuple[str, ...]:
        found.extend(name for name, one in module.named_modules() if getattr(one, "fuse_wgrad_accumulation", False))
        return ()

    run_changed(failure, look)
    return bool(found)


def _one_microbatch(
    failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget
) -> Iterator[Finding]:
    """Yield a finding if weight gradients are those of one part of the batch instead of the whole."""
    if not failed or any(result.kind != "weight gradient" for result in failed):
        return
    for parts in _divisors(failure.prepared):
        for which, part in (("last", parts - 1), ("first", 0)):
            if budget.spent():
                return
            gradients = tensors_with(failure.prepared, (), cotangents=_of_part(failure.prepared, parts, part))
            if gradients is not None and all(agrees(failure, result, gradients) for result in failed):
                labels = ", ".join(result.label for result in failed)
                yield repairable(
                    "gradient-accumulation",
                    f"{labels} is only the gradient of the {which} of {parts} microbatches",
                    "add those of the others (see is_first_microbatch, fuse_wgrad_accumulation and zero_grad)",
                )
                return


def _rounded_sums(failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget) -> Iterator[Finding]:
    """Yield a finding if the sum of weight gradients over microbatches is rounded each time."""
    if not failed or any(result.kind != "weight gradient" for result in failed):
        return
    # A GEMM adds to main_grad in FP32; only TF32 rounds what is added.
    precision = failure.precision if failure.precision.dtype is torch.float32 else None
    best: tuple[float, int, torch.dtype, bool] = (_CLEARLY, 0, torch.bfloat16, False)
    for parts in _divisors(failure.prepared)[::-1]:
        of_parts: list[Tensors] = []
        for part in range(parts):
            if budget.spent():
                return
            cotangents = _of_part(failure.prepared, parts, part)
            ran = tensors_with(failure.prepared, (), precision, cotangents)
            of_parts += [ran] if ran is not None else []
        orders = (of_parts, of_parts[::-1])  # autograd adds up the parts of one graph from the last
        for dtype, ordered in product((torch.bfloat16, torch.float16), orders):
            sums = {result.key: _summed(ordered, result, dtype) for result in failed}
            left = max(_share_left(failure, result, sums[result.key]) for result in failed)
            is_all = all(agrees(failure, result, sums) for result in failed)
            best = min(best, (left, parts, dtype, is_all), key=lambda entry: entry[0])
        if best[0] < _CLEARLY / 4:
            break
    left, parts, dtype, is_all = best
    if parts:
        labels = ", ".join(result.label for result in failed)
        repair = "accumulate in FP32 (main_grad)"
        yield finding(
            "gradient-accumulation",
            f"{labels} is near to what a sum over {parts} microbatches gives if it is rounded to {str(dtype)[6:]} each "
            f"time; that leaves {left:.0%} of the error; {repair}",
            sure=is_all,
            repair=repair,
        )


def _divisors(prepared: Prepared) -> list[int]:
    """Return the numbers of equal parts into which the batch can be cut."""
    counts = {x.shape[0] if x.dim() > 1 else 1 for x in prepared.cotangents.values()}
    rows = counts.pop() if len(counts) == 1 else 1
    return [parts for parts in range(2, min(rows, 64) + 1) if rows % parts == 0]


def _of_part(prepared: Prepared, parts: int, part: int) -> dict[str, Tensor]:
    """Return output gradients that are zero except for one part of the batch."""

    def masked(x: Tensor) -> Tensor:
        rows = x.shape[0] // parts
        kept = torch.zeros_like(x)
        kept[part * rows : (part + 1) * rows] = x[part * rows : (part + 1) * rows]
        return kept

    return {name: masked(x) for name, x in prepared.cotangents.items()}


def _summed(of_parts: Sequence[Tensors], result: TensorResult, dtype: torch.dtype) -> Tensor:
    total = torch.zeros_like(of_parts[0][result.key])
    for part in of_parts:
        total = (total + part[result.key]).float().to(dtype).double()
    return total


def _share_left(failure: Failure, result: TensorResult, other: Tensor) -> float:
    candidate = failure.candidate[result.key].double()
    before = torch.linalg.vector_norm(candidate - failure.golden[result.key])
    return (torch.linalg.vector_norm(candidate - other) / before).item()


# Failures of modules that return a loss. Many mistakes change that one number, so gradients tell more.


_HELPS = 0.5  # a mistake must bring the worst tensor's error down to this share
_VERIFIED = 3  # mistakes that are computed under the rounding model, the best first


def loss_explanations(failure: Failure, trace: Trace, budget: Budget) -> list[Explanation]:
    """Return the mistake with a loss that explains outputs and gradients best, if one explains all of them.

    Args:
        failure: a failure whose candidate's outputs are finite.
        trace: the reference's trace in FP64.
        budget: the search's budget.
    """
    if not few_outputs(failure):
        return []
    ranked: list[tuple[float, Hypothesis]] = []
    for one in _known(trace):
        if budget.spent():
            break
        assumed = tensors_with(failure.prepared, (one,))
        if assumed is not None and (left := _share_left_of_failures(failure, assumed)) < _HELPS:
            ranked.append((left, one))
    ranked.sort(key=lambda entry: entry[0])
    for _, one in ranked[:_VERIFIED]:
        explanation = verified(failure, (one,))
        if explanation is not None and explanation.complete:
            return [explanation]
    return []


def _known(trace: Trace) -> list[Hypothesis]:
    mistakes = (
        *loss_hypotheses(trace),
        *cross_entropy_hypotheses(trace),
        *label_shift_hypotheses(trace),
        *factor_hypotheses(trace),
    )
    return [one for one in mistakes if one.scope == "all"]


def _share_left_of_failures(failure: Failure, assumed: Tensors) -> float:
    """Return the largest share of a failed tensor's error that is left, 0 if it passes; infinite if shapes differ."""
    shares = []
    for result in (one for one in failure.results if not one.passed):
        golden, instead, candidate = (tensors[result.key] for tensors in (failure.golden, assumed, failure.candidate))
        if instead.shape != golden.shape or not result.finite:
            return math.inf
        before, left = norm_of(candidate.double() - golden), norm_of(candidate.double() - instead)
        passes = left <= result.tolerance_relative_l2 * norm_of(instead)
        shares.append(0.0 if passes else left / max(before, TINY))
    return max(shares, default=math.inf)
