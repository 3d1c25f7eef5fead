"""What a source claims, next to what a study measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Claim:
    """A claim and its test.

    Attributes:
        claim: in a sentence.
        figure: the source's.
        ours: the study's.
        agrees: ``yes``, ``no`` or ``partly``, found from the figures.
        why: what the claim depends on.
    """

    claim: str
    figure: str
    ours: str
    agrees: str
    why: str


def verdict(holds: Sequence[bool]) -> str:
    """``yes`` if it holds throughout, ``no`` if nowhere, else ``partly``."""
    if all(holds):
        return "yes"
    return "partly" if any(holds) else "no"


def table(claims: Sequence[Claim]) -> str:
    """A markdown table."""
    rows = [[claim.claim, claim.figure, claim.ours, f"**{claim.agrees}**", claim.why] for claim in claims]
    return tabulate(rows, ["claim", "its figure", "ours", "agree", "why"], tablefmt="github", disable_numparse=True)
