"""Show a finding's repair as a change of lines: what to write, and what stands there now."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parity.result import Finding

# A keyword and its value, as in code.
_ARGUMENT = re.compile(
    r"(?<![\w.])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\([^()]*\)|-?\d[\d.]*(?:e[+-]?\d+)?|[A-Za-z_][\w.]*)"
)


@dataclass(frozen=True)
class Repair:
    """Say what to change in the user's code.

    Attributes:
        sentence: in words.
        now: lines of code as they are; there may be none, since a default is not written.
        then: lines of code as they should be; none where the finding names none.
    """

    sentence: str
    now: tuple[str, ...] = ()
    then: tuple[str, ...] = ()

    @property
    def to_copy(self) -> str:
        """Return the lines as they should be, or else the sentence."""
        return "\n".join(self.then) or self.sentence


def repair(finding: Finding) -> Repair:
    """Return a finding's repair, with the lines that the finding has, or else the arguments that its sentence names.

    A sentence is such as ``pass normalization="RMSNorm"; TE subtracts the mean``: first what to write, then what is.
    """
    if finding.then:
        return Repair(finding.repair, finding.now, finding.then)
    to_do, _, known = finding.repair.partition("; ")
    now, then = dict(_ARGUMENT.findall(known)), dict(_ARGUMENT.findall(to_do))
    return Repair(
        finding.repair,
        tuple(f"{name}={value}" for name, value in now.items() if name in then),
        tuple(f"{name}={value}" for name, value in then.items()),
    )
