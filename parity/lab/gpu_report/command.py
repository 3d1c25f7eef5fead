"""``parity gpu-report``: the steps one after the other, each with what is left of the time, and the page of links."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parity import te
from parity.lab.gpu_report.steps import Ended, Outcome, Status, Step, run_limited, steps
from parity.machine import files
from parity.machine.files import Claim
from parity.progress import is_quiet
from parity.report import environment
from parity.report.environment import Environment
from parity.report.numbers import markdown_table
from parity.user_error import UserError

# The page that links what the steps left, with the verdict of each and how long it took.


_MARKS = {"done": "✅", "failed": "❌", "broken": "💥", "out of time": "⌛"}


def write(
    claim: Claim, steps: Sequence[Step], outcomes: Sequence[Outcome], machine: Environment, why_no_gpu: str
) -> None:
    """Write the claimed ``steps.jsonl``, and ``index.md`` beside it; steps without an outcome are yet to come."""
    lines = [json.dumps(dataclasses.asdict(outcome), ensure_ascii=False) for outcome in outcomes]
    claim.replace(("\n".join(lines) + "\n").encode())
    folder = claim.path.parent
    files.replace(folder / "index.md", draw(folder, steps, outcomes, machine, why_no_gpu))


def draw(
    folder: Path, steps: Sequence[Step], outcomes: Sequence[Outcome], machine: Environment, why_no_gpu: str
) -> str:
    """Return the page, markdown; links lead only to files that exist.

    Args:
        folder: of the report.
        steps: all that were asked for.
        outcomes: of those that have run.
        machine: that they ran on.
        why_no_gpu: why no real kernels ran, or empty.
    """
    by_name = {outcome.step: outcome for outcome in outcomes}
    rows = [_row(folder, step, by_name.get(step.name)) for step in steps]
    headers = ("", "question", "verdict", "seconds", "of", "files")
    parts = [
        "# What a GPU tells" if not why_no_gpu else "# A trial without a GPU",
        *([f"**No real kernels ran: {why_no_gpu}. Nothing here is a GPU's figure.**"] if why_no_gpu else []),
        f"**{summary(steps, outcomes)}**",
        markdown_table(machine.facts.items(), ("machine", "")),
        markdown_table(rows, headers),
        "✅ done, ❌ found something wrong, 💥 did not come to its end, ⌛ was ended at its limit of time.",
    ]
    return "\n\n".join(parts) + "\n"


def summary(steps: Sequence[Step], outcomes: Sequence[Outcome]) -> str:
    """Return ``5 of 6 steps done; 1 out of time: suite; 402 s in all``."""
    parts = [f"{sum(outcome.status == 'done' for outcome in outcomes)} of {len(steps)} steps done"]
    for status in ("failed", "broken", "out of time"):
        names = [outcome.step for outcome in outcomes if outcome.status == status]
        if names:
            parts.append(f"{len(names)} {status}: {', '.join(names)}")
    return "; ".join([*parts, f"{sum(outcome.seconds for outcome in outcomes):.0f} s in all"])


def _row(folder: Path, step: Step, outcome: Outcome | None) -> tuple[str, ...]:
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


# The steps one after the other.


LEAST_SECONDS = 5.0


def run(folder: Path, minutes: float, quick: bool, backend: str, only: Sequence[str]) -> bool:
    """Make the report; whether every step was done.

    Args:
        folder: of the report, made if need be.
        minutes: for all steps; one that ends early leaves its time to those that follow.
        quick: whether a small part of each step is enough.
        backend: ``gpu``, ``cpu``, or ``auto`` for the GPU where TE's real kernels run.
        only: names of steps; none for all.

    Raises:
        UserError: for an unknown step, if the GPU is asked for and cannot be had, the folder cannot be written to, or
            another run writes its report there.
    """
    ends = time.monotonic() + 60 * minutes
    reason = te.why_no_gpu() or ""
    if backend == "gpu" and reason:
        raise UserError(f"no real TransformerEngine kernels here: {reason}")
    why_no_gpu = "the CPU was asked for" if backend == "cpu" else reason
    folder = folder.resolve()
    chosen = _chosen(steps(folder, not why_no_gpu, quick, minutes), only)
    with files.claimed(folder / "steps.jsonl") as claim:
        outcomes = _made(chosen, ends, claim, why_no_gpu)
    print(summary(chosen, outcomes))
    print(f"report: {folder / 'index.md'}")
    return all(outcome.status == "done" for outcome in outcomes)


def _made(chosen: Sequence[Step], ends: float, claim: Claim, why_no_gpu: str) -> list[Outcome]:
    """Make the steps until a moment of the monotonic clock, and write what has become of them after each."""
    folder = claim.path.parent
    try:
        for name in (name for step in chosen for name in (*step.files, step.log)):
            (folder / name).unlink(missing_ok=True)  # an earlier report's would pass for this one's
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    machine = environment.measure("cpu" if why_no_gpu else "gpu", [0], len(chosen))
    outcomes: list[Outcome] = []
    for position, step in enumerate(chosen):
        limit = share_of(ends - time.monotonic(), chosen[position:])
        _tell(f"{step.name}: {step.question} (at most {limit:.0f} s)")
        outcomes.append(make(step, limit, folder))
        _tell(f"  {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s: {outcomes[-1].verdict}")
        write(claim, chosen, outcomes, machine, why_no_gpu)
    return outcomes


def make(step: Step, limit: float, folder: Path) -> Outcome:
    """Run one step; nothing that it does makes this fail."""
    ended = run_limited(step.command, limit, folder / step.log)
    try:
        verdict = step.verdict(folder)
    except Exception as error:  # it left nothing, or half of something
        verdict = _last_line(folder / step.log) or f"it left nothing to judge: {error}"
    return Outcome(step.name, _status(ended), ended.seconds, limit, ended.exit_code, verdict)


def share_of(seconds: float, left: Sequence[Step]) -> float:
    """Return what the first of the steps that are left gets of the seconds, at least ``LEAST_SECONDS``."""
    return max(LEAST_SECONDS, seconds * left[0].share / sum(step.share for step in left))


def _status(ended: Ended) -> Status:
    if ended.exit_code is None:
        return "out of time"
    return "done" if ended.exit_code == 0 else "failed" if ended.exit_code == 1 else "broken"


def _chosen(every: Sequence[Step], only: Sequence[str]) -> list[Step]:
    names = [step.name for step in every]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UserError(f"there is no step {unknown[0]!r}; there are {', '.join(names)}")
    return [step for step in every if not only or step.name in only]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _tell(text: str) -> None:
    if not is_quiet():
        print(text, file=sys.stderr, flush=True)
