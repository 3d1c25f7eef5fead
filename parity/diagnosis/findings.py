"""From a failed comparison to its findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parity.diagnosis.catalogue import hypotheses, trace_of
from parity.diagnosis.codes import CODES
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.search import MOST_CHECKS, Budget, Explanation, Failure, explanations
from parity.diagnosis.values import non_finite, unreached_parameters
from parity.result import Finding

_CLOSE = 1.5
"""How much worse than the best an explanation may fit and still be told: the two cannot be told apart."""


def findings(failure: Failure, unreached: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Every known cause that explains a failure, the best first; none for a comparison that passed.

    Args:
        failure: the comparison.
        unreached: names of TE parameters that the backward pass did not reach.
    """
    failed = [result for result in failure.results if not result.passed]
    if not failed:
        return ()
    explained = _explained(failure) if all(result.errors.finite for result in failure.outputs) else ()
    return (*non_finite(failed, failure.precision), *explained, *unreached_parameters(unreached))


def _explained(failure: Failure) -> Iterator[Finding]:
    budget = Budget(MOST_CHECKS * failure.seconds)
    trace = trace_of(failure.prepared)
    known = list(hypotheses(failure.prepared, trace))
    del trace
    if all(result.passed for result in failure.outputs):
        return
    best = explanations(failure, known, budget)
    titles = set()
    for explanation in best:
        key = tuple(one.title for one in explanation.hypotheses)
        if key in titles or explanation.after > _CLOSE * best[0].after:
            continue
        titles.add(key)
        yield from _told(explanation, failure)


def _told(explanation: Explanation, failure: Failure) -> Iterator[Finding]:
    count = len(explanation.hypotheses)
    for one in explanation.hypotheses:
        together = "" if count == 1 else f"together with {_others(one, explanation)}, "
        yield Finding(
            CODES[one.title],
            one.title,
            f"{together}the outputs' relative error falls from {explanation.before:.2g} to {explanation.after:.2g}, "
            f"what {failure.precision.name} costs, if you {one.repair}",
        )


def _others(one: Hypothesis, explanation: Explanation) -> str:
    return " and ".join(f"{CODES[x.title]} {x.title}" for x in explanation.hypotheses if x is not one)
