"""What a port of the corpus is: a case whose mistake is known, with what parity must say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from parity.case.case import Case
from parity.measuring.hosts.host import SIZES

# Numbers in messages may be estimates. They count as right within this relative difference.
_CLOSE = 0.03
_NUMBER = re.compile(r"(?<![\w.])(-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?)(%?)")
# The errors before and after a repair, which are not constants of the port.
_ERRORS = re.compile(r"falls from \S+ to \S+")


@dataclass(frozen=True)
class Port:
    """A port with one mistake, or a right one, and the finding that names its mistake.

    Attributes:
        name: what is wrong, or written otherwise; unique among the ports of a host.
        host: the name of what was ported.
        case: the port and its reference.
        right: the host's right port; ``case`` itself if nothing was changed.
        titles: titles of findings that name the mistake: the first is the best, the others say the same in other
            words. Empty if the port is right and must pass.
        phrase: words that the message must contain; with a full stop, words that must end it.
        number: the port's number, which the message must tell up to a few per cent; None if the title is enough.
        place: a regular expression that the message must match, if only part of a tensor or model is wrong.
        change: what was changed in the right port, in the terms of its host.
        summary: the mistake in a sentence.
        precisions: the precisions at which it shows; None for all that the host runs at.
        others: whether there may be other findings beside the first.
    """

    name: str
    host: str
    case: Case
    right: Case
    titles: tuple[str, ...] = ()
    phrase: str = ""
    number: float | None = None
    place: str = ""
    change: Any = None
    summary: str = ""
    precisions: tuple[str, ...] | None = None
    others: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Its name and its host's, which no other port has."""
        return self.name, self.host

    def occurs_at(self, precision: str) -> bool:
        """Return whether the host runs at a precision and the mistake shows there."""
        return self.right.runs_at(precision) and (self.precisions is None or precision in self.precisions)

    def is_named_by(self, title: str, message: str) -> bool:
        """Return whether a finding names the mistake: by its title, words, number and place."""
        return (
            title in self.titles
            and self.phrase in f"{message}."
            and self.tells_number(message)
            and bool(re.search(self.place, message, re.IGNORECASE))
        )

    def tells_number(self, message: str) -> bool:
        """Return whether a message contains the port's number, up to a few per cent."""
        if self.number is None:
            return True
        found = _NUMBER.findall(_ERRORS.sub("", message))
        told = (float(number.replace(",", "")) / (100.0 if percent else 1.0) for number, percent in found)
        return any(abs(value - self.number) <= _CLOSE * abs(self.number) for value in told)


def at_size(case: Case, size: str) -> Case:
    """Return a case with only this size, ``small`` or ``large``; one that has a single size is small."""
    return replace(case, sizes=(case.sizes[SIZES.index(size)],))
