"""``parity gpu-report``: run the steps one after the other, each with a share of the time left, and draw a page.

The steps that matter most to a reader come first, in case time runs out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parity import te
from parity.case import files as built_in
from parity.machine import devices, files
from parity.machine.files import Claim
from parity.machine.process import ended_with_this
from parity.measuring.gpu_report import facts, known_answers, limits
from parity.measuring.kernel_table import table
from parity.measuring.throughput.record import read
from parity.progress import is_quiet
from parity.report import environment, markdown, record
from parity.report.environment import Environment
from parity.report.markdown import digest
from parity.report.numbers import markdown_table, short
from parity.te import PRECISIONS
from parity.user_error import UserError

# A step of the report, and its outcome.


# ``failed``: the step ran to its end and found something wrong; ``broken``: it did not run to its end.
Status = Literal["done", "failed", "broken", "out of time"]


@dataclass(frozen=True)
class Step:
    """One command of the report.

    Attributes:
        name: the name of its log, and its name for ``--only``.
        question: the question that it answers.
        command: the arguments to run Python with.
        share: its share of the time, relative to the other steps.
        files: the files that it leaves in the folder.
        verdict: returns its result in one sentence, from the folder; may raise if it left nothing.
        caveat: why it is not the full step, such as that there is no GPU; or empty.
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
        """Return the path of its output, relative to the folder."""
        return f"logs/{self.name}.txt"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step.

    Attributes:
        step: the step's name.
        status: see ``Status``.
        seconds: how many seconds it took.
        limit: how many seconds it had.
        exit_code: the exit code of its process; None if it ran out of time.
        verdict: its result, or why that is not known.
    """

    step: str
    status: Status
    seconds: float
    limit: float
    exit_code: int | None
    verdict: str


# Run a command with a time limit, at which it and all the processes that it started are stopped.


_GRACE = 8.0  # seconds that an interrupted process has to write its results


@dataclass(frozen=True)
class Ended:
    """Say how a process ended.

    Attributes:
        exit_code: its exit code; None if it ran into the limit.
        seconds: how many seconds it ran.
    """

    exit_code: int | None
    seconds: float


def run_limited(arguments: Sequence[str], limit: float, log: Path, grace: float = _GRACE) -> Ended:
    """Run Python with these arguments, and write its output to the log.

    Args:
        arguments: the arguments to run Python with.
        limit: seconds after which it is interrupted, as by Ctrl-C.
        log: a file, which is overwritten.
        grace: seconds from the interruption until it is killed.
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
            # A shell makes its background processes ignore SIGINT, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        with ended_with_this(process):
            try:
                code: int | None = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = None
                _signal_group(process, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=grace)
            finally:
                _signal_group(process, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may not let a process end at once
                    process.wait(timeout=grace)
    return Ended(code, time.monotonic() - began)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the process and its children, which are one group because it leads a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


# The result of each step in one sentence, read from the files that it left.


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
    """Return the verdict of the suite's report, which is drawn here if the run was stopped before it could draw it."""
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
    """Return how kernels read operands, and how many bits sums of FP8 products keep."""
    return facts.verdict(facts.read(folder / "facts.jsonl"))


def kernels(folder: Path) -> str:
    """Return how much of the table of kernels is bit-equal, and where it is not."""
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
        folder: the report's folder.
        on_gpu: whether TE's real kernels run here; if not, every step is tried on emulated ones.
        quick: whether a small part is enough.
        minutes: the time for all steps.
    """
    small = quick or not on_gpu
    caveat = NO_GPU if not on_gpu else _SMALL if quick else ""
    backend = ("--backend", "gpu" if on_gpu else "cpu")
    return [
        Step("doctor", "What can this machine run?", _build_command("doctor"), 1.2, (), doctor),
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
            "known-answers",
            "Does it compute what is known to the bit, and the same three times?",
            ("-m", known_answers.__name__, backend[1], str(folder / "known-answers.md")),
            0.4,
            ("known-answers.md",),
            lambda folder: known_answers.read(folder / "known-answers.md"),
            caveat,
        ),
        Step(
            "suite",
            "Is TE right, on its real kernels, at every precision of this GPU?",
            _build_command(
                "run", *backend, "--report", folder, "--name", "suite", *(_SMALL_SUITE if small else _SUITE)
            ),
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
            _build_command(
                "kernels", "--report", folder / "kernel-table.md", *_list_kernel_options(on_gpu, small, minutes)
            ),
            2.0,
            ("kernel-table.md", "kernel-table.jsonl"),
            kernels,
            caveat if on_gpu else "no GPU here: CPU kernels against CPU kernels in another process, to try the step",
        ),
        Step(
            "throughput",
            "What does each precision buy, and what does it cost?",
            _build_command("throughput", *backend, "--out", folder, *_list_throughput_options(small, minutes)),
            2.3,
            ("throughput.md", "throughput.png", "throughput.jsonl"),
            throughput,
            caveat,
        ),
        Step(
            "calibration",
            "Which limits would these kernels set?",
            _build_command("calibrate", *_list_calibration_options(folder, small), *backend),
            1.2,
            ("calibration.md", "calibration.png", "calibration.json"),
            calibration,
            caveat or "one seed, TE's modules alone",
        ),
    ]


_SUITE = ("-n", "auto", "--sizes", "small", "--timeout", "60")  # a kernel that hangs costs only its item, not the step
_SMALL_SUITE = ("-n", "0", "-k", "rmsnorm or linear_no_bias", "-p", "bf16", "-p", "fp8_current")


def _list_kernel_options(on_gpu: bool, small: bool, minutes: float) -> tuple[str, ...]:
    """Return the options of the table. Its time ends before the step's, to leave time to draw it after the calls."""
    part = ("-k", "rmsnorm") if small else ("--minutes", f"{minutes / 5.5:.2f}")
    return (*(() if on_gpu else ("--reference", "cpu")), *part)


def _list_throughput_options(small: bool, minutes: float) -> tuple[str, ...]:
    if small:
        return ("-k", "rmsnorm", "--precisions", "bf16", "--sizes", "declared", "--compiled", "none", "--repeats", "2")
    return ("--minutes", f"{minutes / 5:.2f}", "--repeats", "20", "--compiled", "bf16")


def _list_calibration_options(folder: Path, small: bool) -> tuple[str, ...]:
    """Return the options. A law needs eight different tensors, so the small part is the file that has the most."""
    cases = built_in.folder()
    # Enough processes to keep a GPU busy with small modules. Each takes GPU memory of its own.
    all_cases = (str(cases), "-n", str(min(6, devices.cores())))
    files = (str(cases / "mlp.py"), "-p", "bf16", "-n", "1") if small else all_cases
    table = ("-o", str(folder / "calibration.json"), "--report", str(folder / "calibration.md"))
    # Wider limits are accepted because no verdict uses the table: the step only reports how much wider they are.
    return (*files, "--seeds", "1", "--draws", "0", "--accept-wider", *table)


def _build_command(*arguments: object) -> tuple[str, ...]:
    return ("-m", "parity", *map(str, arguments))


# The page with each step's verdict, its time, and links to the files that it left.


_MARKS = {"done": "✅", "failed": "❌", "broken": "💥", "out of time": "⌛"}


def write(
    claim: Claim, steps: Sequence[Step], outcomes: Sequence[Outcome], machine: Environment, why_no_gpu: str
) -> None:
    """Write the claimed ``steps.jsonl``, and ``index.md`` beside it. Steps without an outcome are still to come."""
    lines = [json.dumps(dataclasses.asdict(outcome), ensure_ascii=False) for outcome in outcomes]
    claim.replace(("\n".join(lines) + "\n").encode())
    folder = claim.path.parent
    files.replace(folder / "index.md", draw(folder, steps, outcomes, machine, why_no_gpu))


def draw(
    folder: Path, steps: Sequence[Step], outcomes: Sequence[Outcome], machine: Environment, why_no_gpu: str
) -> str:
    """Return the page, markdown, which links only to files that exist.

    Args:
        folder: the report's folder.
        steps: all steps that were asked for.
        outcomes: the outcomes of those that have run.
        machine: the machine that they ran on.
        why_no_gpu: why no real kernels ran, or empty.
    """
    by_name = {outcome.step: outcome for outcome in outcomes}
    rows = [_format_row(folder, step, by_name.get(step.name)) for step in steps]
    headers = ("", "question", "verdict", "seconds", "of", "files")
    parts = [
        "# What a GPU tells" if not why_no_gpu else "# A trial without a GPU",
        *([f"**No real kernels ran: {why_no_gpu}. Nothing here is a GPU's figure.**"] if why_no_gpu else []),
        f"**{summary(steps, outcomes)}**",
        markdown_table(machine.facts.items(), ("machine", "")),
        markdown_table(rows, headers),
        "✅ done, ❌ found something wrong, 💥 did not finish, ⌛ was stopped at its time limit.",
    ]
    return "\n\n".join(parts) + "\n"


def summary(steps: Sequence[Step], outcomes: Sequence[Outcome]) -> str:
    """Return a text such as ``5 of 6 steps done; 1 out of time: suite; 402 s in all``."""
    parts = [f"{sum(outcome.status == 'done' for outcome in outcomes)} of {len(steps)} steps done"]
    for status in ("failed", "broken", "out of time"):
        names = [outcome.step for outcome in outcomes if outcome.status == status]
        if names:
            parts.append(f"{len(names)} {status}: {', '.join(names)}")
    return "; ".join([*parts, f"{sum(outcome.seconds for outcome in outcomes):.0f} s in all"])


def _format_row(folder: Path, step: Step, outcome: Outcome | None) -> tuple[str, ...]:
    question = f"{step.question} *({step.caveat})*" if step.caveat else step.question
    if outcome is None:
        return ("", f"**{step.name}**: {question}", "not run yet", "", "", "")
    links = [f"[{name}]({name})" for name in (*step.files, step.log) if (folder / name).exists()]
    return (
        _MARKS[outcome.status],
        f"**{step.name}**: {question}",
        outcome.verdict,
        f"{outcome.seconds:.0f}",
        f"{outcome.limit:.0f}",
        ", ".join(links),
    )


# Run the steps one after the other.


LEAST_SECONDS = 5.0


def run(folder: Path, minutes: float, quick: bool, backend: str, only: Sequence[str]) -> bool:
    """Make the report, and return whether every step was done.

    Args:
        folder: the report's folder, made if need be.
        minutes: the time for all steps; one that ends early leaves its time to those that follow.
        quick: whether a small part of each step is enough.
        backend: ``gpu``, ``cpu``, or ``auto`` for the GPU if TE's real kernels run there.
        only: names of steps; empty for all.

    Raises:
        UserError: if a step is unknown, the GPU is asked for but not available, the folder cannot be written to, or
            another run writes its report there.
    """
    ends = time.monotonic() + 60 * minutes
    reason = te.why_no_gpu() or ""
    if backend == "gpu" and reason:
        raise UserError(f"no real TransformerEngine kernels here: {reason}")
    why_no_gpu = "the CPU was asked for" if backend == "cpu" else reason
    folder = folder.resolve()
    chosen = _choose_steps(steps(folder, not why_no_gpu, quick, minutes), only)
    with files.claimed(folder / "steps.jsonl") as claim:
        outcomes = _run_steps(chosen, ends, claim, why_no_gpu)
    print(summary(chosen, outcomes))
    print(f"report: {folder / 'index.md'}")
    return all(outcome.status == "done" for outcome in outcomes)


def _run_steps(chosen: Sequence[Step], ends: float, claim: Claim, why_no_gpu: str) -> list[Outcome]:
    """Run the steps until a moment of the monotonic clock, and write the outcomes after each."""
    folder = claim.path.parent
    try:
        for name in (name for step in chosen for name in (*step.files, step.log)):
            (folder / name).unlink(missing_ok=True)  # a file of an earlier report would pass for one of this report
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    machine = environment.measure("cpu" if why_no_gpu else "gpu", [0], len(chosen))
    outcomes: list[Outcome] = []
    for position, step in enumerate(chosen):
        limit = share_of(ends - time.monotonic(), chosen[position:])
        _print_unless_quiet(f"{step.name}: {step.question} (at most {limit:.0f} s)")
        outcomes.append(make(step, limit, folder))
        _print_unless_quiet(f"  {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s: {outcomes[-1].verdict}")
        write(claim, chosen, outcomes, machine, why_no_gpu)
    return outcomes


def make(step: Step, limit: float, folder: Path) -> Outcome:
    """Run one step and return its outcome, whatever goes wrong in it."""
    ended = run_limited(step.command, limit, folder / step.log)
    try:
        verdict = step.verdict(folder)
    except Exception as error:  # the step left nothing, or incomplete files
        verdict = _last_line(folder / step.log) or f"it left nothing to judge: {error}"
    return Outcome(step.name, _derive_status(ended), ended.seconds, limit, ended.exit_code, verdict)


def share_of(seconds: float, left: Sequence[Step]) -> float:
    """Return the seconds that the first of the remaining steps gets, at least ``LEAST_SECONDS``."""
    return max(LEAST_SECONDS, seconds * left[0].share / sum(step.share for step in left))


def _derive_status(ended: Ended) -> Status:
    if ended.exit_code is None:
        return "out of time"
    return "done" if ended.exit_code == 0 else "failed" if ended.exit_code == 1 else "broken"


def _choose_steps(every: Sequence[Step], only: Sequence[str]) -> list[Step]:
    names = [step.name for step in every]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UserError(f"there is no step {unknown[0]!r}; there are {', '.join(names)}")
    return [step for step in every if not only or step.name in only]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _print_unless_quiet(text: str) -> None:
    if not is_quiet():
        print(text, file=sys.stderr, flush=True)
