"""The page that links what the steps left, with the verdict of each and how long it took."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from parity.gpu_report.step import Outcome, Step
from parity.report.environment import Environment
from parity.report.tables import markdown_table

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
    """The page, markdown; links lead only to files that exist.

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
