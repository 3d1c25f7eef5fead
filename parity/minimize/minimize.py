"""Shrink a pair that fails, step by step, until every further step would make the failure vanish or another one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parity.case.case import Case, mixed
from parity.case.items import items_of
from parity.minimize.edits import Source, declared_with, inlined, with_less, with_smaller_numbers, with_smaller_size
from parity.minimize.parts import with_a_part
from parity.minimize.trials import Trials, is_same
from parity.passes.modes import usual_modes
from parity.progress import Following
from parity.report import environment, record
from parity.report.numbers import short
from parity.result import Result
from parity.settings import PRECISION_NAMES
from parity.te import Kernels, Precision
from parity.trace.effects import undisturbed
from parity.user_error import UserError

_COLUMNS = 116


@dataclass(frozen=True)
class Minimized:
    """The smallest case.

    Attributes:
        text: the file's text, with numbers of this machine in a comment.
        told: what became smaller.
        problem: how a run of the file in a new process differs; empty if it fails there in the same way.
    """

    text: str
    told: str
    problem: str


def minimize(
    case: Case, item: str, precisions: Sequence[Precision], seed: int, kernels: Kernels, following: Following
) -> Minimized:
    """Return the smallest case that fails as an item of this pair does, found by comparing it at each step.

    Args:
        case: the pair, of a file.
        item: the item's id, without its file; if it has no brackets, the first item that fails is taken.
        precisions: where to look for the item.
        seed: the seed of weights and inputs.
        kernels: TE's kernels.
        following: shows the steps.

    Raises:
        UserError: if there is no such item, if none fails, or if a copy of its file in another folder does not.
    """
    written, home = case.path.read_text(encoding="utf-8-sig"), str(case.path.parent)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run of the file shows them
        some = (one for one in items_of(case, kernels.te, precisions) if one.name == item or "[" not in item)
        trials = _find_failure(Trials(one, seed, kernels, Path(folder), following, one.checked.size) for one in some)
        sys.path.append(home)
        try:
            alone = inlined(written, case.path.parent, {case.path})
            smallest = next(filter(trials.fails, dict.fromkeys([alone, written])), "")
            if not smallest:
                raise UserError(f"{trials.was!r}, but a copy of {case.path} in another folder does not fail like that")
            beside = "" if smallest == alone else home
            with suppress(KeyboardInterrupt):  # what was found until then is smaller, too
                for one in _shrink_text(trials, smallest):
                    smallest = one
        finally:
            sys.path.remove(home)
        told = f"{_describe_size(written, trials.was)} became {_describe_size(smallest, trials.now)}"
        text = "\n".join([_write_head(trials, told, beside), re.sub("\n{4,}", "\n" * 3, smallest.strip()), ""])
        return Minimized(text, told, _check_in_new_process(trials, text, beside))


def _find_failure(some: Iterable[Trials]) -> Trials:
    results: list[Result] = []
    for trials in some:
        trials.was = trials.now = trials.compare(trials.item.case, diagnose=True)
        if trials.was.status in ("failed", "error"):
            return trials
        results.append(trials.was)
    told = ", ".join(f"{one.item} {one.status}" for one in results) or "no such item"
    raise UserError(f"nothing to minimize, since nothing fails: {told}")


def _shrink_text(trials: Trials, text: str) -> Iterator[str]:
    """Yield ever smaller texts that fail in the same way, until no proposal does."""
    before, text = "", _declare_alone(trials, text)
    while before != text:
        before = text
        yield text
        for propose in (with_smaller_size, with_less, with_smaller_numbers, _take_part):
            proposals, number = list(propose(Source(text), trials)), 0
            while number < len(proposals):
                if trials.fails(proposals[number]):
                    text = proposals[number]
                    yield text
                    proposals = list(propose(Source(text), trials))
                else:
                    number += 1


def _declare_alone(trials: Trials, text: str) -> str:
    """Return the text with a declaration of hardly more than this item; the same text if that fails otherwise."""
    source, item, size = Source(text), trials.item, trials.size or {}
    if (call := source.declaration(item.case.name)) is None:  # its name is computed
        with trials.declared(text) as case:
            is_first = trials.size == case.sizes[0]
        trials.size, trials.must_declare = (None, False) if is_first else (trials.size, trials.size in case.sizes)
        return text
    given = ", ".join(f"{key}={x!r}" for key, x in size.items())
    settings = dict(sizes=given and f"[dict({given})]", marks="", accepts="")
    settings |= {} if item.steps else dict(steps="", switches="")
    settings |= dict(precisions=f'["{item.precision.name}"]') if item.precision.name in PRECISION_NAMES else {}
    alone, trials.size = declared_with(source, call, settings), None
    if alone == text or trials.fails(alone):
        return alone
    trials.size = size
    return text


def _take_part(source: Source, trials: Trials) -> list[str]:
    """Return texts that compare a part of the modules in a single pass; none if the pair cannot be built here."""
    if trials.item.steps or trials.item.ranks:
        return []
    modes = usual_modes(), undisturbed(mixed(trials.seed, "parts"))
    with suppress(Exception), modes[0], modes[1], trials.declared(source.text) as case:
        return list(with_a_part(source, case.name, case.build(trials.kernels.te, case.sizes[0]), case.sizes[0]))
    return []


def _describe_size(text: str, result: Result) -> str:
    weights = sum(one.numel for one in result.tensors if one.kind == "weight gradient" and one.step < 2)
    margin = f", margin {short(result.margin)}" if result.tensors else ""
    return f"{result.size_label} ({len(text.strip().splitlines())} lines, {weights} weights{margin})"


def _write_head(trials: Trials, told: str, beside: str) -> str:
    """Return the comment with what fails, how to run it, and where it failed."""
    now, precision, file = trials.now, trials.item.precision.name, trials.item.case.path.name
    paragraphs = [
        f"{now.item} {now.status}. {now.findings[0].name}: {now.findings[0].told}" if now.findings else repr(now),
        f"parity minimize made this from {file}: {told}. {trials.count} cases were compared.",
        "Run it with: parity run FILE"
        + ("" if precision in PRECISION_NAMES else f" -p FILE::{precision}")
        + (f" --seeds {trials.seed}," if trials.seed else "")
        + (f", beside the modules that {file} imports" if beside else ""),
        "; ".join(f"{name}: {fact}" for name, fact in environment.measure(now.backend, (now.seed,), 1).facts.items()),
    ]
    return "\n".join(f"# {line}" for one in paragraphs for line in textwrap.wrap(one, _COLUMNS))


def _check_in_new_process(trials: Trials, text: str, beside: str) -> str:
    """Run the file in a new process, and return how that differs; empty if it fails there in the same way."""
    path = trials.folder / "alone" / trials.item.case.path.name
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "parity", "run", str(path), "-p", trials.item.precision.name]
    command += ["--backend", trials.kernels.backend, "--seeds", f"{trials.seed},"]
    command += ["-n", "0", "--report", str(path.parent), "--ci", "none"]
    found = os.pathsep.join(filter(None, [beside, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True)
    try:
        results = record.read(path.parent / "parity.jsonl").results
    except UserError as error:
        return f"{error}; {done.stderr.strip() or done.stdout.strip()}"
    return "" if any(is_same(trials.now, one) for one in results) else ", ".join(map(repr, results))
