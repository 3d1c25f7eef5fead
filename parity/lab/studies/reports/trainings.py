"""Draw the report of the study ``trainings``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from parity.lab.studies.reports.shared import made_on, outcome, rates
from parity.lab.studies.trainings import Said, Settings, Training
from parity.report.numbers import markdown_table
from parity.te import kernels


def write(found: Mapping[Training, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    path = folder / "trainings.md"
    path.write_text("\n\n".join(_sections(found, settings)) + "\n", encoding="utf-8")
    return path


def _sections(found: Mapping[Training, Said], settings: Settings) -> Iterator[str]:
    yield "# Which mistakes of trainings are detected and named"
    yield (
        f"Trainings of {settings.steps} steps of an MLP and of a Llama layer (width 64, 128 tokens a batch), wrong on "
        "purpose or right, judged step by step. "
        + (f"Measured at commit {settings.commit}. " if settings.commit else "")
        + made_on(kernels("cpu"))
        + " Seconds are processor time of a training with all its passes, on a machine that others use."
    )
    wrong = {one: said for one, said in found.items() if one.is_wrong}
    right = {one: said for one, said in found.items() if not one.is_wrong}
    yield rates(wrong, right, settings.precisions, lambda one, said: said.is_named(one))
    yield "*Named*: the first finding has the right title, and tells the number where there is one."
    yield "## Each wrong training"
    names = dict.fromkeys(one.name for one in wrong)
    columns = [name for name in settings.precisions if any(one.precision == name for one in wrong)]
    yield markdown_table(
        ([name, *(_outcome(wrong, name, precision) for precision in columns)] for name in names),
        ("mistake", *(f"`{name}`" for name in columns)),
        left=1 + len(columns),
    )
    missed = [(one, said) for one, said in wrong.items() if outcome(said.status, said.is_named(one)) != "named"]
    if missed:
        yield "## Not named"
        told = (said.findings[0] if said.findings else ("", said.reason) for _, said in missed)
        yield markdown_table(
            ((one.name, one.precision, said.status, *words) for (one, said), words in zip(missed, told, strict=True)),
            ("mistake", "precision", "status", "said instead", "in words"),
            left=5,
        )
    rejected_ones = [(one, said) for one, said in right.items() if said.status != "passed"]
    if rejected_ones:
        yield "## Right trainings that did not pass"
        yield markdown_table(
            ((one.name, one.host, one.precision, one.switch, one.seed, said.reason) for one, said in rejected_ones),
            ("training", "host", "precision", "switch", "seed", "reason"),
            left=6,
        )


def _outcome(wrong: Mapping[Training, Said], name: str, precision: str) -> str:
    for one, said in wrong.items():
        if (one.name, one.precision) == (name, precision):
            return outcome(said.status, said.is_named(one))
    return ""
