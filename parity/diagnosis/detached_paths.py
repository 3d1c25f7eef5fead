"""Paths through which a port's gradients do not flow back: of the residual stream, or wherever values fork or join.

Outputs are right then. Of the parameters those before the place get other gradients, those after it the right ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.diagnosis.agreement import explains
from parity.diagnosis.blocks.residuals import Residual, residuals
from parity.diagnosis.budget import Budget
from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.diagnosis.functions.operations import ordinal
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.trial import tensors_under
from parity.diagnosis.verify import verified
from parity.result import Finding, TensorResult
from parity.watching.trace import Edit, Trace, Value, detached, edit

_NEARLY_NOTHING = 0.1  # of a gradient's error, which a path may leave
_MOST_TRIED = 24  # the nearest to what fails first


@dataclass(frozen=True)
class _Path:
    """What is detached: as the end of ``lacks what comes back through``, the edits, and after how many calls."""

    described: str
    edits: tuple[Edit, ...]
    after: int


def detached_path_findings(
    failure: Failure, failed: Sequence[TensorResult], trace: Trace, budget: Budget
) -> Iterator[Finding]:
    """The path through which nothing flows back, if that explains every gradient.

    Args:
        failure: the outputs are right.
        failed: gradients.
        trace: of the reference.
        budget: of the search.
    """
    names = {result.name for result in failed if result.kind == "weight gradient"}
    # What is detached comes after each parameter whose gradient is wrong: the nearest such place is the likeliest.
    last = max((_first_use(trace, name) for name in names), default=-1)
    together, single = _paths(trace)
    behind = _nearest(single, last)
    others = _nearest(_forks_and_joins(trace), last)
    for path in [*[*together, *behind][:_MOST_TRIED], *others[:_MOST_TRIED]]:
        if budget.spent():
            return
        hypothesis = Hypothesis("gradient-path-missing", path.described, "", failure.prepared.reference, path.edits)
        if _explains(failure, failed, hypothesis):
            yield finding(
                "gradient-path-missing",
                f"gradients lack what comes back through {path.described}; without that they all agree. Look there "
                "for detach, no_grad, or what is made a new tensor",
            )
            return


def _explains(failure: Failure, failed: Sequence[TensorResult], one: Hypothesis) -> bool:
    """Whether every tensor is right without the path, to what rounding costs with it or, as more is lost, without."""
    golden = tensors_under(failure.prepared, (one,))
    if golden is None or all(torch.equal(golden[key], right) for key, right in failure.golden.items()):
        return False  # nothing comes back through it in the reference either
    if explains(failure, golden):
        return True
    for key in ((result.kind, result.name) for result in failed):
        candidate = failure.candidate[key].double()
        left, before = (torch.linalg.vector_norm(candidate - right[key]) for right in (golden, failure.golden))
        if left > _NEARLY_NOTHING * before:
            return False
    explanation = verified(failure, (one,))
    return explanation is not None and explanation.complete


def _first_use(trace: Trace, name: str) -> int:
    """The number of the first call that reads a parameter; -1 for none."""
    numbers = {number for number, known in trace.parameters.items() if known == name}
    uses = (i for i, call in enumerate(trace.calls) if any(value.number in numbers for value in call.inputs))
    return next(uses, -1)


def _paths(trace: Trace) -> tuple[list[_Path], list[_Path]]:
    """Those of several residual connections at once, and those of one each."""
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
    """Those after the call of this number, the nearest first."""
    return sorted((path for path in paths if path.after > last), key=lambda path: path.after)


def _forks_and_joins(trace: Trace) -> Iterator[_Path]:
    """What a call is given that others are given too, or beside which it is given other activations.

    Along a path without either it is all one where something is detached.
    """
    for after, call in enumerate(trace.calls):
        given = {value.number: value for value in call.inputs if _is_activation(trace, value)}
        if call.function.__name__.endswith("_"):  # in place: it cannot be called again
            continue
        for position, value in enumerate(given.values()):
            forks = len({user.site for user in trace.users(value)}) > 1
            if forks or len(given) > 1:
                operand = f"the {ordinal(position + 1)} operand of " if len(given) > 1 else ""
                which = f"{operand}the {ordinal(call.site[3] + 1)} {call.name!r} of {call.module}"
                yield _Path(which, (detached(call, value),), after)


def _is_activation(trace: Trace, value: Value) -> bool:
    return trace.parameter(value) is None and trace.tensor(value).is_floating_point()


def _skip(trace: Trace, one: Residual) -> tuple[Edit, ...]:
    return (edit(one.call, (one.stream, one.branch), lambda was, x, y: (x.detach() + y).to(was.dtype)),)


def _branch(trace: Trace, one: Residual) -> tuple[Edit, ...]:
    return (edit(one.call, (one.stream, one.branch), lambda was, x, y: (x + y.detach()).to(was.dtype)),)


def _branch_input(trace: Trace, one: Residual) -> tuple[Edit, ...]:
    """The norm's result or, where there is none, what else reads the stream."""
    if one.norm is not None:
        return (edit(one.norm.call, (), _without_gradient),)
    calls = [call for call in trace.users(one.stream) if call.site != one.call.site]
    return tuple(detached(call, one.stream) for call in calls if not call.function.__name__.endswith("_"))


def _both(trace: Trace, one: Residual) -> tuple[Edit, ...]:
    """All that a layer, or its second part, is given."""
    made = trace.producer(one.stream)
    return (edit(made, (), _without_gradient),) if made is not None and made.outputs == [one.stream] else ()


def _without_gradient(was: Tensor) -> Tensor:
    return was.detach()
