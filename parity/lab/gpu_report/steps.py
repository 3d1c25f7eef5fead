"""The steps of the report: what each asks, how it is run for a limited time, and what it came to.

What a reader wants first comes first, in case the time does not suffice.
"""

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

from parity.case import files as built_in
from parity.lab.gpu_report import facts, limits
from parity.lab.kernel_table import table
from parity.lab.throughput.record import read
from parity.machine import host
from parity.machine.process import ended_with_this
from parity.report import markdown, record
from parity.report.markdown import digest
from parity.report.numbers import short
from parity.te.precision import PRECISIONS

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
    """Hold what became of a step.

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
    """Say how a process ended.

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
        with ended_with_this(process):
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
    """Let the child hear Ctrl-C: what a shell runs in the background is deaf to it, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the process and its children, which are a group since it leads a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


# What each step came to, in one sentence, read from the files that it left.


def doctor(folder: Path) -> str:
    """Return which precisions run on real kernels, from the table that ``parity doctor`` prints."""
    lines = (folder / "logs" / "doctor.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    answers = [words for words in map(str.split, lines) if len(words) > 1 and words[0] in PRECISIONS]
    if not answers:
        return "see its log"
    has_gpu = any("this GPU" in line for line in lines)
    real = [name for name, answer, *_ in answers if has_gpu and answer.startswith("yes")]
    return f"on real kernels: {', '.join(real) or 'nothing'}"


def suite(folder: Path) -> str:
    """Return the report's own verdict; draws the report if the run was ended before it could."""
    file = folder / "suite.jsonl"
    run = digest(record.read(file))
    report = file.with_suffix(".md")
    if not report.exists():
        report.write_text(markdown.draw(run, file.stem), encoding="utf-8")
    return markdown.verdict(run)


def on_limits(folder: Path) -> str:
    """Return how many statistics lie beyond the packaged limits."""
    return limits.verdict(limits.read(folder / "suite.jsonl"))


def kernel_facts(folder: Path) -> str:
    """Return how operands are read, and how many bits FP8's sums keep."""
    return facts.verdict(facts.read(folder / "facts.jsonl"))


def kernels(folder: Path) -> str:
    """Return how much of the table is equal to the bit, and where it is not."""
    return table.verdict(table.read_lines(folder / "kernel-table.jsonl"))


def throughput(folder: Path) -> str:
    """Return how many rows were measured, and the fastest."""
    found = read(folder / "throughput.jsonl")
    measured = [row for row in found.rows if row.times is not None]
    shares = [(share, row) for row in measured if (share := found.peak_share(row)) is not None]
    best = max(shares, key=lambda pair: pair[0], default=None)
    told = ""
    if best is not None:
        told = f"; the best share of a peak is {100 * best[0]:.0f} %, {best[1].name} `{best[1].workload}`"
    slow = sum(row.after is not None and bool(row.after.throttles) for row in measured)
    throttled = f"; {slow} were throttled" if slow else ""
    return f"{len(measured)} of {len(found.rows)} rows measured{told}{throttled}"


def calibration(folder: Path) -> str:
    """Return how the limits that this machine's kernels would set compare with the packaged ones."""
    widest, key = limits.widest(folder / "calibration.json")
    return f"limits measured here are at most {short(widest)} times the packaged ones ({', '.join(key)})"


# The steps, in their order.


NO_GPU = "no GPU here: emulated kernels, and a small part, to try the step"
_SMALL = "a small part"


def steps(folder: Path, on_gpu: bool, quick: bool, minutes: float) -> list[Step]:
    """Return all steps.

    Args:
        folder: of the report.
        on_gpu: whether TE's real kernels run here; if not, every step is tried on emulated ones.
        quick: whether a small part is enough.
        minutes: for all of them.
    """
    small = quick or not on_gpu
    caveat = NO_GPU if not on_gpu else _SMALL if quick else ""
    backend = ("--backend", "gpu" if on_gpu else "cpu")
    return [
        Step("doctor", "What can this machine run?", _parity("doctor"), 1.2, (), doctor),
        Step(
            "facts",
            "How do its kernels read operands and add products?",
            ("-m", facts.__name__, backend[1], str(folder / "facts.md"), "small" if small else "all"),
            1.0,
            ("facts.md", "facts.jsonl"),
            kernel_facts,
            caveat,
        ),
        Step(
            "suite",
            "Is TE right, on its real kernels, at every precision of this GPU?",
            _parity("run", *backend, "--report", folder, "--name", "suite", *(_SMALL_SUITE if small else _SUITE)),
            2.4,
            ("suite.md", "suite.jsonl"),
            suite,
            caveat,
        ),
        Step(
            "limits",
            "Do its errors lie within the packaged limits, and where in them?",
            ("-m", limits.__name__, str(folder / "suite.jsonl"), str(folder / "limits.md")),
            0.4,
            ("limits.md",),
            on_limits,
            caveat,
        ),
        Step(
            "kernels",
            "How far are the CPU kernels from the real ones, kernel by kernel?",
            _parity("kernels", "--report", folder / "kernel-table.md", *_kernels(on_gpu, small, minutes)),
            2.0,
            ("kernel-table.md", "kernel-table.jsonl"),
            kernels,
            caveat if on_gpu else "no GPU here: CPU kernels against CPU kernels in another process, to try the step",
        ),
        Step(
            "throughput",
            "What does each precision buy, and what does it cost?",
            _parity("throughput", *backend, "--out", folder, *_throughput(small, minutes)),
            2.3,
            ("throughput.md", "throughput.png", "throughput.jsonl"),
            throughput,
            caveat,
        ),
        Step(
            "calibration",
            "Which limits would these kernels set?",
            _parity("calibrate", *_calibration(folder, small), *backend),
            1.2,
            ("calibration.md", "calibration.png", "calibration.json"),
            calibration,
            caveat or "one seed, TE's modules alone",
        ),
    ]


_SUITE = ("-n", "auto", "--timeout", "60")  # a kernel that hangs costs its item alone, and not the step
_SMALL_SUITE = ("-n", "0", "-k", "rmsnorm or linear_no_bias", "-p", "bf16", "-p", "fp8_current")


def _kernels(on_gpu: bool, small: bool, minutes: float) -> tuple[str, ...]:
    """Return the options of the table, whose time ends before the step's, since it is drawn once its calls are made."""
    part = ("-k", "rmsnorm") if small else ("--minutes", f"{minutes / 5.5:.2f}")
    return (*(() if on_gpu else ("--reference", "cpu")), *part)


def _throughput(small: bool, minutes: float) -> tuple[str, ...]:
    if small:
        return ("-k", "rmsnorm", "--precisions", "bf16", "--sizes", "declared", "--compiled", "none", "--repeats", "2")
    return ("--minutes", f"{minutes / 5:.2f}", "--repeats", "20", "--compiled", "bf16")


def _calibration(folder: Path, small: bool) -> tuple[str, ...]:
    """Return the options; each kind of tensor needs eight different ones, and the small part is the file with most."""
    cases = built_in.folder()
    # Enough processes to keep a GPU busy with small modules; each takes memory of its own there.
    all_cases = (str(cases), "-n", str(min(6, host.cores())))
    files = (str(cases / "mlp.py"), "-p", "bf16", "-n", "1") if small else all_cases
    table = ("-o", str(folder / "calibration.json"), "--report", str(folder / "calibration.md"))
    # No verdict uses the table; how much wider its limits are is what the step is to tell.
    return (*files, "--seeds", "1", "--draws", "0", "--accept-wider", *table)


def _parity(*arguments: object) -> tuple[str, ...]:
    return ("-m", "parity", *map(str, arguments))
