"""Tables of the studies' reports, and the one that every report has: what its sources claim, and what was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from parity import te
from parity.report import environment
from parity.report.numbers import markdown_table
from parity.te import Kernels


@dataclass(frozen=True)
class Claim:
    """A source's claim next to what a study found.

    Attributes:
        source: where it is claimed.
        claimed: the claim, with the source's figure.
        found: this study's figures.
        agrees: yes, no, or in which case, as a person reads it.
        why: what the agreement depends on.
    """

    source: str
    claimed: str
    found: str
    agrees: str
    why: str


def verdict(holds: Sequence[bool]) -> str:
    """What a claim that was tested in several ways says of agreement: yes, no, or partly."""
    if all(holds):
        return "yes"
    return "partly" if any(holds) else "no"


def numbers(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """A markdown table aligned to the right."""
    return markdown_table(rows, headers, left=0)


def texts(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """A markdown table aligned to the left."""
    return markdown_table(rows, headers, left=len(headers))


def claims(found: Iterable[Claim]) -> str:
    """The table of claims."""
    rows = [[claim.source, claim.claimed, claim.found, claim.agrees, claim.why] for claim in found]
    return texts(rows, ["source", "its claim", "ours", "agree", "why"])


def made_on(kernels: Kernels) -> str:
    """A sentence that says on what TE's figures were made."""
    device = environment.gpu_name() if kernels.backend == "gpu" else "the CPU"
    return (
        f"TE's kernels here are {environment.KERNELS[kernels.backend]}. Everything ran on {device}, with "
        f"TransformerEngine {te.version()} and torch {torch.__version__}."
    )
