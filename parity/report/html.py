"""Draw the page of a run: a single HTML file that needs no network, and whose tables work without scripts."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from markupsafe import Markup

from parity import shown
from parity.report import failure, formats
from parity.report.changes import AS_BEFORE, Change, Comparison, Kind, growth_in_words
from parity.report.markdown import Digest, Repair, repair, verdict
from parity.report.numbers import plural, seeds, short
from parity.report.record import ERROR, FAILED, PASSED, SKIPPED, Item, precisions, worst_of_each_tensor
from parity.report.templates import render
from parity.result import Determinism, Finding, Histogram, Profile, Result, Status, TensorResult

# The content of the page as plain data.


# If a run has more tensors than this, items that passed show only their worst tensor and no plot over depth. A page of
# a few megabytes loads fast.
MOST_ROWS = 2_500
MARKS: Mapping[Status, str] = {"passed": "✓", "failed": "✕", "error": "!", "skipped": "–"}
_WORDS: Mapping[Status, str] = {
    "passed": "passed",
    "failed": "failed",
    "error": "could not be compared",
    "skipped": "skipped",
}
# The sign that begins the line of a verdict, which is written for markdown.
_SIGNS = re.compile(f"^(?:{PASSED}|{FAILED}|{ERROR}|{SKIPPED}|⚠️) ")


@dataclass(frozen=True)
class FindingView:
    """Hold a finding, and its repair if it has one."""

    finding: Finding
    repair: Repair | None


@dataclass(frozen=True)
class Pictured:
    """Hold the plots of one tensor."""

    label: str
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class ItemView:
    """An item, as its section shows it.

    Attributes:
        id: the id of its element, for links to it.
        item: its results.
        mark, word: its outcome as a sign and in words.
        margin: its margin as text; empty if its verdict does not rest on one.
        sort: its place among all items, larger for worse ones.
        headline: how far it is from passing, and where.
        findings: its findings, with their repairs.
        measures: lines about the worst tensor.
        tensors: the rows of a table with the columns ``COLUMNS``.
        left_out: how many of its tensors are missing in that table.
        pictured: plots of where its worst tensors err.
        courses: plots of its error against steps or depth.
        notes: sentences on what it leaves unproven.
        formats: the rows of a table of the formats that TE's modules computed in; none if these were not watched.
        attention: the attention backends that TE ran.
        command: the command that runs it alone.
    """

    id: str
    item: Item
    mark: str
    word: str
    margin: str
    sort: int
    headline: str
    findings: tuple[FindingView, ...]
    measures: tuple[str, ...]
    tensors: tuple[tuple[str, ...], ...]
    left_out: int
    pictured: tuple[Pictured, ...]
    courses: tuple[Plot, ...]
    notes: tuple[str, ...]
    formats: tuple[tuple[str, ...], ...]
    attention: str
    command: str

    @property
    def codes(self) -> str:
        """Return the codes and titles of its findings."""
        return " ".join(f"{each.finding.code} {each.finding.title}" for each in self.findings)


@dataclass(frozen=True)
class CellView:
    """A cell of the matrix, which shows the worst of several items.

    Attributes:
        worst: the item that it shows.
        shade: how strong its colour is, from 0 to 1.
        items: the ids of all items.
        words: a description for screen readers.
    """

    worst: ItemView
    shade: float
    items: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class RowView:
    """A row of the matrix. A cell is None if the case does not ask for the precision."""

    case: str
    ranks: str
    href: str
    cells: tuple[CellView | None, ...]
    sort: int


@dataclass(frozen=True)
class CaseView:
    """Hold all items of one case."""

    id: str
    name: str
    items: tuple[ItemView, ...]

    @property
    def failed(self) -> int:
        """Return how many of its items failed or could not be compared."""
        return sum(each.item.status in ("failed", "error") for each in self.items)


@dataclass(frozen=True)
class ChangeView:
    """The change of an item since the baseline."""

    kind: str
    name: str
    before: str
    now: str
    growth: str
    href: str


@dataclass(frozen=True)
class Page:
    """A run as its page shows it.

    Attributes:
        title: the report's name.
        good: whether everything passed.
        verdict: the verdict in one line.
        tiles: a word, a count and a status for each tile.
        environment: facts by their labels.
        columns: the precisions of the matrix.
        rows: the rows of the matrix.
        cases: the cases, with a section for each.
        codes: the code and title of each finding that occurs.
        notes: sentences, each with the number of items that have it.
        uncollected: the pairs and files that were not compared at all, each with the reason.
        omitted: how many items are only in the record.
        baseline: the older run's name; empty if there is none.
        changes: the changes since the baseline.
    """

    title: str
    good: bool
    verdict: str
    tiles: tuple[tuple[str, int, str], ...]
    environment: Mapping[str, str]
    columns: tuple[str, ...]
    rows: tuple[RowView, ...]
    cases: tuple[CaseView, ...]
    codes: tuple[str, ...]
    notes: tuple[tuple[str, str], ...]
    uncollected: tuple[tuple[str, str], ...]
    omitted: int
    baseline: str = ""
    changes: tuple[ChangeView, ...] = field(default=())

    @property
    def plots(self) -> dict[str, Plot]:
        """Return every plot, by the id of its element."""
        found = {}
        for item in (item for case in self.cases for item in case.items):
            for number, plot in enumerate(plots_of(item)):
                found[f"{item.id}.{number}"] = plot
        return found


def plots_of(item: ItemView) -> list[Plot]:
    """Return an item's plots in the order in which its section shows them."""
    return [*item.courses, *(plot for each in item.pictured for plot in each.plots)]


COLUMNS = ("tensor", *failure.FIGURES, "margin")


def page(run: Digest, name: str, runs: Comparison | None = None) -> Page:
    """Return the content of a run's page.

    Args:
        run: the run.
        name: the report's name, for its title.
        runs: the run and an older one, if the page is to show the changes; else None.
    """
    items = run.items
    in_full = sum(len(item.worst.tensors) for item in items) <= MOST_ROWS
    ids = _Ids()
    ranked = {id(item): rank for rank, item in enumerate(sorted(items, key=lambda item: item.severity))}
    views = [
        _make_item_view(item, ids, run.environment.limits, in_full or item.status != "passed", ranked[id(item)])
        for item in items
    ]
    cases = tuple(
        CaseView(ids.of(f"case-{case}"), case, tuple(view for view in views if view.item.case == case))
        for case in dict.fromkeys(view.item.case for view in views)
    )
    columns = tuple(precisions(items))
    titles = {f"{each.finding.code} {each.finding.title}" for view in views for each in view.findings}
    return Page(
        title=name,
        good=run.complete and not run.failed and run.counts["passed"] > 0,
        verdict=_SIGNS.sub("", verdict(run, shown.line)).replace("`", ""),
        tiles=_make_tiles(run),
        environment=_describe_environment(run),
        columns=columns,
        rows=tuple(_make_row_views(cases, columns)),
        cases=cases,
        codes=tuple(sorted(titles)),
        notes=tuple((note, plural(count, "item")) for note, count in run.notes.most_common()),
        uncollected=tuple((each.node_id, each.message) for each in run.uncollected.values()),
        omitted=run.counts.total() - len(items),
        baseline=runs.names[0] if runs is not None else "",
        changes=tuple(_make_change_views(runs, {view.item.name: view.id for view in views}))
        if runs is not None
        else (),
    )


class _Ids:
    """Turn names into unique ids that a URL can contain."""

    def __init__(self) -> None:
        self._taken: set[str] = set(re.findall(r'\bid="([\w-]+)"', _read_file("page.html.jinja")))  # the page's own

    def of(self, name: str) -> str:
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:80] or "item"
        found, number = slug, 1
        while found in self._taken:
            number += 1
            found = f"{slug}--{number}"
        self._taken.add(found)
        return found


def _make_tiles(run: Digest) -> tuple[tuple[str, int, str], ...]:
    counts = [(_WORDS[status], run.counts[status], status) for status in ("failed", "error", "passed", "skipped")]
    others = [("without a result", run.missing, "error"), ("not collected", len(run.uncollected), "error")]
    return tuple((word, count, status) for word, count, status in [*counts, *others] if count)


def _describe_environment(run: Digest) -> dict[str, str]:
    here = run.environment
    return {
        "kernels": here.kernels,
        **here.facts,
        "seeds": seeds(here.seeds),
        **({"golden in FP64": here.golden} if here.golden else {}),
        "limits": here.limits or "the packaged table",
    }


def _make_item_view(item: Item, ids: _Ids, limits: str, every_tensor: bool, sort: int) -> ItemView:
    worst, status = item.worst, item.status
    rows = worst_of_each_tensor(item)
    shown = rows if every_tensor else sorted(rows, key=lambda row: -row.tensor.margin)[:1]
    failed = status in ("failed", "error")
    drawn = sorted(worst.tensors, key=lambda tensor: -tensor.margin)
    by_layer = over_depth(worst.tensors) if every_tensor and not worst.steps else None
    courses = (over_steps(worst), over_stages(worst), by_layer)
    at = worst.worst.label if worst.worst else ""
    return ItemView(
        id=ids.of(item.name),
        item=item,
        mark=MARKS[status],
        word=_WORDS[status],
        margin=f"{item.margin}{item.equals}",
        sort=sort,
        headline=failure.headline(item) if failed else worst.reason or f"margin {short(worst.margin)} at {at}",
        findings=tuple(FindingView(each, repair(each) if each.repair else None) for each in failure.findings(item)),
        measures=tuple(failure.measures(worst)) if failed else (),
        tensors=tuple(_make_tensor_row(row.tensor) for row in shown),
        left_out=len(rows) - len(shown),
        pictured=tuple(
            Pictured(f"{tensor.label} ({tensor.shape_label})", found)
            for tensor in drawn
            if (found := tuple(of_tensor(worst, tensor)))
        ),
        courses=tuple(plot for plot in courses if plot is not None),
        notes=tuple(_list_notes(item)),
        formats=tuple(formats.format_rows(item.results)),
        attention=", ".join(dict.fromkeys(result.attention for result in item.results if result.attention)),
        command=failure.reproduce(worst, limits),
    )


def _list_notes(item: Item) -> Iterator[str]:
    yield from dict.fromkeys(note for result in item.results for note in result.notes)
    found = {result.determinism.summary: None for result in item.results if result.determinism is not None}
    yield from (f"built again: {summary}" for summary in found if summary != Determinism().summary)


def _make_tensor_row(tensor: TensorResult) -> tuple[str, ...]:
    mark = MARKS["passed" if tensor.passed else "failed"]
    return (tensor.label, *failure.figures(tensor), f"{mark} {short(tensor.margin)}")


def _make_row_views(cases: Sequence[CaseView], columns: Sequence[str]) -> Iterator[RowView]:
    """Yield the matrix's rows: one for each case and, if it runs over ranks, for each layout of ranks."""
    for case in cases:
        for ranks in dict.fromkeys(view.item.ranks for view in case.items):
            alike = [view for view in case.items if view.item.ranks == ranks]
            cells = tuple(
                _make_cell_view([view for view in alike if view.item.precision == column]) for column in columns
            )
            yield RowView(case.name, ranks, case.id, cells, max(view.sort for view in alike))


def _make_cell_view(views: Sequence[ItemView]) -> CellView | None:
    if not views:
        return None
    worst = max(views, key=lambda view: view.sort)
    told = f"{worst.item.case} at {worst.item.precision}: {worst.word}"
    told += f", margin {worst.margin}" if worst.margin else ""
    told += f", the worst of {len(views)} items" if len(views) > 1 else ""
    return CellView(worst, shade(worst.item), tuple(view.id for view in views), told)


def shade(item: Item) -> float:
    """Return how strong an item's colour is, by its margin if it passed and by the margin's logarithm if it failed."""
    margin = item.worst.margin
    if item.status == "passed":
        return 0.0 if math.isnan(margin) else round(min(max(margin, 0.0), 1.0), 2)
    if item.status == "failed" and margin > 1.0:
        return round(min(math.log10(min(margin, 1e6)) / 3, 1.0), 2)
    return 0.0 if item.status != "error" else 1.0


def _make_change_views(runs: Comparison, ids: Mapping[str, str]) -> Iterator[ChangeView]:
    for kind, changes in runs.changes.items():
        if kind not in AS_BEFORE:
            for change in changes:
                yield _make_change_view(kind, change, growth_in_words(change, kind, runs.noise), ids)


def _make_change_view(kind: Kind, change: Change, growth: str, ids: Mapping[str, str]) -> ChangeView:
    before, now = (_describe_status(item) for item in (change.before, change.after))
    return ChangeView(kind, change.item.name, before, now, growth, ids.get(change.item.name, ""))


def _describe_status(item: Item | None) -> str:
    if item is None:
        return ""
    return f"{MARKS[item.status]} {_WORDS[item.status]} {item.margin}".rstrip()


def draw(run: Digest, name: str, runs: Comparison | None = None) -> str:
    """Return the whole page.

    Args:
        run: the run that it shows.
        name: the report's name, for its title.
        runs: the run and an older one, if the page is to show the changes; else None.
    """
    return draw_with(plotly(), run, name, runs)


def draw_with(plots_by: str, run: Digest, name: str, runs: Comparison | None = None) -> str:
    """Return the page with another plotting library, or without one. The other arguments are those of ``draw``."""
    view = page(run, name, runs)
    hashes = " ".join(f"'sha256-{_hash_script(text)}'" for text in (plots_by, script()))
    return render(
        "report/page.html.jinja",
        page=view,
        columns=COLUMNS,
        format_columns=formats.COLUMNS,
        style=Markup(_read_file("page.css")),
        library=_pack_script(plots_by) if view.plots else "",
        script=Markup(script()),
        hashes=Markup(hashes),
        data=Markup(data_of(view.plots)),
    )


@functools.cache
def plotly() -> str:
    """Return Plotly's script, which has 4.8 MB because plotly.py contains only the full bundle."""
    from plotly.offline import get_plotlyjs

    bundle: str = get_plotlyjs()
    return bundle


@functools.cache
def _pack_script(script: str) -> str:
    """Return a script as the page's own script unpacks it: compressed to a third, in letters that HTML may contain."""
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def script() -> str:
    """Return the page's own script."""
    return _read_file("page.js")


def data_of(drawn: dict[str, Plot]) -> str:
    """Return JSON for a script element. No text in it can end the element, or has tags that Plotly would render."""
    numbers = {key: {"kind": plot.kind, **_escape_texts(plot.numbers)} for key, plot in drawn.items()}
    text = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escape_texts(value: Any) -> Any:
    """Escape texts as in HTML, because Plotly renders some tags, and replace NaN and Inf, which JSON lacks, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return html.escape(shown.line(value))
    if isinstance(value, dict):
        return {key: _escape_texts(entry) for key, entry in value.items()}
    return [_escape_texts(entry) for entry in value] if isinstance(value, list) else value


def _hash_script(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _read_file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


# The content of a page's plots, as plain numbers and in words. The page's script draws them.


MOST_LINES = 12  # in a plot over depth
_FEWEST_LAYERS = 3  # if names contain only two numbers, these are just as often the parts of a Sequential
_MOST_HEADS = 256
_DEPTH = re.compile(r"(?<![^.])\d+(?![^.])")
_MAKES_HEADS = re.compile(r"\b[qkv]_proj\b|query|key|value")
_READS_HEADS = re.compile(r"\b(?:o|out)_proj\b")
_OF_GROUPS = re.compile(r"\b[kv]_proj\b|key|value")


@dataclass(frozen=True)
class Plot:
    """Hold one plot.

    Attributes:
        kind: which of the script's functions draws it.
        title: what the plot shows, in a few words.
        words: the same in sentences, for readers who do not see it.
        numbers: the data: lists, texts and numbers, with None for numbers that are not finite.
    """

    kind: str
    title: str
    words: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


def of_tensor(result: Result, tensor: TensorResult) -> Iterator[Plot]:
    """Yield plots of a tensor's error along each axis, and of its distribution; nothing if there is no picture."""
    picture = tensor.picture
    if picture is None:
        return
    for profile in picture.profiles:
        if 0 <= profile.axis < len(tensor.shape) and len(profile.error) == len(profile.expected) > 0:
            yield _along_axis(result, tensor, profile)
    histogram = picture.histogram
    if histogram is not None and len(histogram.error) == len(histogram.expected) > 0:
        yield _plot_distribution(histogram)


def _along_axis(result: Result, tensor: TensorResult, profile: Profile) -> Plot:
    length, span = tensor.shape[profile.axis], max(1, profile.span)
    name = axis_name(result.size, tensor, profile.axis)
    starts = [min(part * span, length - 1) for part in range(len(profile.error))]
    times = [error / expected for error, expected in zip(profile.error, profile.expected, strict=True) if expected]
    worst = max(range(len(starts)), key=lambda part: profile.error[part])
    where = f"{starts[worst]}" if span == 1 else f"{starts[worst]} to {min(starts[worst] + span, length) - 1}"
    told = f"The error is largest at {where}"
    if times:
        told += f"; it is {short(min(times))} to {short(max(times))} times the expected one"
    if profile.spoiled:
        told += f". NaN or Inf in {plural(sum(map(bool, profile.spoiled)), 'part')} of {len(profile.spoiled)}"
    return Plot(
        "profile",
        f"along {name}",
        f"{told}.",
        {
            "at": starts,
            "span": span,
            "error": finite(profile.error),
            "expected": finite(profile.expected),
            "spoiled": list(profile.spoiled),
            "axis": name,
            "parted": _count_heads(result.size, tensor, profile.axis),
        },
    )


def axis_name(size: Mapping[str, Any], tensor: TensorResult, axis: int) -> str:
    """Return a name for an axis, guessed from the shape: one of the case's sizes, or a weight's rows or columns."""
    length = tensor.shape[axis]
    named = [name for name, value in size.items() if value == length and not isinstance(value, bool)]
    alike = f" ({' or '.join(named)}, {length})" if named else f" ({length})"
    if tensor.kind == "weight gradient" and len(tensor.shape) == 2:
        return ("rows, output features", "columns, input features")[axis] + alike
    if axis == len(tensor.shape) - 1 and axis:
        return f"the last axis, channels{alike}"
    return f"axis {axis}{alike}"


def _count_heads(size: Mapping[str, Any], tensor: TensorResult, axis: int) -> int:
    """Return into how many heads an axis of a projection's weight is divided, judging by names and sizes; 0 for none.

    Heads are groups of rows in projections to queries, keys and values, and of columns in the output projection.
    """
    of_rows, of_columns = _MAKES_HEADS.search(tensor.name), _READS_HEADS.search(tensor.name)
    if tensor.kind != "weight gradient" or not (of_columns if axis else of_rows):
        return 0
    named = ("groups", "kv_heads", "heads") if _OF_GROUPS.search(tensor.name) else ("heads",)
    heads = next((size[name] for name in named if isinstance(size.get(name), int)), 0)
    length = tensor.shape[axis]
    return heads if 1 < heads <= _MOST_HEADS and length > heads and length % heads == 0 else 0


def _plot_distribution(histogram: Histogram) -> Plot:
    edges = [histogram.start + histogram.width * i for i in range(len(histogram.error))]
    error, expected = ([max(count, 0) for count in bins] for bins in (histogram.error, histogram.expected))
    exact, exact_of_model = (max(count, 0) for count in histogram.exact)
    total, total_of_model = max(sum(error) + exact, 1), max(sum(expected) + exact_of_model, 1)
    filled = [i for i, counts in enumerate(zip(error, expected, strict=True)) if any(counts)]
    kept = slice(filled[0], filled[-1] + 1) if filled else slice(0, 0)
    none, of_model = _format_share(exact, total), _format_share(exact_of_model, total_of_model)
    beyond = sum(count for edge, count in zip(edges, error, strict=True) if edge >= 1.0)
    return Plot(
        "histogram",
        "how large the elements' errors are",
        f"{_format_share(beyond, total)} of the elements are off by more than 10 times the expected error (root mean "
        f"square). {none} are exact, where {of_model} are expected to be.",
        {
            "at": [edge + histogram.width / 2 for edge in edges[kept]],
            "width": histogram.width,
            "error": [count / total for count in error[kept]],
            "expected": [count / total_of_model for count in expected[kept]],
        },
    )


def _format_share(count: int, total: int) -> str:
    return f"{short(100 * (count / total))} %"


def over_depth(tensors: Sequence[TensorResult]) -> Plot | None:
    """Return a plot of the errors of a model's gradients layer by layer; None if the names do not show the depth.

    A layer is the first number in a parameter's name. Parameters whose names differ only in that number share a line.
    """
    lines: dict[str, dict[int, TensorResult]] = {}
    for tensor in tensors:
        found = _DEPTH.search(tensor.name)
        if found is not None and tensor.kind == "weight gradient" and len(found[0]) < 6:
            kind = f"{tensor.name[: found.start()]}#{tensor.name[found.end() :]}"
            lines.setdefault(kind, {})[int(found[0])] = tensor
    deep = {kind: layers for kind, layers in lines.items() if len(layers) >= _FEWEST_LAYERS}
    if not deep:
        return None
    shown = sorted(deep, key=lambda kind: -max(tensor.margin for tensor in deep[kind].values()))[:MOST_LINES]
    layers = sorted({layer for kind in deep.values() for layer in kind})
    over = sorted({layer for kind in deep.values() for layer, tensor in kind.items() if not tensor.passed})
    told = f"{plural(len(deep), 'kind')} of parameters in layers {layers[0]} to {layers[-1]}. "
    told += f"Beyond a limit: layers {', '.join(map(str, over))}." if over else "Every layer is within its limits."
    if len(deep) > len(shown):
        told += f" The {len(shown)} with the largest margins are drawn."
    return Plot(
        "depth",
        "error against depth",
        told,
        {
            "lines": [
                {
                    "name": kind,
                    "at": list(deep[kind]),
                    "margin": finite(tensor.margin for tensor in deep[kind].values()),
                    "error": finite(tensor.errors.relative_l2 for tensor in deep[kind].values()),
                    "expected": finite(tensor.expected.relative_l2 for tensor in deep[kind].values()),
                }
                for kind in shown
            ]
        },
    )


def over_steps(result: Result) -> Plot | None:
    """Return a plot of a training's losses and margins, step by step; None for a single pass."""
    if not result.steps:
        return None
    worst = max(result.steps, key=lambda step: step.margin)
    return Plot(
        "steps",
        "loss and margin against steps",
        f"{plural(len(result.steps), 'step')}; the largest margin is {short(worst.margin)}, at step {worst.number}.",
        {
            "at": [step.number for step in result.steps],
            "loss": finite(step.loss for step in result.steps),
            "golden": finite(step.golden for step in result.steps),
            "margin": finite(step.margin for step in result.steps),
        },
    )


def over_stages(result: Result) -> Plot | None:
    """Return a plot of the error along the forward pass, stage by stage; None if stages were not asked for."""
    forward = [one for one in result.stages if not one.backward]
    if not forward:
        return None
    off = [one.end for one in result.stages if one.is_off]
    told = f"{plural(len(forward), 'stage')} of the forward pass. "
    told += (
        f"More error than rounding explains: {shown.few_of(off)}." if off else "Each is as right as rounding allows."
    )
    return Plot(
        "stages",
        "error against stages",
        told,
        {
            "ends": [one.end for one in forward],
            "whole": finite(one.whole for one in forward),
            "added": finite(one.added for one in forward),
            "expected": finite(one.expected for one in forward),
        },
    )


def finite(values: Any) -> list[float | None]:
    """Return numbers for JSON, with None in place of NaN and the infinities."""
    return [value if math.isfinite(value) else None for value in values]
