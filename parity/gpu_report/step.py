"""A step of the report, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# ``failed``: it ran to its end and found something wrong; ``broken``: it did not run to its end.
Status = Literal["done", "failed", "broken", "out of time"]


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of its log, and what ``--only`` calls it.
        question: what it answers.
        command: arguments of Python.
        share: of the time, relative to the other steps.
        files: that it leaves in the folder.
        verdict: what it came to in one sentence, from the folder; may raise where it left nothing.
        caveat: what keeps it from being the whole step, such as that there is no GPU; or empty.
    """

    name: str
    question: str
    command: tuple[str, ...]
    share: float
    files: tuple[str, ...]
    verdict: Callable[[Path], str]
    caveat: str = ""

    @property
    def log(self) -> str:
        """Its output, relative to the folder."""
        return f"logs/{self.name}.txt"


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        step: its name.
        status: see ``Status``.
        seconds: that it took.
        limit: seconds that it had.
        exit_code: of its process; None where it was ended.
        verdict: what it came to, or why that is not known.
    """

    step: str
    status: Status
    seconds: float
    limit: float
    exit_code: int | None
    verdict: str
