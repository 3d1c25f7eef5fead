"""Write the message about a failed item, and a run's failures and notes for a terminal."""

from __future__ import annotations

import math
import os
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from tabulate import tabulate

from parity import shown
from parity.report.numbers import cosine, plural, ratio, seeds, short
from parity.report.record import Item
from parity.result import REWEIGHED, UNDECLARED, Check, Finding, Kind, Result, TensorResult

# The message about a failed item: what is wrong, why, the evidence, and how to run it again.


_EMULATED = ("PARITY_EMULATED_", "PARITY_KERNEL_CHOICES")
_KINDS: dict[Kind, str] = {
    "output": "output",
    "probed output": "the output on probing inputs, whose rows differ in size, which shows what usual inputs hide",
    "reweighed output": "the output in FP32 with probing weights, which exercise what usual weights leave idle",
    "input gradient": "input gradient",
    "weight gradient": "weight gradient",
}


def message(item: Item, details: bool = False, limits: str = "") -> str:
    """Return the message about a failed item: what is wrong, why, with which evidence, and how to run it again.

    The first line has the first finding's name and the margin, since pytest's summary shows only that line. For an item
    that could not be compared, the message has only the reason and the command to run it again.

    Args:
        item: an item that failed.
        details: whether to add a traceback.
        limits: the file of the table of limits; empty for the packaged one.
    """
    lines = [*causes_and_figures(item)]
    if details and item.worst.traceback:
        lines.append(item.worst.traceback)
    command = reproduce(item.worst, limits)
    return shown.text("\n".join([*lines, *([f"reproduce: {_as_here()}{command}"] if command else [])]))


def describe_verdict(name: str, result: Result) -> str:
    """Return a result in one line: a mark, what was judged, its status and, if there is one, the margin."""
    mark = "✓" if result.passed else "✗"
    margin = f", margin {short(result.margin)}" if result.status in ("passed", "failed") else ""
    return f"{mark} {name}: {result.status}{margin}"


def causes_and_figures(item: Item) -> Iterator[str]:
    """Yield the lines on a failed item that say what is wrong and why, with the evidence."""
    yield _first_line(item)
    yield from _explain_margin(item.worst)
    yield from _list_causes(item)
    yield from measures(item.worst)


def _first_line(item: Item) -> str:
    named = findings(item)
    return f"{named[0].name}: {headline(item)}" if named else headline(item)


def _explain_margin(result: Result) -> Iterator[str]:
    """Yield a line on what the margin means; nothing for an item whose verdict does not rest on it."""
    worst = result.worst
    if worst is None or result.reason or result.within_limits:
        return
    if math.isfinite(worst.margin):
        how = f"the error is up to {short(worst.margin)} times its limit (the margin; up to 1 passes)"
    else:
        how = "no error is expected there" if worst.errors.finite else "there are numbers that are not finite"
    yield f"what: {result.item} differs from the reference at {worst.label}: {how}"


def _list_causes(item: Item) -> Iterator[str]:
    """Yield each finding with its repair, if it has one. The message's first line already names the first finding."""
    for index, finding in enumerate(findings(item)):
        if finding.place:
            yield f"where: the candidate departs from the reference {finding.place}"
        told = _without_repair(finding)
        yield f"why: {told}" if index == 0 else f"why, too: {finding.name}: {told}"
        if finding.repair:
            yield f"{finding.advice}: {finding.repair}"


def _without_repair(finding: Finding) -> str:
    """Return a finding's message without its repair, which follows on a line of its own."""
    if not finding.repair:
        return finding.message
    return finding.message.replace(f"if you {finding.repair}", "with this repair").replace(f"; {finding.repair}", "")


def headline(item: Item) -> str:
    """Return how far an item is from passing, where, and at which seeds. Callers put the item's name before it."""
    worst = item.worst
    if worst.reason or worst.worst is None:
        what = worst.reason or "no tensor was compared"
    elif worst.within_limits:
        what = "failed, though each tensor is within its limits"
    else:
        what = f"margin {short(worst.margin)} at {worst.worst.label}"
    return f"{what} ({_at_seeds(item)})"


def measures(result: Result) -> Iterator[str]:
    """Yield lines that compare the worst tensor's errors with the allowed and expected ones, if there are tensors."""
    worst = result.worst
    if worst is None:
        return
    which = "no tensor is beyond its limits; the nearest to them" if worst.passed else "worst tensor"
    yield f"{which}: {worst.label} ({worst.shape_label}; {_KINDS[worst.kind]})"
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
    precision = "fp32" if worst.kind == REWEIGHED else result.precision
    yield f"  (expected: what rounding to {precision} costs the reference; tolerance: the most that passes)"
    yield from _tabulate_failed_checks(worst)


# Each statistic of ``parity.judge.statistics`` in words. Signed ones are in standard deviations of rounding's effect.
_LOOKS = {
    "norm": "whole tensor",
    "largest": "largest element",
    "row": "worst row",
    "slice": "worst slice",
    "shift": "mean over rows, as a bias would shift it",
    "gain": "all of it, by one factor",
    "mistake": "along the change of a known mistake",
}
_SIGNED = ("gain", "mistake")


def _tabulate_failed_checks(tensor: TensorResult) -> Iterator[str]:
    """Yield a table of the checks that failed, the worst first."""
    failed = sorted(
        (check for check in tensor.checks if check.margin > 1), key=lambda check: check.margin, reverse=True
    )
    if not failed:
        return
    rows = [
        [_describe_check(check), _in_its_unit(check.value, check.statistic), _in_its_unit(check.limit, check.statistic)]
        for check in failed
    ]
    headers = ["error of the", "over expected", "limit"]
    table = tabulate(rows, headers, tablefmt="plain", disable_numparse=True, colalign=("left", "right", "right"))
    yield from (f"  {line}" for line in table.splitlines())
    if any(check.statistic in _SIGNED for check in failed):
        yield "  (σ: standard deviations of what rounding alone does)"


def _in_its_unit(value: float, statistic: str) -> str:
    return f"{short(value)} σ" if statistic in _SIGNED else f"{short(value)}x"


def _describe_check(check: Check) -> str:
    """Return where a check looks, such as ``slice 18 of dimension 0`` or ``largest element, at [23, 38]``."""
    if found := re.fullmatch(r"dim (\d+) at (\d+)", check.where):
        return f"slice {found[2]} of dimension {found[1]}"
    what = _LOOKS.get(check.statistic, check.statistic)
    if found := re.fullmatch(r"(?:row at|element) (.*)", check.where):
        return f"{what}, at [{found[1]}]" if found[1] else what
    return f"{what}: {check.where}" if check.where else what


FIGURES = (
    *("relative L2", "expected", "tolerance", "error / expected", "max abs", "its tolerance", "max ulps", "cosine"),
    *("SQNR dB", "NaN/Inf"),
)
"""The headings of ``figures``."""


def figures(tensor: TensorResult) -> tuple[str, ...]:
    """Return a tensor's errors, with the expected and allowed ones, as the tables of reports show them."""
    errors, expected = tensor.errors, tensor.expected
    return (
        short(errors.relative_l2),
        short(expected.relative_l2),
        short(tensor.tolerance_relative_l2),
        ratio(errors.relative_l2, expected.relative_l2),
        short(errors.max_abs),
        short(tensor.tolerance_max_abs),
        short(errors.max_ulps),
        cosine(errors.cosine),
        short(errors.sqnr_db),
        non_finite(tensor),
    )


def non_finite(tensor: TensorResult) -> str:
    """Return a text such as ``3 NaN, 1 Inf, first at [0, 7]``; empty if every element is finite."""
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
    """Return an item's findings. Findings that several seeds repeat are listed once, with their first evidence."""
    first: dict[tuple[str, str], Finding] = {}
    for result in (item.worst, *item.results):
        for finding in result.findings:
            first.setdefault((finding.code, finding.title), finding)
    return list(first.values())


def reproduce(result: Result, limits: str = "") -> str:
    """Return the command, on one line, that runs only this comparison without replacing the whole run's report.

    It is empty if no file declares the pair, as for modules that were given to ``parity.compare``.

    Args:
        result: the comparison's result.
        limits: the file of the table of limits; empty for the packaged one.
    """
    if result.path == UNDECLARED:
        return ""
    node_id = f"{result.path}::{result.item}"
    words = ["pytest", f"./{node_id}" if node_id.startswith(("-", "@")) else node_id, f"--parity-seeds={result.seed},"]
    words += [f"--parity-backend={result.backend}", "--parity-name=reproduce"]
    if trained := re.search(r"(?:^|-)steps(\d+)", result.size_label):
        words.append(f"--parity-steps={trained[1]}")
    if result.size_label.endswith("-decoding"):
        words.append("--parity-decoding=yes")
    if result.forced_attention:
        words.append(f"--parity-attention={result.forced_attention}")
    if limits:
        words.append(f"--parity-calibration={limits}")
    return shown.command(*words, "-n", "0")


def _as_here() -> str:
    """Return the environment variables that configure the emulation, as a shell accepts them before a command."""
    chosen = sorted(name for name in os.environ if name.startswith(_EMULATED))
    return "".join(f"{name}={shlex.quote(os.environ[name])} " for name in chosen)


def _at_seeds(item: Item) -> str:
    bad = tuple(result.seed for result in item.bad)
    if len(item.results) == 1:
        return f"seed {bad[0]}"
    count = f"{len(bad)} of {plural(len(item.results), 'seed')}"
    return f"{count}: {seeds(bad)}; worst {item.worst.seed}" if len(bad) > 1 else f"{count}: {bad[0]}"


# A run's failures for a terminal, each on one line, so that the end of a run fits on a screen.


MOST_FAILURES = 20


def lines_of_failures(items: Iterable[Item], count: int) -> Iterator[str]:
    """Yield a line with the finding of each failed item, the worst first, and then how many more there are.

    Args:
        items: the items of the run that are kept.
        count: how many of all items failed.
    """
    failed = sorted((item for item in items if item.bad), key=lambda item: item.severity, reverse=True)
    for item in failed[:MOST_FAILURES]:
        told = textwrap.shorten(_first_line(item), _LONGEST, placeholder=" ...")
        yield f"  {shown.line(f'{item.name}: {told}')}"
    if (others := count - len(failed[:MOST_FAILURES])) > 0:
        yield f"  and {others} more in the report"


# A run's notes for a terminal. They say what its comparisons leave unproven, so that a pass is not overrated.


MOST_LINES = 5
_LONGEST = 200  # characters; some notes list every parameter of a model


def skips(reasons: Counter[str]) -> Iterator[str]:
    """Yield a line for each of the most common reasons why nothing was compared, and what to do."""
    for reason, count in reasons.most_common(MOST_LINES):
        yield f"skipped {plural(count, 'item')}: {shown.line(reason)}"


def lines(notes: Counter[str]) -> Iterator[str]:
    """Yield a line for each of the most common notes, and then how many more the report has.

    Args:
        notes: the notes, each with the number of items that have it.
    """
    for note, count in notes.most_common(MOST_LINES):
        yield f"note of {plural(count, 'item')}: {shown.line(textwrap.shorten(note, _LONGEST, placeholder=' ...'))}"
    others = len(notes) - MOST_LINES
    if others > 0:
        yield f"and {others} more in the report"
