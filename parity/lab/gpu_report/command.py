"""``parity gpu-report``: the steps one after the other, each with what is left of the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from parity import te
from parity.lab.gpu_report import index
from parity.lab.gpu_report.step import Ended, Outcome, Status, Step, run_limited
from parity.lab.gpu_report.steps import steps
from parity.report import environment
from parity.user_error import UserError

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
        UserError: for an unknown step, if the GPU is asked for and cannot be had, or the folder cannot be written to.
    """
    ends = time.monotonic() + 60 * minutes
    reason = te.why_no_gpu() or ""
    if backend == "gpu" and reason:
        raise UserError(f"no real TransformerEngine kernels here: {reason}")
    why_no_gpu = "the CPU was asked for" if backend == "cpu" else reason
    folder = folder.resolve()
    chosen = _chosen(steps(folder, not why_no_gpu, quick, minutes), only)
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
        index.write(folder, chosen, outcomes, machine, why_no_gpu)
    print(index.summary(chosen, outcomes))
    print(f"report: {folder / 'index.md'}")
    return all(outcome.status == "done" for outcome in outcomes)


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
    Console(stderr=True).print(text, highlight=False, soft_wrap=True, markup=False)
