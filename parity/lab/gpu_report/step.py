"""A step of the report: a command that runs for a limited time, and what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# A step of the report, and what became of it.


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


# Runs a command with a limit of time; it and all that it started are ended at the limit.


_GRACE = 8.0  # seconds in which a process that was interrupted may write what it has


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        exit_code: None where the limit ended it.
        seconds: that it ran.
    """

    exit_code: int | None
    seconds: float


def run_limited(arguments: Sequence[str], limit: float, log: Path, grace: float = _GRACE) -> Ended:
    """Run Python with these arguments, its output in the log.

    Args:
        arguments: of Python.
        limit: seconds after which it is interrupted, as by Ctrl-C.
        log: a file, written anew.
        grace: seconds from there until it is killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace)
        finally:
            _signal(process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may not let a process end at once
                process.wait(timeout=grace)
    return Ended(code, time.monotonic() - began)


def _heed_interrupts() -> None:
    """In the child: a shell starts what it runs in the background deaf to Ctrl-C, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the process and its children, which are a group since it leads a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
