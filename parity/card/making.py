"""Compare a pair in every way that it declares, and write its card."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from parity import te
from parity.api import compare
from parity.card.card import FORMAT, Card, Comparison, Coverage
from parity.case.case import Case
from parity.case.validate import CheckedSize, check_case
from parity.coverage import missed, try_mistakes
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.passes.prepare import Prepared, prepare
from parity.report import earlier, environment
from parity.report.formats import format_rows
from parity.report.numbers import plural
from parity.report.record import Item
from parity.report.verdicts import describe_result
from parity.result import Result, Switch
from parity.te import Backend, Kernels, precision_named
from parity.user_error import UserError

_NOT_OF_THE_CARD = ("date", "parity", "processor")  # which do not change what was shown
_ASKED = (earlier.PARITY, earlier.VARIABLES)


def make_card(
    case: Case,
    precisions: Sequence[str],
    seeds: Sequence[int],
    backend: Backend | Literal["auto"],
    folder: Path,
    covers: bool = True,
) -> Card:
    """Compare a pair at each of its sizes, in one pass and in the trainings that it declares, and return its card.

    Args:
        case: the pair.
        precisions: names of precisions; those that the pair does not run at are left out.
        seeds: seeds of weights and inputs.
        backend: ``auto``, ``gpu`` or ``cpu``.
        folder: the folder of the card, to which the pair's file is named relatively.
        covers: whether to find out which known mistakes the comparisons would have passed.

    Raises:
        UserError: if the pair does not fit together, or runs at none of the precisions.
    """
    chosen = [name for name in precisions if case.runs_at(name)]
    if not chosen:
        raise UserError(f"{case} runs at none of {', '.join(precisions)}")
    kernels = te.kernels(backend)
    first = check_case(case, kernels.te)[0]
    prepared = prepare(case, first, torch.float32, seeds[0], kernels)
    model, weights = _describe_model(prepared), _hash_weights(prepared)
    comparisons = [
        _describe_item(way, Item(tuple(results)))
        for way, steps, switch in _list_ways(case)
        for results in _compare_items(case, chosen, seeds, backend, steps, switch)
    ]
    here = environment.measure(kernels.backend, seeds, items=0)
    asked = earlier.asked({}, [], [case.path], Path.cwd(), None)
    return Card(
        format=FORMAT,
        pair=f"{os.path.relpath(case.path, folder)}::{case.name}",
        model=model,
        commit=environment.describe_commit(case.path.parent),
        code={name: checksum for name, checksum in asked.code.items() if name not in _ASKED},
        weights=weights,
        environment={
            "te-parity": here.parity,
            **{name: fact for name, fact in here.facts.items() if name not in _NOT_OF_THE_CARD},
        },
        comparisons=comparisons,
        coverage=[_describe_coverage(case, first, name, seeds[0], kernels) for name in chosen] if covers else [],
        left_out=[f"ranks {layout}" for layout in case.ranks],
    )


def _list_ways(case: Case) -> Iterator[tuple[str, int, Switch]]:
    """Yield the ways in which a pair runs in one process: in words, its steps, and how they are made."""
    yield "one pass", 0, ""
    if case.steps:
        steps = plural(case.steps, "step")
        yield steps, case.steps, ""
        for switch in case.switches:
            yield f"{steps}, {switch}", case.steps, switch


def _compare_items(
    case: Case,
    precisions: Sequence[str],
    seeds: Sequence[int],
    backend: Backend | Literal["auto"],
    steps: int,
    switch: Switch,
) -> Iterator[list[Result]]:
    """Yield the results of all seeds of each size, precision and attention backend."""
    results = compare(case, list(precisions), seeds, backend, steps=steps, switch=switch)
    for start in range(0, len(results), len(seeds)):
        yield results[start : start + len(seeds)]


def _describe_item(way: str, item: Item) -> Comparison:
    worst = describe_result(item.worst)
    return Comparison(
        way=way,
        size=worst.size,
        precision=item.precision,
        seeds=[result.seed for result in item.results],
        status=item.status,
        reason=worst.reason,
        margin=worst.margin,
        worst=item.worst.worst.label if item.worst.worst else "",
        findings=sorted({finding.name for result in item.bad for finding in result.findings}),
        attention=item.worst.attention,
        formats=[list(row) for row in format_rows(item.results)],
        notes=list(dict.fromkeys(str(note) for result in item.results for note in result.notes)),
    )


def _describe_coverage(case: Case, checked: CheckedSize, precision: str, seed: int, kernels: Kernels) -> Coverage:
    try:
        tried = try_mistakes(Request(case, checked, precision_named(precision), seed, kernels, packaged()))
    except UserError as error:
        return Coverage(precision=precision, tried=0, passed=[], reason=str(error))
    passed = [(one.mistake.title, f"{one.mistake.title}: {one.mistake.name}") for one in missed(tried)]
    return Coverage(
        precision=precision,
        tried=len(tried),
        passed=list(dict.fromkeys(told for title, told in passed if title not in case.accepts)),
        accepted=list(dict.fromkeys(told for title, told in passed if title in case.accepts)),
    )


def _describe_model(prepared: Prepared) -> str:
    count = sum(parameter.numel() for parameter in prepared.reference.parameters())
    return f"{type(prepared.reference).__name__} with {count:,} parameters"


def _hash_weights(prepared: Prepared) -> str:
    """Return a checksum of the names, shapes and values of the reference's parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(prepared.reference.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()
