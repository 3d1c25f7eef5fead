"""Draw reports as markdown: of a run (verdict, matrix, failures, environment and folded tables), and of trainings."""

from __future__ import annotations

import importlib.util
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from parity import shown
from parity.judge.limits import MARGIN, describe
from parity.report import failure, formats
from parity.report.environment import Environment, limits_in_words, limits_table
from parity.report.numbers import markdown_table, plural, seeds, short
from parity.report.record import (
    FAILED,
    PASSED,
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
from parity.report.templates import render
from parity.result import Determinism, Finding, Result, Status, TensorResult
from parity.shown import few_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from parity.trainings.band import Band


# A finding's repair, shown as a change of lines: the current ones, and those to write instead.


# A keyword argument and its value, as in code.
_ARGUMENT = re.compile(
    r"(?<![\w.])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\([^()]*\)|-?\d[\d.]*(?:e[+-]?\d+)?|[A-Za-z_][\w.]*)"
)


@dataclass(frozen=True)
class Repair:
    """Describe a change to the user's code.

    Attributes:
        sentence: the change in words.
        now: the current lines of code; perhaps none, since a default need not be written.
        then: the lines of code as they should be; empty if the finding names none.
    """

    sentence: str
    now: tuple[str, ...] = ()
    then: tuple[str, ...] = ()

    @property
    def to_copy(self) -> str:
        """Return the lines as they should be or, if there are none, the sentence."""
        return "\n".join(self.then) or self.sentence


def repair(finding: Finding) -> Repair:
    """Return a finding's repair, with the finding's lines or, if it has none, the arguments that its sentence names.

    A sentence such as ``pass normalization="RMSNorm"; TE subtracts the mean`` first says what to write, then what the
    code does now.
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


# The part of a run that a report keeps, however long the run is: counts of everything, and the items worth a look.
#
# Nobody reads the tables of 100,000 results, and memory should not grow with them. So beyond ``MOST_RESULTS``, only the
# worst items of each case and precision are kept. The record has all of them.


MOST_RESULTS = 1_000
# The count may exceed the maximum by this much, so that not every new item causes a cut.
_SLACK = MOST_RESULTS // 8


@dataclass
class _Cell:
    """The items of one case at one precision, by name."""

    items: dict[str, Item] = field(default_factory=dict)

    def cut(self, most: int) -> None:
        """Keep only the worst items, at most this many."""
        if len(self.items) > most:
            worst = sorted(self.items.items(), key=lambda entry: _rank_item(entry[1]))[:most]
            self.items = dict(worst)

    @property
    def results(self) -> int:
        return sum(len(item.results) for item in self.items.values())


@dataclass
class Digest:
    """A run as its report shows it. It grows item by item.

    Attributes:
        environment: where and with which software the run was made.
        counts: how many items have each status, including items that are not kept.
        notes: how many items have each note, including items that are not kept.
        equals: how many items equal each precision without a recipe, since nothing in them was quantized.
        uncollected: the pairs and files of which nothing was compared, by id.
        left_out: how many lines of the record could not be read.
    """

    environment: Environment
    counts: Counter[Status] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    equals: Counter[str] = field(default_factory=Counter)
    uncollected: dict[str, Uncollected] = field(default_factory=dict)
    left_out: int = 0
    _cells: dict[tuple[str, str, str], _Cell] = field(default_factory=dict)  # by file, case and precision
    _shapes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    _results: int = 0
    _most: int = MOST_RESULTS  # how many items of a cell are kept

    def add(self, results: Sequence[Result]) -> None:
        """Add an item, or more results of an item.

        Args:
            results: at least one result of a single item, each for another seed.
        """
        first = results[0]
        cell = self._cells.setdefault((first.path, first.case, first.precision), _Cell())
        before = cell.items.get(first.item)
        if before is not None:
            self.counts[before.status] -= 1
        earlier = before.results if before else ()
        self.notes.update(note for note in _notes_of(results) if note not in _notes_of(earlier))
        together = (*earlier, *(_trim_result(result, self._shapes) for result in results))
        cell.items[first.item] = item = Item(tuple(sorted(together, key=lambda result: result.seed)))
        self.counts[item.status] += 1
        self.equals[item.equals] += before is None
        self._results += len(results)
        if self._results > MOST_RESULTS + _SLACK:
            self._keep_worst_items()

    @property
    def complete(self) -> bool:
        """Return whether everything that the run was to compare has a result."""
        return not (self.missing or self.uncollected or self.left_out)

    @property
    def failed(self) -> int:
        """Return how many items failed, or could not be compared."""
        return self.counts["failed"] + self.counts["error"]

    @property
    def skips(self) -> Counter[str]:
        """Return why items were skipped, with the number of items."""
        return Counter(item.results[0].reason for item in self.items if item.status == "skipped")

    @property
    def compared_nothing(self) -> bool:
        """Return whether there are items, all of which were skipped."""
        return 0 < self.counts["skipped"] == self.counts.total()

    @property
    def missing(self) -> int:
        """Return how many items of the run have no result."""
        return max(self.environment.items - self.counts.total(), 0)

    @property
    def items(self) -> list[Item]:
        """The items that are kept, in an order that does not depend on the workers' speed."""
        if self._results > MOST_RESULTS:
            self._keep_worst_items()
        return in_order(item for cell in self._cells.values() for item in cell.items.values())

    def _keep_worst_items(self) -> None:
        """Keep so few items of each cell that at most ``MOST_RESULTS`` results remain, but at least one item."""
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


def _trim_result(result: Result, shapes: dict[tuple[int, ...], tuple[int, ...]]) -> Result:
    """Return a result without the parts that no report shows, which take most of its memory.

    If the result passed, these parts are its checks, its digests, and all but two of the expected errors.

    Args:
        result: the result from a line of the record, which shares no names and shapes with others.
        shapes: the shapes of earlier results, which are reused.
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


def _rank_item(item: Item) -> tuple[int, float, str]:
    """Return a sort key that is smaller for worse items."""
    status, margin = item.severity
    return -status, -margin, item.name


# Draw the report.


_COLUMNS = ("precision", "size", "tensor", *failure.FIGURES, "margin")
_TEXT_COLUMNS = 3


@dataclass(frozen=True)
class _Failure:
    """What the report tells of an item that failed, or could not be compared."""

    item: Item
    verdict: str
    findings: list[Finding]
    repairs: list[str]
    headline: str
    details: list[str]
    command: str


@dataclass(frozen=True)
class _Case:
    """What the report tells of a case: its worst item, and tables of its trainings and tensors."""

    worst: Item
    verdict: str
    fp32: tuple[Item, TensorResult] | None
    attention: dict[str, list[str]]
    formats: str
    trainings: str
    tensors: str


@dataclass(frozen=True)
class _Report:
    """What ``report.md.jinja`` shows of a run. Tables are markdown."""

    name: str
    verdict: str
    matrix: str
    margin: str
    tolerance: str
    has_fp32: bool
    uncollected: Collection[Uncollected]
    failures: list[_Failure]
    environment: str
    limits: str
    skips: dict[str, list[Item]]
    notes: dict[str, list[str]]
    determinism: dict[str, list[Item]]
    count: int
    omitted: int
    cases: list[_Case]


def draw(run: Digest, name: str) -> str:
    """Return the whole report as GitHub markdown.

    Args:
        run: the run that it shows.
        name: the report's name, for its title.
    """
    items, limits = run.items, run.environment.limits
    compared = [item for item in items if item.worst.tensors]
    report = _Report(
        name=name,
        verdict=verdict(run),
        matrix=draw_matrix(items),
        margin=MARGIN,
        tolerance=describe(),
        has_fp32=any(item.precision == "fp32" for item in items),
        uncollected=run.uncollected.values(),
        failures=[_describe_failure(item, limits) for item in items if item.status in ("failed", "error")],
        environment=_tabulate_environment(run.environment),
        limits=limits_table(run.environment.limits_compared),
        skips=_group_items(items, lambda item: [item.results[0].reason] if item.status == "skipped" else []),
        notes=_group_notes(run),
        determinism=_group_items(
            items, lambda item: [result.determinism.summary for result in item.results if result.determinism]
        ),
        count=run.counts.total(),
        omitted=run.counts.total() - len(items),
        cases=[
            _describe_case([item for item in compared if item.case == case])
            for case in dict.fromkeys(item.case for item in compared)
        ],
    )
    return render("report/report.md.jinja", report=report, same_bytes=Determinism().summary)


def verdict(run: Digest, prose: Callable[[str], str] = shown.prose) -> str:
    """Sum up the run in one line; ``prose`` quotes text for the medium, which is markdown by default."""
    items, counts = run.items, run.counts
    ran = counts.total() - counts["skipped"]
    if run.failed:
        worst = _describe_worst([item for item in items if item.status == "failed"])
        head = f"{FAILED} {run.failed} of {plural(ran, 'item')} failed{worst}"
    elif ran:
        worst = _describe_worst([item for item in items if item.status == "passed"])
        head = f"{PASSED if run.complete else '⚠️'} {ran} of {plural(ran, 'item')} passed{worst}"
    else:
        head = "⚠️ nothing was compared"
    kernels = "real kernels" if run.environment.backend == "gpu" else "emulated kernels"
    told = limits_in_words(run.environment.limits, run.environment.limits_compared)
    return "; ".join([head, *map(prose, _not_compared(run)), kernels, *([f"limits of {prose(told)}"] if told else [])])


def _not_compared(run: Digest) -> Iterator[str]:
    """Yield how many items have another precision's numbers, and how many items, pairs and files have none."""
    for equals, count in run.equals.items():
        if equals:
            yield f"{plural(count, 'item')}{equals}, since nothing in them is quantized"
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


def _describe_worst(items: Sequence[Item]) -> str:
    """Return a text with the largest margin among the items; empty if no verdict rests on one."""
    worst = max((item for item in items if item.margin), key=lambda item: item.severity, default=None)
    return f", worst margin {worst.margin} at {shown.code(worst.name)}" if worst else ""


def _tabulate_environment(environment: Environment) -> str:
    rows = {name: shown.prose(value) for name, value in environment.facts.items()}
    rows["kernels"] = f"**{shown.prose(environment.kernels)}**"
    rows["seeds"] = seeds(environment.seeds)
    if environment.golden:
        rows["golden in FP64"] = shown.prose(environment.golden)
    return markdown_table(rows.items(), ["environment", ""])


def _describe_failure(item: Item, limits: str) -> _Failure:
    findings = failure.findings(item)
    headline, *more = failure.headline(item).split("\n")
    return _Failure(
        item=item,
        verdict=verdict_of(item),
        findings=findings,
        repairs=_list_repairs(findings),
        headline=headline,
        details=[*more, *failure.measures(item.worst)],
        command=failure.reproduce(item.worst, limits),
    )


def _list_repairs(findings: Sequence[Finding]) -> list[str]:
    """Return the lines of code that the findings would change, with signs as in a diff."""
    lines = []
    for one in dict.fromkeys(repair(finding) for finding in findings):
        lines += [f"- {line}" for line in one.now if one.then] + [f"+ {line}" for line in one.then]
    return lines


def _group_items(items: Iterable[Item], texts_of: Callable[[Item], Iterable[str]]) -> dict[str, list[Item]]:
    """Return each text with the items that it is told of."""
    found: dict[str, list[Item]] = {}
    for item in items:
        for text in dict.fromkeys(texts_of(item)):
            found.setdefault(text, []).append(item)
    return found


def _group_notes(run: Digest) -> dict[str, list[str]]:
    """Return each note with the items that have it, those that are not shown as a count."""
    by_note = _group_items(run.items, lambda item: _notes_of(item.results))
    found = {note: [shown.code(item.name) for item in items] for note, items in by_note.items()}
    for note, count in run.notes.items():
        names = found.setdefault(note, [])
        if others := count - len(names):
            names.append(f"{plural(others, 'item')} not shown here")
    return found


def _describe_case(items: Sequence[Item]) -> _Case:
    worst = max(items, key=lambda item: item.severity)
    many_seeds = any(len(item.results) > 1 for item in items)
    trained = [result for item in items for result in item.results if result.steps]
    by_backend = _group_items(items, lambda item: [result.attention for result in item.results if result.attention])
    headers = [*_COLUMNS, "worst seed"] if many_seeds else list(_COLUMNS)
    return _Case(
        worst=worst,
        verdict=verdict_of(worst),
        fp32=_find_fp32_output(items),
        attention={
            backend: [item.name.removeprefix(item.case).strip("[]") for item in ran]
            for backend, ran in by_backend.items()
        },
        formats=_tabulate_formats(items),
        trainings=summary(trained) if trained else "",
        tensors=markdown_table([row for item in items for row in _make_rows(item, many_seeds)], headers, _TEXT_COLUMNS),
    )


def _tabulate_formats(items: Sequence[Item]) -> str:
    """Return a table of the formats of operands at each precision; empty if none were watched."""
    rows = {
        (shown.prose(precision), shown.code(modules), *map(shown.prose, products)): None
        for precision in precisions(items)
        for modules, *products in formats.format_rows(
            result for item in items if item.precision == precision for result in item.results
        )
    }
    return markdown_table(rows, ("precision", *formats.COLUMNS), left=1 + len(formats.COLUMNS)) if rows else ""


def _find_fp32_output(items: Sequence[Item]) -> tuple[Item, TensorResult] | None:
    """Return the FP32 output with the largest expected error, because people expect no TF32 and suspect a mistake."""
    outputs = [
        (item, tensor)
        for item in items
        for tensor in item.worst.tensors
        if item.precision == "fp32" and tensor.kind == "output"
    ]
    return max(outputs, key=lambda pair: pair[1].expected.relative_l2, default=None)


def _make_rows(item: Item, many_seeds: bool) -> Iterator[list[str]]:
    """Yield a row for each tensor, at its worst seed. If the item passed, yield only the worst tensor's row."""
    worst: Sequence[AtWorst] = worst_of_each_tensor(item)
    if item.status == "passed":
        worst = [max(worst, key=lambda one: one.tensor.margin)]
    for one in worst:
        yield _make_row(one.result, one.tensor) + ([f"{one.result.seed} of {one.seeds}"] if many_seeds else [])


def _make_row(result: Result, tensor: TensorResult) -> list[str]:
    return [
        shown.prose(result.precision),
        shown.prose("-".join(filter(None, (result.size_label, result.forced_attention)))),
        shown.code(tensor.label),
        *failure.figures(tensor),
        f"{PASSED if tensor.passed else FAILED} {short(tensor.margin)}",
    ]


# Trainings: the loss at each step next to the reference's, and how near each step is to its limit.


@dataclass(frozen=True)
class Curve:
    """A training, and the band of right trainings.

    Attributes:
        result: the result of the candidate's training.
        band: the band of the losses of right trainings; None if none was drawn.
    """

    result: Result
    band: Band | None = None


def left(curve: Curve) -> str:
    """Return a text on where a training leaves its band; empty if it does not."""
    band = curve.band
    if band is None:
        return ""
    told = [f"the loss leaves its band at step {band.loss_left.step}"] if band.loss_left else []
    if band.weights_left:
        names = band.weights_left.where
        told.append(
            f"after step {band.weights_left.step}, {few_of(names)} {'is' if len(names) == 1 else 'are'} "
            "farther from the training in FP64 than right trainings are"
        )
    return "; ".join(told)


def over_seeds(curves: Sequence[Curve]) -> str:
    """Return a table of how far the last losses deviate over a training's seeds; empty if each has only one seed.

    A right training's deviation has Student's t-distribution with as many degrees of freedom as there are drawn
    trainings, so its variance is ``n / (n - 2)``.
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
    """Return a table with a row for each training: its first and last loss, and its largest margin."""
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
    """Write the report and, if matplotlib is installed, its plot next to it. Return the plot's path, or None."""
    plot = path.with_suffix(".png") if importlib.util.find_spec("matplotlib") else None
    path.parent.mkdir(parents=True, exist_ok=True)
    if plot is not None:
        drawn(curves).savefig(plot, dpi=110)
    report = render(
        "report/trainings.md.jinja",
        emulated=any(curve.result.backend == "cpu" for curve in curves),
        summary=summary([curve.result for curve in curves]),
        drawn=max((curve.band.drawn for curve in curves if curve.band is not None), default=0),
        over_seeds=over_seeds(curves),
        plot=plot.name if plot is not None else "",
        trainings=[(curve.result, left(curve), _tabulate_steps(curve)) for curve in curves],
    )
    path.write_text(report, encoding="utf-8")
    return plot


def _tabulate_steps(curve: Curve) -> str:
    steps = curve.result.steps
    columns: dict[str, Sequence[float]] = {
        "loss": [step.loss for step in steps],
        "reference": [step.golden for step in steps],
    }
    if curve.band is not None:
        columns.update({"its own": curve.band.free, "low": curve.band.low, "high": curve.band.high})
    losses = zip(*columns.values(), strict=False)
    rows = [
        (step.number, *(f"{loss:.6g}" for loss in some), short(step.margin), *filter(None, [step.precision]))
        for step, some in zip(steps, losses, strict=False)
    ]
    return markdown_table(rows, ("step", *columns, "margin", *(["precision"] if steps[0].precision else [])))


def drawn(curves: Sequence[Curve]) -> Figure:
    """Return the plot: losses above, with the reference's own training and the band; margins below, with the limit."""
    from matplotlib.figure import Figure  # here, because the report does not need it

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
