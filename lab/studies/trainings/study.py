"""Train wrong and right ports, and record whether parity detects each mistake and how it names it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from lab.corpus.trained_ports.trainings import (
    COMPILED,
    GRAPHED,
    HOSTS,
    OF_QUANTIZED,
    OFFLOADED,
    ONLY_AT,
    ONLY_ON,
    QUANTIZED,
    RIGHT,
    WRONG,
    case_of,
)
from lab.studies import reporting
from lab.studies.settings import Said, check_names
from parity import te
from parity.case.validate import check_case
from parity.judge.limits import packaged
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.report.numbers import markdown_table
from parity.result import Switch
from parity.te import PRECISIONS, why_unavailable
from parity.trainings.training import train_at

RECORD = "trainings.jsonl"
_ROWS = {row.name: row for row in WRONG}


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        precisions: the precisions to judge at; those that the machine cannot run are skipped.
        steps: number of steps of each training.
        seeds: number of seeds of each right training; wrong trainings have one.
    """

    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block")
    steps: int = 4
    seeds: int = 3


FULL = Settings()
QUICK = Settings(precisions=("bf16",), seeds=1)


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        name: a name in ``rows.trainings``'s ``WRONG`` or ``RIGHT``.
        host: a name in ``HOSTS``, ``COMPILED`` or ``QUANTIZED`` of the same module.
        precision: a name in ``parity.te.PRECISIONS``.
        seed: the seed of weights and batches.
        steps: number of steps.
        switch: how the candidate is trained.
    """

    name: str
    host: str
    precision: str
    seed: int
    steps: int
    switch: Switch = ""

    @property
    def is_wrong(self) -> bool:
        """Return whether the training has a mistake."""
        return self.name in _ROWS


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Training, Said], Settings]:
    """Make the trainings that are missing from the folder's record, in this process.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a precision is unknown.
    """
    check_names("precisions", settings.precisions, PRECISIONS)
    campaign: Campaign[Training, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    return campaign.complete(trainings(settings), said_of, "training"), settings


def trainings(settings: Settings) -> list[Training]:
    """Return all trainings, ordered by precision, with wrong ones first."""
    found = []
    for name in settings.precisions:
        if why_unavailable(PRECISIONS[name], te.kernels("cpu")) is not None:
            continue
        rows = [row for row in WRONG if not row.precisions or name in row.precisions]
        found += [Training(row.name, row.host, name, 0, settings.steps, row.switch) for row in rows]
        switches: tuple[Switch, ...] = get_args(Switch)
        ways: dict[str, tuple[Switch, ...]] = {"plain": switches}
        ways.update((name, ("graph",)) for name in GRAPHED)
        ways.update((name, ("offload",)) for name in OFFLOADED)
        found += [
            Training(right, host, name, seed, settings.steps, switch)
            for right in RIGHT
            for switch in ways.get(right, switches[:1])
            for host in _hosts(right, name, switch)
            for seed in range(settings.seeds)
            if name in ONLY_AT.get(right, (name,))
        ]
    return found


def _hosts(right: str, precision: str, switch: Switch) -> list[str]:
    """Return the hosts that a right training runs on at a precision."""
    if right in OF_QUANTIZED:
        return [host for host in QUANTIZED if host.endswith(f" {precision}")]
    return [host for host in (COMPILED if switch == "compile" else HOSTS) if host in ONLY_ON.get(right, (host,))]


def said_of(one: Training) -> Said:
    """Make one training, without a time limit for the search for a cause."""
    kernels = te.kernels("cpu")
    case = case_of(one.host, _ROWS[one.name].training if one.is_wrong else RIGHT[one.name])
    (checked,) = check_case(case, kernels.te)
    began = time.process_time()
    at = case, checked, PRECISIONS[one.precision], one.seed, kernels, packaged()
    result = train_at(*at, one.steps, one.switch)
    return Said.by(result, time.process_time() - began)


# The report: which mistakes were detected and named, and which right trainings did not pass.


def write(found: Mapping[Training, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "trainings.md", _sections(found, settings))


def _sections(found: Mapping[Training, Said], settings: Settings) -> Iterator[str]:
    yield "# Which mistakes of trainings are detected and named"
    yield (
        f"Trainings of {settings.steps} steps of an MLP and of a Llama layer (width 64, 128 tokens a batch), wrong on "
        "purpose or right, judged step by step. "
        + reporting.made_on(te.kernels("cpu"))
        + " Seconds are processor time of a training with all its passes, on a machine that others use."
    )
    wrong = {one: said for one, said in found.items() if one.is_wrong}
    right = {one: said for one, said in found.items() if not one.is_wrong}
    yield reporting.rates(wrong, right, settings.precisions, _outcome)
    yield "*Named*: the first finding has the right title, and tells the number where there is one."
    yield "## Each wrong training"
    names = dict.fromkeys(one.name for one in wrong)
    outcomes = {(one.name, one.precision): _outcome(one, said) for one, said in wrong.items()}
    columns = [name for name in settings.precisions if any(one.precision == name for one in wrong)]
    yield markdown_table(
        ([name, *(outcomes.get((name, precision), "") for precision in columns)] for name in names),
        ("mistake", *(f"`{name}`" for name in columns)),
        left=1 + len(columns),
    )
    missed = [(one, said) for one, said in wrong.items() if _outcome(one, said) != "named"]
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


def _outcome(one: Training, said: Said) -> str:
    return said.outcome(_ROWS[one.name].titles, _ROWS[one.name].told)
