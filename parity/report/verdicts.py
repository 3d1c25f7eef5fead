"""A run's verdicts as one JSON document, for programs: its schema is ``docs/verdicts.schema.json``.

The record of a run holds every number and may change with any version. This document holds what another program needs,
and changes only with its version: fields may be added, and a reader should ignore those that it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from parity.report import environment as environments
from parity.report.failure import reproduce
from parity.report.markdown import digest
from parity.report.record import Record
from parity.result import UNDECLARED, Finding, Result, TensorResult

FORMAT: Literal["te-parity/verdicts/1"] = "te-parity/verdicts/1"


class _Part(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)


class Edit(_Part):
    """A repair as a change of lines of the user's code."""

    now: list[str]
    """The lines as they are; empty if something is missing."""
    then: list[str]
    """The lines as they should be."""


class Cause(_Part):
    """What is wrong, as ``docs/findings.md`` explains by its code."""

    code: str
    """Such as ``PAR203``; it never changes its meaning."""
    title: str
    """The code in words, such as ``norm-eps``."""
    sure: bool
    """Whether it is stated as a fact. If not, try it before you change anything else."""
    place: str
    """The first stage in which the candidate departs from the reference; empty if it is not known."""
    message: str
    """The evidence and what to do."""
    repair: str
    """What to change; for codes ``PAR5xx``, where to look next; empty if nothing is known."""
    edit: Edit | None
    """The repair as a change of lines; null if it is none."""


class Tensor(_Part):
    """One compared tensor."""

    label: str
    """Such as ``output``, ``d input`` or ``d up_proj.weight``; the last two are gradients."""
    kind: str
    """``output``, ``probed output``, ``input gradient`` or ``weight gradient``."""
    shape: list[int]
    """In the reference's layout."""
    passed: bool
    margin: float | None
    """The largest statistic over its limit, up to 1 passes; null if there is a NaN or an infinity."""
    error: float | None
    """``|x - golden| / |golden|`` in the Euclidean norm; null if it is not finite."""
    expected: float | None
    """The same of the reference under the precision's rounding: the cost of a faithful port."""
    limit: float | None
    """The bound on ``error``."""
    statistic: str
    """The statistic that sets the margin, such as ``norm``, ``row`` or ``gain``; empty if there is none."""
    where: str
    """The worst place by this statistic."""


class Formats(_Part):
    """The formats of GEMM operands that TE's kernels were given."""

    modules: list[str]
    """Names of the candidate's modules."""
    operands: dict[str, str]
    """By GEMM and operand, such as ``fprop weight``: the format, such as ``E4M3, one scale``."""


class Step(_Part):
    """One step of a training."""

    number: int
    loss: float | None
    """The candidate's loss before the step; null if it is not finite."""
    golden: float | None
    """The reference's loss in FP64, with the candidate's weights and batch."""
    margin: float | None
    precision: str
    """The step's precision, if the training changes it; else empty."""


class Verdict(_Part):
    """The verdict on one pair at one size, precision and seed."""

    id: str
    """The id that pytest and ``parity run`` take, such as ``my_pairs.py::mlp[bf16-2x64]``."""
    pair: str
    precision: str
    size: dict[str, Any]
    seed: int
    backend: str
    """``gpu`` for TE's compiled kernels, ``cpu`` for emulated ones."""
    status: Literal["passed", "failed", "skipped", "error"]
    """``skipped`` and ``error`` prove nothing, and come with a reason."""
    reason: str
    margin: float | None
    """The largest margin of a tensor, up to 1 passes; null if nothing was compared or something is not finite."""
    findings: list[Cause]
    """The causes of a failure, the likeliest first."""
    notes: list[str]
    """What the comparison leaves unproven, even if it passed."""
    tensors: list[Tensor]
    formats: list[Formats]
    """Empty if they were not watched."""
    attention: str
    """The attention backends that TE ran."""
    ranks: str
    """Such as ``tp2-sp``; empty for one process."""
    steps: list[Step]
    """The steps of a training; empty for a single pass."""
    seconds: float
    reproduce: str
    """The command that compares this again; empty if no file declares the pair."""


class Uncollected(_Part):
    """A pair or a file that could not be compared at all."""

    id: str
    message: str


class Verdicts(_Part):
    """All verdicts of a run."""

    format: Literal["te-parity/verdicts/1"] = Field(default=FORMAT)
    """The version of this document; the number grows if a field goes or changes its meaning."""
    passed: bool
    """Whether everything that was to be compared was compared and passed; skips do not count."""
    environment: dict[str, str]
    """Kernels, device, versions and date, as reports show them."""
    verdicts: list[Verdict]
    uncollected: list[Uncollected]


def of_record(record: Record) -> Verdicts:
    """Return the verdicts of a run."""
    run = digest(record)
    return Verdicts(
        passed=run.complete and not run.failed and any(result.passed for result in record.results),
        environment=record.environment.facts,
        verdicts=[describe_result(result) for result in record.results],
        uncollected=[Uncollected(id=each.node_id, message=each.message) for each in record.uncollected],
    )


def verdicts(results: Sequence[Result]) -> dict[str, Any]:
    """Return the results of ``parity.compare`` as a dict of JSON types, as ``parity run --json`` prints it.

    Its schema is ``docs/verdicts.schema.json``.

    Args:
        results: results of this process.
    """
    backend = results[0].backend if results else "cpu"
    here = environments.measure(backend, sorted({result.seed for result in results}), items=0)
    return of_record(Record(here, tuple(results))).model_dump(mode="json")


def describe_result(result: Result) -> Verdict:
    """Return one result as the document holds it."""
    return Verdict(
        id=f"{result.path}::{result.item}" if result.path != UNDECLARED else result.item,
        pair=result.case,
        precision=result.precision,
        size={
            name: value if isinstance(value, (bool, int, str)) else str(value) for name, value in result.size.items()
        },
        seed=result.seed,
        backend=result.backend,
        status=result.status,
        reason=result.reason,
        margin=_as_json_number(result.margin),
        findings=list(map(_describe_finding, result.findings)),
        notes=list(map(str, result.notes)),
        tensors=list(map(_describe_tensor, result.tensors)),
        formats=[Formats(modules=list(each.modules), operands=each.operands) for each in result.formats],
        attention=result.attention,
        ranks=result.ranks,
        steps=[
            Step(
                number=one.number,
                loss=_as_json_number(one.loss),
                golden=_as_json_number(one.golden),
                margin=_as_json_number(one.margin),
                precision=one.precision,
            )
            for one in result.steps
        ],
        seconds=result.seconds,
        reproduce=reproduce(result),
    )


def _describe_finding(finding: Finding) -> Cause:
    edit = Edit(now=list(finding.now), then=list(finding.then)) if finding.now or finding.then else None
    return Cause(
        code=finding.code,
        title=finding.title,
        sure=finding.sure,
        place=finding.place,
        message=finding.message,
        repair=finding.repair,
        edit=edit,
    )


def _describe_tensor(tensor: TensorResult) -> Tensor:
    worst = tensor.worst_check
    return Tensor(
        label=tensor.label,
        kind=tensor.kind,
        shape=list(tensor.shape),
        passed=tensor.passed,
        margin=_as_json_number(tensor.margin),
        error=_as_json_number(tensor.errors.relative_l2),
        expected=_as_json_number(tensor.expected.relative_l2),
        limit=_as_json_number(tensor.tolerance_relative_l2),
        statistic=worst.statistic if worst else "",
        where=worst.where if worst else "",
    )


def _as_json_number(number: float) -> float | None:
    return number if math.isfinite(number) else None
