"""Finds the pair whose weight map is to be suggested, and prints the suggestion."""

from __future__ import annotations

from parity import registry
from parity.case import Case, Size
from parity.plugin.options import parse_backend
from parity.suggest import suggest_map
from parity.suggest.text import explain, python
from parity.user_error import UserError


def suggest(target: str, size: int, seed: int, backend: str, keep: bool, max_runs: int) -> bool:
    """Print a map for one pair; whether it fits and nothing is left open.

    Args:
        target: ``my_pairs.py::my_mlp``, or the file alone where it declares one pair.
        size: which of the case's sizes, from 0.
        seed: of weights and inputs.
        backend: ``auto``, ``gpu`` or ``cpu``.
        keep: whether the entries that the pair has stay.
        max_runs: how many alternatives are run at most.

    Raises:
        UserError: if there is no such pair or size, the backend cannot be had, or the pair cannot be built.
    """
    case = _case(target)
    chosen = _size(case, size)
    suggestion = suggest_map(case, chosen, seed, parse_backend(backend), keep, max_runs)
    at = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
    print(f"{case}{f' at {at}' if at else ''}\n")
    for hint in suggestion.hints:
        print(f"{hint}\n")
    print(f"{python(suggestion.weights)}\n")
    print(explain(suggestion))
    return suggestion.settled


def _case(target: str) -> Case:
    cases = registry.load(target)
    if len(cases) > 1:
        ids = ", ".join(f"{target}::{case.name}" for case in cases)
        raise UserError(f"{target} declares {len(cases)} pairs; name one of {ids}")
    return cases[0]


def _size(case: Case, index: int) -> Size:
    if not 0 <= index < len(case.sizes):
        raise UserError(f"--size is {index}, but {case} has {len(case.sizes)}, counted from 0")
    return case.sizes[index]
