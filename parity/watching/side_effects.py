"""Inputs that one of the two modules writes to and the other leaves as they were: outputs alone do not show it."""

from __future__ import annotations

from collections.abc import Sequence


def by_candidate_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """Why a candidate whose numbers are right is none in the reference's place; empty where it is.

    Args:
        reference: names of the inputs that the reference changes in place.
        candidate: of those that the candidate changes.
    """
    changed = _only(candidate, reference)
    return changed and (
        f"the candidate changes {changed} in place, which the reference leaves as it was: whatever reads it "
        "afterwards, such as a residual, gets other numbers; let the candidate compute on a copy"
    )


def by_reference_alone(reference: Sequence[str], candidate: Sequence[str]) -> str:
    """What to know of a reference that does; empty where there is nothing. Arguments as above."""
    changed = _only(reference, candidate)
    return changed and (
        f"the reference changes {changed} in place, which the candidate leaves as it was; no later reader of it was "
        "compared"
    )


def _only(names: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(name for name in names if name not in others)
