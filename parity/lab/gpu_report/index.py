"""The page that links what the steps left, with what each came to, in one sentence, and how long it took."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from parity.lab.gpu_report import limits
from parity.lab.gpu_report.step import Outcome, Step
from parity.lab.kernel_table import table
from parity.lab.throughput.record import read
from parity.report import markdown, record
from parity.report.environment import Environment
from parity.report.markdown import digest
from parity.report.numbers import markdown_table, short
from parity.te.precision import PRECISIONS

# What each step came to, in one sentence, read from the files that it left.


def doctor(folder: Path) -> str:
    """Return which precisions run on real kernels, from the table that ``parity doctor`` prints."""
    lines = (folder / "logs" / "doctor.txt").read_text(encoding="utf-8").splitlines()
    answers = [words for words in map(str.split, lines) if len(words) > 1 and words[0] in PRECISIONS]
    if not answers:
        return "see its log"
    real = [name for name, answer, *_ in answers if answer.startswith("yes")]
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


def kernels(folder: Path) -> str:
    """Return how much of the table is equal to the bit, and where it is not."""
    return table.verdict(table.read(folder / "kernel-table.jsonl"))


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


# The page that links what the steps left, with the verdict of each and how long it took.


_MARKS = {"done": "✅", "failed": "❌", "broken": "💥", "out of time": "⌛"}


def write(
    folder: Path, steps: Sequence[Step], outcomes: Sequence[Outcome], machine: Environment, why_no_gpu: str
) -> None:
    """Write ``index.md`` and ``steps.jsonl`` into the folder; steps without an outcome are yet to come."""
    lines = [json.dumps(dataclasses.asdict(outcome), ensure_ascii=False) for outcome in outcomes]
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "index.md").write_text(draw(folder, steps, outcomes, machine, why_no_gpu), encoding="utf-8")


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
    """``5 of 6 steps done; 1 out of time: suite; 402 s in all``."""
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
