"""Draw reports as markdown: a run's verdict, matrix, failures, environment and what is folded below, and trainings."""

from __future__ import annotations

import importlib.util
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from parity import shown
from parity.judge.limits import MARGIN, describe
from parity.report import failure
from parity.report.environment import Environment, limits_in_words, limits_section
from parity.report.numbers import markdown_table, plural, seeds, short
from parity.report.record import (
    ERROR,
    FAILED,
    PASSED,
    SKIPPED,
    WORST_FIRST,
    AtWorst,
    Item,
    Record,
    Uncollected,
    draw_matrix,
    in_order,
    precisions,
    verdict_of,
    worst_of_each_tensor,
)
from parity.result import Determinism, Finding, Result, Status, TensorResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from parity.judge.band import Band


# A run.


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
        named = f" ({shown.prose(', '.join(at))})" if at else ""
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
            yield summary(trained)
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


# Trainings: the losses of each step beside the reference's, and how near each step is to its limit.


@dataclass(frozen=True)
class Curve:
    """A training, and where right ones lie.

    Attributes:
        result: of the candidate's training.
        band: of right trainings' losses; None if none was drawn.
    """

    result: Result
    band: Band | None = None


def left(curve: Curve) -> str:
    """Say where a training leaves its band; an empty text if it does not."""
    band = curve.band
    if band is None:
        return ""
    told = [f"the loss leaves its band at step {band.loss_left.step}"] if band.loss_left else []
    if band.weights_left:
        names = band.weights_left.where
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        told.append(
            f"after step {band.weights_left.step}, {', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'} "
            "farther from the training in FP64 than right trainings are"
        )
    return "; ".join(told)


def over_seeds(curves: Sequence[Curve]) -> str:
    """Return a table of how the last losses of a training's seeds lie; an empty text if each has one seed.

    A right training's deviation has Student's distribution, with as many degrees of freedom as there are drawn
    trainings: its variance is ``n / (n - 2)``.
    """
    groups: dict[str, list[Band]] = {}
    for curve in curves:
        if curve.band is not None and curve.band.drawn > 2:
            groups.setdefault(curve.result.item, []).append(curve.band)
    rows = []
    for item, bands in groups.items():
        if len(bands) > 1:
            variance = statistics.fmean(band.drawn / (band.drawn - 2) for band in bands)
            mean = statistics.fmean(band.deviation for band in bands)
            size = math.sqrt(statistics.fmean(band.deviation**2 for band in bands))
            expected = f"0 ± {short(math.sqrt(variance / len(bands)))}"
            rows.append((shown.code(item), len(bands), short(mean), expected, short(size), short(math.sqrt(variance))))
    columns = ("training", "seeds", "mean deviation", "expected", "root mean square", "expected")
    return markdown_table(rows, columns, left=1) if rows else ""


def summary(results: Sequence[Result]) -> str:
    """Return a table with a row for each training: where its loss goes, and its largest margin."""
    rows = []
    for result in results:
        if result.steps:
            worst = max(result.steps, key=lambda step: step.margin)
            losses = f"{result.steps[0].loss:.5g} to {result.steps[-1].loss:.5g}"
            rows.append(
                (
                    shown.code(result.item),
                    result.seed,
                    result.status,
                    len(result.steps),
                    losses,
                    short(worst.margin),
                    worst.number,
                )
            )
    return markdown_table(rows, ("training", "seed", "status", "steps", "loss", "largest margin", "at step"), left=3)


def write(curves: Sequence[Curve], path: Path) -> Path | None:
    """Write the report, markdown, and its plot beside it if matplotlib is installed; return the plot's path."""
    plot = path.with_suffix(".png") if importlib.util.find_spec("matplotlib") else None
    path.parent.mkdir(parents=True, exist_ok=True)
    if plot is not None:
        drawn(curves).savefig(plot, dpi=110)
    path.write_text(shown.text("\n\n".join(_sections(curves, plot)) + "\n"), encoding="utf-8")
    return plot


def _sections(curves: Sequence[Curve], plot: Path | None) -> Iterator[str]:
    yield "# Trainings"
    backends = {curve.result.backend for curve in curves}
    if "cpu" in backends:
        yield "TE's kernels here are emulated: TransformerEngine's own Python on parity's CPU kernels."
    yield (
        "*reference* is the loss that the reference in FP64 has with the candidate's weights and batch: the same step. "
        "*its own* is the loss of the reference's own training, from which right trainings drift away by chance; *low* "
        "and *high* are how far. *margin* is the largest of the step's tensors; up to 1 passes, whatever the band says."
    )
    yield summary([curve.result for curve in curves])
    if drawn_from := {curve.band.drawn for curve in curves if curve.band is not None}:
        yield (
            f"Bands are drawn from {max(drawn_from)} trainings of each reference under the precision's rounding model, "
            "with roundings that are drawn anew for each step. A right training whose errors are those of the model "
            "leaves its band at some step once in 20 times. A deviation is that of the last loss, over the root mean "
            "square of those trainings'."
        )
    if together := over_seeds(curves):
        yield together
    if plot is not None:
        yield f"![losses and margins]({plot.name})"
    for curve in curves:
        result = curve.result
        yield f"## {shown.prose(result.item)}, seed {result.seed}: {result.status}"
        if result.reason:
            yield shown.prose(f"{result.reason[:1].upper()}{result.reason[1:]}.")
        for finding in result.findings:
            yield f"- **{shown.prose(finding.name)}**: {shown.prose(finding.message)}"
        if told := left(curve):
            yield shown.prose(f"{told[:1].upper()}{told[1:]}.")
        columns: list[tuple[str, Sequence[float]]] = [
            ("loss", [step.loss for step in result.steps]),
            ("reference", [step.golden for step in result.steps]),
        ]
        if curve.band is not None:
            columns += [("its own", curve.band.free), ("low", curve.band.low), ("high", curve.band.high)]
        losses = zip(*(numbers for _, numbers in columns), strict=False)
        rows = [
            (step.number, *(f"{loss:.6g}" for loss in some), short(step.margin))
            for step, some in zip(result.steps, losses, strict=False)
        ]
        yield markdown_table(rows, ("step", *(name for name, _ in columns), "margin"))


def drawn(curves: Sequence[Curve]) -> Figure:
    """Return the plot: losses above, with the reference's own training and the band; margins below, with the limit."""
    from matplotlib.figure import Figure  # the report can be had without

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, margins = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for curve in curves:
        numbers = [step.number for step in curve.result.steps]
        label = f"{curve.result.item}, seed {curve.result.seed}"
        line = losses.plot(numbers, [step.loss for step in curve.result.steps], label=label)[0]
        if curve.band is not None:
            losses.plot(numbers, curve.band.free, ":", color=line.get_color())
            losses.fill_between(numbers, curve.band.low, curve.band.high, color=line.get_color(), alpha=0.2)
        margins.plot(numbers, [step.margin for step in curve.result.steps], ".-", color=line.get_color())
    margins.axhline(1.0, color="black", linewidth=0.8)
    losses.set(ylabel="loss (dotted: the reference's own training; shaded: right ones)")
    margins.set(xlabel="step", ylabel="margin (1 is the limit)")
    losses.legend(fontsize="small")
    return figure
