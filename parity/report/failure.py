"""Say what people must know about a failed item, and what a passed one leaves unproven."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator

from tabulate import tabulate

from parity import shown
from parity.report.items import Item
from parity.report.numbers import cosine, plural, seeds, short
from parity.result import Finding, Result, TensorResult

# The message of a failed item: the findings, the margin, the worst tensor, and how to run it again.


def message(item: Item, details: bool = False, limits: str = "") -> str:
    """Return everything that people need to start looking, in a dozen lines; the traceback only with details.

    The first line has the first finding's name with the margin, since pytest's summary shows only that line.

    Args:
        item: an item that failed.
        details: whether to add a traceback.
        limits: the file with the table of limits; empty for the packaged one.
    """
    lines = [*_findings_first(item), *measures(item.worst)]
    if details and item.worst.traceback:
        lines.append(item.worst.traceback)
    return shown.text("\n".join([*lines, f"reproduce: {reproduce(item.worst, limits)}"]))


def _findings_first(item: Item) -> Iterator[str]:
    found = findings(item)
    if not found:
        yield headline(item)
        return
    first, *others = found
    yield f"{first.name}: {headline(item)}"
    yield first.message
    yield from (f"{finding.name}: {finding.message}" for finding in others)


def headline(item: Item) -> str:
    """Say how far from passing, where, and at which seeds; pytest and the report put the item's name before it."""
    worst = item.worst
    where = worst.worst.label if worst.worst else "no tensor"
    what = worst.reason or f"margin {short(worst.margin)} at {where}"
    return f"{what} ({_at_seeds(item)})"


def measures(result: Result) -> Iterator[str]:
    """Yield the worst tensor's errors against what is allowed and expected; nothing for a result without tensors."""
    worst = result.worst
    if worst is None:
        return
    shape = "x".join(map(str, worst.shape)) or "scalar"
    yield f"worst tensor: {worst.label} ({worst.kind}, {shape})"
    errors, expected = worst.errors, worst.expected
    if not errors.finite:
        yield f"  {non_finite(worst)}"
        if max(errors.nans + errors.infs, errors.golden_non_finite) == math.prod(worst.shape):
            return
        yield "  of the others:"
    rows = [
        ["relative L2", *map(short, (errors.relative_l2, worst.tolerance_relative_l2, expected.relative_l2))],
        ["max abs", *map(short, (errors.max_abs, worst.tolerance_max_abs, expected.max_abs))],
        ["max ulps", short(errors.max_ulps), "", short(expected.max_ulps)],
        ["cosine", cosine(errors.cosine), "", cosine(expected.cosine)],
        ["SQNR dB", short(errors.sqnr_db), "", short(expected.sqnr_db)],
    ]
    headers = ["", "error", "tolerance", "expected"]
    table = tabulate(rows, headers, tablefmt="plain", disable_numparse=True, colalign=("left", *["right"] * 3))
    yield from (f"  {line}" for line in table.splitlines())
    yield from _beyond(worst)


def _beyond(tensor: TensorResult) -> Iterator[str]:
    """Yield the checks that failed, worst first."""
    failed = [check for check in tensor.checks if check.margin > 1]
    for check in sorted(failed, key=lambda check: check.margin, reverse=True):
        where = f" ({check.where})" if check.where else ""
        yield f"  {check.statistic} {short(check.value)} beyond {short(check.limit)}{where}"


def non_finite(tensor: TensorResult) -> str:
    """Return ``3 NaN, 1 Inf, first at [0, 7]``; empty if every element is finite."""
    errors = tensor.errors
    if errors.finite:
        return ""
    counts = [
        f"{count} {what}"
        for count, what in (
            (errors.nans, "NaN"),
            (errors.infs, "Inf"),
            (errors.golden_non_finite, "NaN or Inf in golden"),
        )
        if count
    ]
    return f"{', '.join(counts)}, first at {list(errors.first_non_finite or ())}"


def findings(item: Item) -> list[Finding]:
    """Return each finding's first evidence; what every seed repeats is said once."""
    first: dict[tuple[str, str], Finding] = {}
    for result in (item.worst, *item.results):
        for finding in result.findings:
            first.setdefault((finding.code, finding.title), finding)
    return list(first.values())


def reproduce(result: Result, limits: str = "") -> str:
    """Return the one-line command that runs only this comparison; its report does not replace that of the whole run.

    Args:
        result: the comparison's result.
        limits: the file with the table of limits; empty for the packaged one.
    """
    node_id = shlex.quote(f"{result.path}::{result.item}")
    options = f"--parity-seeds={result.seed}, --parity-backend={result.backend} --parity-name=reproduce"
    if result.forced_attention:
        options += f" --parity-attention={result.forced_attention}"
    if limits:
        options += f" --parity-calibration={shlex.quote(limits)}"
    return f"pytest {node_id} {options} -n 0"


def _at_seeds(item: Item) -> str:
    bad = tuple(result.seed for result in item.bad)
    if len(item.results) == 1:
        return f"seed {bad[0]}"
    count = f"{len(bad)} of {plural(len(item.results), 'seed')}"
    return f"{count}: {seeds(bad)}; worst {item.worst.seed}" if len(bad) > 1 else f"{count}: {bad[0]}"


# A run's notes for a terminal: what its comparisons leave unproven, so that a pass is not overrated.


MOST_LINES = 5
_LONGEST = 200  # characters; some notes list every parameter of a model


def lines(notes: Counter[str]) -> Iterator[str]:
    """Yield a line for each of the commonest notes, and how many more the report has.

    Args:
        notes: each with the number of items that have it.
    """
    for note, count in notes.most_common(MOST_LINES):
        yield f"note of {plural(count, 'item')}: {shown.line(textwrap.shorten(note, _LONGEST, placeholder=' ...'))}"
    others = len(notes) - MOST_LINES
    if others > 0:
        yield f"and {others} more in the report"
