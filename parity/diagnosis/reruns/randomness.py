"""A candidate whose results depend on random numbers, found by running it again with others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.errors import difference, relative_l2
from parity.result import Finding
from parity.watching.random_state import other_numbers

_OF_THE_ERROR = 0.3  # that two passes are apart, from where on random numbers are its cause
_OF_THE_EXPECTED = 1.5  # ditto: two passes that round stochastically are sqrt(2) times as far apart, at most


def random_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if a tensor that failed becomes another when the random numbers are others."""
    if failure.rerun is None:
        return
    with other_numbers(next(iter(failure.golden.values())).device):
        again = failure.rerun(lambda module: None)
    for result in sorted(failure.results, key=lambda result: result.margin, reverse=True):
        key = (result.kind, result.name)
        if result.passed or not result.errors.finite:
            continue
        moved = difference(again[key], failure.candidate[key].double())
        apart = relative_l2(_norm(moved), _norm(failure.golden[key]))
        error = result.errors.relative_l2
        if apart > max(_OF_THE_ERROR * error, _OF_THE_EXPECTED * result.expected.relative_l2):
            yield finding(
                "not-reproducible",
                f"the candidate draws random numbers: with others {result.label} moves by {apart:.2g} of its norm, "
                f"where the error is {error:.2g}. Switch off what draws them, in a module or in forward (functional "
                "dropout, stochastic depth, added noise), or draw them once and give them to both modules as an input",
            )
            return


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
