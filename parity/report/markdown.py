"""Draw the report of a run as markdown: verdict, matrix, failures, environment, and what is folded below them."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from parity import shown
from parity.judge.limits import MARGIN, describe
from parity.report import failure, trainings
from parity.report.environment import Environment, limits_in_words, limits_section
from parity.report.items import (
    ERROR,
    FAILED,
    PASSED,
    SKIPPED,
    WORST_FIRST,
    AtWorst,
    Item,
    draw_matrix,
    in_order,
    precisions,
    verdict_of,
    worst_of_each_tensor,
)
from parity.report.numbers import markdown_table, plural, seeds, short
from parity.report.record import Record, Uncollected
from parity.result import Determinism, Finding, Result, Status, TensorResult

# Show a finding's repair as a change of lines: what to write, and what stands there now.


# A keyword and its value, as in code.
_ARGUMENT = re.compile(
    r"(?<![\w.])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\([^()]*\)|-?\d[\d.]*(?:e[+-]?\d+)?|[A-Za-z_][\w.]*)"
)


@dataclass(frozen=True)
class Repair:
    """Say what to change in the user's code.

    Attributes:
        sentence: in words.
        now: lines of code as they are; there may be none, since a default is not written.
        then: lines of code as they should be; none where the finding names none.
    """

    sentence: str
    now: tuple[str, ...] = ()
    then: tuple[str, ...] = ()

    @property
    def to_copy(self) -> str:
        """Return the lines as they should be, or else the sentence."""
        return "\n".join(self.then) or self.sentence


def repair(finding: Finding) -> Repair:
    """Return a finding's repair, with the lines that the finding has, or else the arguments that its sentence names.

    A sentence is such as ``pass normalization="RMSNorm"; TE subtracts the mean``: first what to write, then what is.
    """
    if finding.then:
        return Repair(finding.repair, finding.now, finding.then)
    to_do, _, known = finding.repair.partition("; ")
    now, then = dict(_ARGUMENT.findall(known)), dict(_ARGUMENT.findall(to_do))
    return Repair(
        finding.repair,
        tuple(f"{name}={value}" for name, value in now.items() if name in then),
        tuple(f"{name}={value}" for name, value in then.items()),
    )


# What a report keeps of a run, however long: counts of everything, and the items that are worth a look.
#
# Nobody reads the tables of 100,000 results, and memory should not grow with them. So beyond ``MOST_RESULTS``, only the
# worst items of each case and precision are kept. The record has them all.


MOST_RESULTS = 1_000
# How far beyond this the count may grow, so that not every new item leads to a cut.
_SLACK = MOST_RESULTS // 8


@dataclass
class _Cell:
    """Items of one case at one precision, by name."""

    items: dict[str, Item] = field(default_factory=dict)

    def cut(self, most: int) -> None:
        """Keep the worst."""
        if len(self.items) > most:
            worst = sorted(self.items.items(), key=lambda entry: _severity(entry[1]))[:most]
            self.items = dict(worst)

    @property
    def results(self) -> int:
        return sum(len(item.results) for item in self.items.values())


@dataclass
class Digest:
    """A run as its report shows it; it grows item by item.

    Attributes:
        environment: where and with what it was made.
        counts: how many items there are of each status, also of those that are not kept.
        notes: how many items have each note, also of those that are not kept.
        uncollected: pairs and files of which nothing was compared, by id.
        left_out: how many lines of its record could not be read.
    """

    environment: Environment
    counts: Counter[Status] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    uncollected: dict[str, Uncollected] = field(default_factory=dict)
    left_out: int = 0
    _cells: dict[tuple[str, str, str], _Cell] = field(default_factory=dict)  # by file, case and precision
    _shapes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    _results: int = 0
    _most: int = MOST_RESULTS  # how many items of a cell are kept

    def add(self, results: Sequence[Result]) -> None:
        """Add an item, or more results of one.

        Args:
            results: those of one item, at least one; one for each seed.
        """
        first = results[0]
        cell = self._cells.setdefault((first.path, first.case, first.precision), _Cell())
        before = cell.items.get(first.item)
        if before is not None:
            self.counts[before.status] -= 1
        earlier = before.results if before else ()
        self.notes.update(note for note in _notes_of(results) if note not in _notes_of(earlier))
        together = (*earlier, *(_shown(result, self._shapes) for result in results))
        cell.items[first.item] = item = Item(tuple(sorted(together, key=lambda result: result.seed)))
        self.counts[item.status] += 1
        self._results += len(results)
        if self._results > MOST_RESULTS + _SLACK:
            self._cut()

    @property
    def complete(self) -> bool:
        """Return whether everything that the run was to compare has a result."""
        return not (self.missing or self.uncollected or self.left_out)

    @property
    def failed(self) -> int:
        """Return how many items failed, or could not be compared."""
        return self.counts["failed"] + self.counts["error"]

    @property
    def missing(self) -> int:
        """Return how many items of the run have no result."""
        return max(self.environment.items - self.counts.total(), 0)

    @property
    def items(self) -> list[Item]:
        """The items that are kept, in an order that does not depend on which worker was faster."""
        if self._results > MOST_RESULTS:
            self._cut()
        return in_order(item for cell in self._cells.values() for item in cell.items.values())

    def _cut(self) -> None:
        """Keep as many of each cell as leave ``MOST_RESULTS`` in all, and at least one."""
        while True:
            for cell in self._cells.values():
                cell.cut(self._most)
            self._results = sum(cell.results for cell in self._cells.values())
            if self._results <= MOST_RESULTS or self._most == 1:
                return
            self._most //= 2


def digest(record: Record) -> Digest:
    """Return the digest of a run that was read back."""
    of_pairs = {each.node_id: each for each in record.uncollected}
    found = Digest(record.environment, uncollected=of_pairs, left_out=len(record.left_out))
    by_item: dict[str, list[Result]] = {}
    for result in record.results:
        by_item.setdefault(f"{result.path}::{result.item}", []).append(result)
    for results in by_item.values():
        found.add(results)
    return found


def _shown(result: Result, shapes: dict[tuple[int, ...], tuple[int, ...]]) -> Result:
    """Return a result without what no report shows, which is most of its memory: of one that passed, its checks, and
    what else than two of its errors is expected.

    Args:
        result: as a line of the record has it, with names and shapes of its own.
        shapes: those of earlier results, which are shared.
    """
    if not result.passed:
        return result
    return replace(result, tensors=tuple(_shown_tensor(tensor, shapes) for tensor in result.tensors))


def _shown_tensor(tensor: TensorResult, shapes: dict[tuple[int, ...], tuple[int, ...]]) -> TensorResult:
    expected = replace(tensor.expected, max_ulps=0.0, cosine=0.0, sqnr_db=0.0, golden_rms=0.0)
    shape = shapes.setdefault(tensor.shape, tensor.shape)
    return replace(tensor, name=sys.intern(tensor.name), shape=shape, expected=expected, checks=(), digest="")


def _notes_of(results: Sequence[Result]) -> dict[str, None]:
    return dict.fromkeys(note for result in results for note in result.notes)


def _severity(item: Item) -> tuple[int, float, str]:
    """Return a sort key that is smaller for worse items."""
    margin = item.worst.margin
    return WORST_FIRST.index(item.status), 0.0 if math.isnan(margin) else -margin, item.name


# Draw the report.


_COLUMNS = ("precision", "size", "tensor", *failure.FIGURES, "margin")
_TEXT_COLUMNS = 3


def draw(run: Digest, name: str) -> str:
    """Return the whole report as GitHub markdown.

    Args:
        run: what it shows.
        name: the report's name, for its title.
    """
    items = run.items
    failed = [item for item in items if item.status in ("failed", "error")]
    skipped = [item for item in items if item.status == "skipped"]
    sections = [
        f"# Parity report: {shown.prose(name)}",
        f"**{verdict(run)}**",
        "## Cases by precision",
        draw_matrix(items),
        *_how_to_read(items),
        *_uncollected(run),
        *_failures(failed, run.environment.limits),
        "## Environment",
        _environment(run.environment),
        *limits_section(run.environment.limits_compared),
        *_skips(skipped),
        *_notes(run, items),
        *_determinism([result for item in items for result in item.results]),
        "## Case by case",
        *_omitted(run),
        *_cases(items),
    ]
    return shown.text("\n\n".join(sections) + "\n")


def verdict(run: Digest) -> str:
    """Sum up the run in one line."""
    items, counts = run.items, run.counts
    ran = counts.total() - counts["skipped"]
    if run.failed:
        # A training may fail though the errors of all its tensors are within their limits: by its optimizer's step.
        worst = _worst([item for item in items if item.status in ("failed", "error") and not item.worst.margin <= 1.0])
        head = f"{FAILED} {run.failed} of {plural(ran, 'item')} failed{worst}"
    elif ran:
        worst = _worst([item for item in items if item.status == "passed"])
        head = f"{PASSED if run.complete else '⚠️'} {ran} of {plural(ran, 'item')} passed{worst}"
    else:
        head = "⚠️ nothing was compared"
    kernels = "real kernels" if run.environment.backend == "gpu" else "emulated kernels"
    told = limits_in_words(run.environment.limits, run.environment.limits_compared)
    return "; ".join([head, *_not_compared(run), kernels, *([f"limits of {shown.prose(told)}"] if told else [])])


def _not_compared(run: Digest) -> Iterator[str]:
    """Yield how many items, pairs and files have no numbers, for each reason."""
    if run.counts["skipped"]:
        at = precisions([item for item in run.items if item.status == "skipped"])
        named = f" ({', '.join(at)})" if at else ""
        yield f"{run.counts['skipped']} skipped{named}"
    if run.missing:
        yield f"{plural(run.missing, 'item')} without a result: the run was cut short or a worker crashed"
    if run.left_out:
        yield f"{plural(run.left_out, 'line')} of the record left out"
    pairs = sum("::" in node_id for node_id in run.uncollected)
    counts = {"pair": pairs, "file": len(run.uncollected) - pairs}
    told = [plural(count, noun) for noun, count in counts.items() if count]
    if told:
        yield f"{' and '.join(told)} not collected"


def _worst(items: Sequence[Item]) -> str:
    """Return the largest margin among items that were compared."""
    compared = [item for item in items if item.worst.tensors]
    if not compared:
        return ""
    worst = max(compared, key=lambda item: item.worst.margin)
    return f", worst margin {short(worst.worst.margin)} at {shown.code(worst.name)}"


def _environment(environment: Environment) -> str:
    rows = {name: shown.prose(value) for name, value in environment.facts.items()}
    rows["kernels"] = f"**{shown.prose(environment.kernels)}**"
    rows["seeds"] = seeds(environment.seeds)
    if environment.golden:
        rows["golden in FP64"] = shown.prose(environment.golden)
    return markdown_table(rows.items(), ["environment", ""])


def _how_to_read(items: Sequence[Item]) -> Iterator[str]:
    yield (
        f"A cell holds the worst **margin** over all sizes, seeds and tensors: {MARGIN}. "
        f"Up to 1 passes ({PASSED}), above 1 fails ({FAILED}); {ERROR} could not be compared, "
        f"{SKIPPED} was skipped, an empty cell was not asked for."
    )
    lines = [
        "- **golden**: the plain PyTorch reference in FP64, on the same rounded weights and inputs.",
        "- **expected**: the error of that reference under the precision's rounding model: what a faithful port costs.",
        f"- **tolerance**: {describe()}",
        "- Errors are those of the TransformerEngine module against golden, in outputs, input gradients and weight "
        "gradients, all in the reference's layout.",
    ]
    if any(item.precision == "fp32" for item in items):
        lines.append(
            "- **fp32**: TransformerEngine computes every FP32 GEMM in TF32 (10 mantissa bits), so a faithful port has "
            "the error of TF32, far above that of true FP32."
        )
    yield "<details>\n<summary>What the words mean</summary>"
    yield "\n".join(lines)
    yield "</details>"


def _uncollected(run: Digest) -> Iterator[str]:
    """Yield what the tables lack, and why."""
    if run.uncollected:
        yield "## Not collected"
        yield "None of these was compared; fix what is wrong with them first."
    for each in run.uncollected.values():
        yield f"{shown.code(each.node_id)}:"
        yield shown.fence(each.message.splitlines())


def _failures(failed: Sequence[Item], table: str) -> Iterator[str]:
    if failed:
        yield "## Failed"
    for item in failed:
        yield f"### {verdict_of(item)} {shown.code(item.name)}"
        findings = failure.findings(item)
        if findings:
            yield "\n".join(
                f"- **{shown.prose(finding.name)}**: {shown.prose(finding.message)}" for finding in findings
            )
            yield from _repairs(findings)
        yield shown.fence([failure.headline(item), *failure.measures(item.worst)])
        if item.worst.traceback:
            yield "<details>\n<summary>Traceback</summary>"
            yield shown.fence(item.worst.traceback.splitlines())
            yield "</details>"
        yield "Run it alone:"
        yield shown.fence([failure.reproduce(item.worst, table)])


def _repairs(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines that findings would change, where they name lines."""
    lines = []
    for one in dict.fromkeys(repair(finding) for finding in findings):
        lines += [f"- {line}" for line in one.now if one.then] + [f"+ {line}" for line in one.then]
    if lines:
        yield shown.fence(lines)


def _skips(skipped: Sequence[Item]) -> Iterator[str]:
    if not skipped:
        return
    yield "## Skipped"
    by_reason: dict[str, list[str]] = {}
    for item in skipped:
        by_reason.setdefault(item.results[0].reason, []).append(shown.code(item.name))
    yield "\n".join(f"- {shown.prose(reason)}: {', '.join(names)}" for reason, names in by_reason.items())


def _notes(run: Digest, items: Sequence[Item]) -> Iterator[str]:
    """Yield what comparisons leave unproven, each sentence once, also for items that are not shown."""
    by_note: dict[str, dict[str, None]] = {}
    for item in items:
        for note in (note for result in item.results for note in result.notes):
            by_note.setdefault(note, {})[shown.code(item.name)] = None
    for note in run.notes:
        by_note.setdefault(note, {})
    if by_note:
        yield "## Notes"
        yield "\n".join(f"- {shown.prose(note)} ({_named(names, run.notes[note])})" for note, names in by_note.items())


def _named(names: Collection[str], count: int) -> str:
    """Return the items that are shown, and how many more there are."""
    others = count - len(names)
    return ", ".join([*names, *([f"{plural(others, 'item')} not shown here"] if others else [])])


def _determinism(results: Sequence[Result]) -> Iterator[str]:
    """Yield how many candidates gave the same bytes again, and what the others did."""
    by_summary: dict[str, dict[str, None]] = {}
    for result in results:
        if result.determinism is not None:
            by_summary.setdefault(result.determinism.summary, {})[shown.code(result.item)] = None
    if by_summary:
        same = Determinism().summary
        yield "## Determinism"
        yield "Each candidate was built again, and ran on the same inputs and from the same random state."
        yield "\n".join(
            f"- {shown.prose(summary)}: {plural(len(names), 'item') if summary == same else ', '.join(names)}"
            for summary, names in by_summary.items()
        )


def _omitted(run: Digest) -> Iterator[str]:
    omitted = run.counts.total() - len(run.items)
    if omitted:
        yield (
            f"Of {run.counts.total():,} items, the worst of each case and precision are shown here and above; the "
            f"record has the other {omitted:,} as well."
        )


def _cases(items: Sequence[Item]) -> Iterator[str]:
    yield "Of items that passed, the worst tensor is shown; the page beside this file and the record have the others."
    for case in dict.fromkeys(item.case for item in items):
        of_case = [item for item in items if item.case == case and item.worst.tensors]
        if not of_case:
            continue
        worst = max(of_case, key=lambda item: item.worst.margin)
        yield "<details>"
        told = f"worst {verdict_of(worst)} at {shown.in_html(worst.precision)}"
        yield f"<summary><code>{shown.in_html(case)}</code>: {told}</summary>"
        yield from _expected_fp32(of_case)
        yield from _attention(of_case)
        many_seeds = any(len(item.results) > 1 for item in of_case)
        trained = [result for item in of_case for result in item.results if result.steps]
        if trained:
            yield trainings.summary(trained)
        rows = [row for item in of_case for row in _rows(item, many_seeds)]
        headers = [*_COLUMNS, "worst seed"] if many_seeds else list(_COLUMNS)
        yield markdown_table(rows, headers, left=_TEXT_COLUMNS)
        yield "</details>"


def _expected_fp32(items: Sequence[Item]) -> Iterator[str]:
    """Yield what TF32 costs a faithful port of this case: people expect true FP32 and take the error for a mistake."""
    outputs = [
        (item, tensor)
        for item in items
        for tensor in item.worst.tensors
        if item.precision == "fp32" and tensor.kind == "output"
    ]
    if not outputs:
        return
    item, tensor = max(outputs, key=lambda pair: pair[1].expected.relative_l2)
    expected = tensor.expected
    yield (
        f"Expected FP32 error (TF32 in GEMMs) of {shown.code(tensor.label)} at {shown.prose(item.size_label)}: "
        f"relative L2 {short(expected.relative_l2)}, max abs {short(expected.max_abs)}."
    )


def _attention(items: Sequence[Item]) -> Iterator[str]:
    """Yield which of its attention kernels TE ran, at which precision and size."""
    ran: dict[str, dict[str, None]] = {}
    for item in items:
        for backend in {result.attention: None for result in item.results if result.attention}:
            ran.setdefault(backend, {})[item.name.removeprefix(item.case).strip("[]")] = None
    if ran:
        yield (
            "Attention: "
            + "; ".join(f"{shown.prose(backend)} in {shown.prose(', '.join(where))}" for backend, where in ran.items())
            + "."
        )


def _rows(item: Item, many_seeds: bool) -> Iterator[list[str]]:
    """Yield a row for each tensor at the seed where its own margin is worst; of an item that passed, for the worst."""
    worst: Sequence[AtWorst] = worst_of_each_tensor(item)
    if item.status == "passed":
        worst = [max(worst, key=lambda one: one.tensor.margin)]
    for one in worst:
        yield _row(one.result, one.tensor) + ([f"{one.result.seed} of {one.seeds}"] if many_seeds else [])


def _row(result: Result, tensor: TensorResult) -> list[str]:
    return [
        shown.prose(result.precision),
        shown.prose("-".join(filter(None, (result.size_label, result.forced_attention)))),
        shown.code(tensor.label),
        *failure.figures(tensor),
        f"{PASSED if tensor.passed else FAILED} {short(tensor.margin)}",
    ]
