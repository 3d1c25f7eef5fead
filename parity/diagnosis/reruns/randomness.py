"""A candidate whose results depend on random numbers, found by running it again with others."""

from __future__ import annotations

from collections.abc import Iterator

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.diagnosis.reruns.hidden_rows import _norm
from parity.errors import difference, relative_l2
from parity.result import Finding
from parity.watching.random_state import other_numbers

_OF_THE_ERROR = 0.3  # that two passes are apart, from where on random numbers are its cause
_OF_A_GRADIENTS = 1.0  # ditto where outputs are right; two passes are sqrt(2) times it apart if random numbers are all
_OF_THE_EXPECTED = 1.5  # ditto: two passes that round stochastically are sqrt(2) times as far apart, at most


def random_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if a tensor that failed becomes another when the random numbers are others.

    Outputs tell, where these failed: gradients that a recipe rounds stochastically are others every time.
    """
    if failure.rerun is None:
        return
    with other_numbers(next(iter(failure.golden.values())).device):
        again = failure.rerun(lambda module: None)
    failed = [result for result in failure.results if not result.passed and result.finite]
    outputs = [result for result in failed if result.kind == "output"]
    telling, share = (outputs, _OF_THE_ERROR) if outputs else (failed, _OF_A_GRADIENTS)
    for result in sorted(telling, key=lambda result: result.margin, reverse=True):
        key = (result.kind, result.name)
        candidate, golden = failure.candidate[key].double(), failure.golden[key]
        moved, error = _norm(difference(again[key], candidate)), _norm(difference(candidate, golden))
        rounding = result.expected.relative_l2 * max(_norm(golden), _norm(candidate))
        if moved > max(share * error, _OF_THE_EXPECTED * rounding):
            apart = relative_l2(moved, _norm(golden))
            yield finding(
                "not-reproducible",
                f"the candidate draws random numbers: with others {result.label} moves by {apart:.2g} of its norm, "
                f"where the error is {result.errors.relative_l2:.2g}. Switch off what draws them, in a module or in "
                "forward (functional dropout, stochastic depth, added noise), or draw them once and give them to both "
                "modules as an input",
            )
            return
