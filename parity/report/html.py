"""Draw the page of a run: one HTML file that needs no network, and whose tables need no script.

What the page shows is plain data first. Whatever a record holds is text on the page: Jinja escapes it, control
characters are shown as escapes, and a policy lets the browser run the page's own scripts alone, by their hashes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from parity import shown
from parity.report import failure, plots
from parity.report.changes import AS_BEFORE, Change, Comparison, Kind, growth_in_words
from parity.report.items import ERROR, FAILED, PASSED, SKIPPED, Item, precisions, worst_of_each_tensor
from parity.report.markdown import Digest, Repair, repair, verdict
from parity.report.numbers import plural, seeds, short
from parity.report.plots import Plot
from parity.result import Determinism, Finding, Status, TensorResult

# What the page shows, as plain data.


# Beyond so many tensors, an item that passed shows its worst alone and no depth: a page of some megabytes is quick.
MOST_ROWS = 2_500
MARKS: Mapping[Status, str] = {"passed": "✓", "failed": "✕", "error": "!", "skipped": "–"}
_WORDS: Mapping[Status, str] = {
    "passed": "passed",
    "failed": "failed",
    "error": "could not be compared",
    "skipped": "skipped",
}
# What the line of a verdict, written for markdown, has besides words.
_SIGNS = re.compile(f"^(?:{PASSED}|{FAILED}|{ERROR}|{SKIPPED}|⚠️) ")


@dataclass(frozen=True)
class FindingView:
    """Hold a finding, and its repair where it has one."""

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
        id: of its element, and of a link to it.
        item: its results.
        mark, word: its outcome.
        margin: as text; empty where nothing was compared.
        sort: its margin as a number by which items are sorted, the worst first.
        headline: how far it is from passing, and where.
        findings: what is wrong.
        measures: lines about the worst tensor.
        tensors: rows of a table, each as many texts as ``COLUMNS``.
        left_out: how many of its tensors that table lacks.
        pictured: where its worst tensors err.
        courses: its error against depth or steps.
        notes: what it leaves unproven.
        attention: what TE ran.
        command: how to run it alone.
    """

    id: str
    item: Item
    mark: str
    word: str
    margin: str
    sort: float
    headline: str
    findings: tuple[FindingView, ...]
    measures: tuple[str, ...]
    tensors: tuple[tuple[str, ...], ...]
    left_out: int
    pictured: tuple[Pictured, ...]
    courses: tuple[Plot, ...]
    notes: tuple[str, ...]
    attention: str
    command: str

    @property
    def codes(self) -> str:
        """Return the codes and titles of its findings."""
        return " ".join(f"{each.finding.code} {each.finding.title}" for each in self.findings)


@dataclass(frozen=True)
class CellView:
    """A cell of the matrix: the worst of some items.

    Attributes:
        worst: the item that it shows.
        shade: how strong its colour is, 0 to 1.
        items: the ids of all.
        words: for who does not see the cell.
    """

    worst: ItemView
    shade: float
    items: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class RowView:
    """A row of the matrix; a cell is None where the case does not ask for the precision."""

    case: str
    ranks: str
    href: str
    cells: tuple[CellView | None, ...]
    sort: float


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
    """Say what became of an item since the baseline."""

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
        verdict: the run in one line.
        tiles: counts, each with a word and a status.
        environment: facts by their labels.
        columns: the matrix's precisions.
        rows: the matrix's.
        cases: a section each.
        codes: the findings that occur, code and title.
        notes: sentences, each with how many items have it.
        uncollected: what was not compared at all, and why.
        omitted: how many items are in the record alone.
        baseline: the older run's name; empty where there is none.
        changes: what changed since.
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
    """Return what the page of a run shows.

    Args:
        run: the run.
        name: the report's name, for its title.
        runs: the run beside an older one, if what changed since is to be shown.
    """
    items = run.items
    in_full = sum(len(item.worst.tensors) for item in items) <= MOST_ROWS
    ids = _Ids()
    views = [_item(item, ids, run.environment.limits, in_full or item.status != "passed") for item in items]
    cases = tuple(
        CaseView(ids.of(f"case-{case}"), case, tuple(view for view in views if view.item.case == case))
        for case in dict.fromkeys(view.item.case for view in views)
    )
    columns = tuple(precisions(items))
    titles = {f"{each.finding.code} {each.finding.title}" for view in views for each in view.findings}
    return Page(
        title=name,
        good=run.complete and not run.failed and run.counts["passed"] > 0,
        verdict=_SIGNS.sub("", verdict(run)).replace("`", ""),
        tiles=_tiles(run),
        environment=_environment(run),
        columns=columns,
        rows=tuple(_rows(cases, columns)),
        cases=cases,
        codes=tuple(sorted(titles)),
        notes=tuple((note, plural(count, "item")) for note, count in run.notes.most_common()),
        uncollected=tuple((each.node_id, each.message) for each in run.uncollected.values()),
        omitted=run.counts.total() - len(items),
        baseline=runs.names[0] if runs is not None else "",
        changes=tuple(_changes(runs, {view.item.name: view.id for view in views})) if runs is not None else (),
    )


class _Ids:
    """Make names into ids that a URL can hold, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, name: str) -> str:
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:80] or "item"
        found, number = slug, 1
        while found in self._taken:
            number += 1
            found = f"{slug}--{number}"
        self._taken.add(found)
        return found


def _tiles(run: Digest) -> tuple[tuple[str, int, str], ...]:
    counts = [(_WORDS[status], run.counts[status], status) for status in ("failed", "error", "passed", "skipped")]
    others = [("without a result", run.missing, "error"), ("not collected", len(run.uncollected), "error")]
    return tuple((word, count, status) for word, count, status in [*counts, *others] if count)


def _environment(run: Digest) -> dict[str, str]:
    here = run.environment
    return {
        "kernels": here.kernels,
        **here.facts,
        "seeds": seeds(here.seeds),
        **({"golden in FP64": here.golden} if here.golden else {}),
        "limits": here.limits or "the packaged table",
    }


def _item(item: Item, ids: _Ids, limits: str, every_tensor: bool) -> ItemView:
    worst, status = item.worst, item.status
    rows = worst_of_each_tensor(item)
    shown = rows if every_tensor else sorted(rows, key=lambda row: -row.tensor.margin)[:1]
    failed = status in ("failed", "error")
    compared = bool(worst.tensors)
    drawn = sorted(worst.tensors, key=lambda tensor: -tensor.margin)
    by_layer = plots.over_depth(worst.tensors) if every_tensor and not worst.steps else None
    courses = (plots.over_steps(worst), by_layer)
    at = worst.worst.label if worst.worst else ""
    return ItemView(
        id=ids.of(item.name),
        item=item,
        mark=MARKS[status],
        word=_WORDS[status],
        margin=short(worst.margin) if compared else "",
        sort=_sort(item),
        headline=failure.headline(item) if failed else worst.reason or f"margin {short(worst.margin)} at {at}",
        findings=tuple(FindingView(each, repair(each) if each.repair else None) for each in failure.findings(item)),
        measures=tuple(failure.measures(worst)) if failed else (),
        tensors=tuple(_row(row.tensor) for row in shown),
        left_out=len(rows) - len(shown),
        pictured=tuple(
            Pictured(f"{tensor.label} ({tensor.shape_label})", found)
            for tensor in drawn
            if (found := tuple(plots.of_tensor(worst, tensor)))
        ),
        courses=tuple(plot for plot in courses if plot is not None),
        notes=tuple(_notes(item)),
        attention=", ".join(dict.fromkeys(result.attention for result in item.results if result.attention)),
        command=failure.reproduce(worst, limits),
    )


def _notes(item: Item) -> Iterator[str]:
    yield from dict.fromkeys(note for result in item.results for note in result.notes)
    found = {result.determinism.summary: None for result in item.results if result.determinism is not None}
    yield from (f"built again: {summary}" for summary in found if summary != Determinism().summary)


def _sort(item: Item) -> float:
    """Return a number that is larger for worse items; what could not be compared is worst."""
    if item.status in ("error", "skipped"):
        return 1e30 if item.status == "error" else -1.0
    margin = item.worst.margin
    return 0.0 if math.isnan(margin) else min(margin, 1e29)


def _row(tensor: TensorResult) -> tuple[str, ...]:
    mark = MARKS["passed" if tensor.passed else "failed"]
    return (tensor.label, *failure.figures(tensor), f"{mark} {short(tensor.margin)}")


def _rows(cases: Sequence[CaseView], columns: Sequence[str]) -> Iterator[RowView]:
    """Yield the matrix's rows: one for each case, and one for each of its numbers of ranks."""
    for case in cases:
        for ranks in dict.fromkeys(view.item.ranks for view in case.items):
            alike = [view for view in case.items if view.item.ranks == ranks]
            cells = tuple(_cell([view for view in alike if view.item.precision == column]) for column in columns)
            yield RowView(case.name, ranks, case.id, cells, max(view.sort for view in alike))


def _cell(views: Sequence[ItemView]) -> CellView | None:
    if not views:
        return None
    worst = max(views, key=lambda view: view.sort)
    told = f"{worst.item.case} at {worst.item.precision}: {worst.word}"
    told += f", margin {worst.margin}" if worst.margin else ""
    told += f", the worst of {len(views)} items" if len(views) > 1 else ""
    return CellView(worst, shade(worst.item), tuple(view.id for view in views), told)


def shade(item: Item) -> float:
    """Return how strong an item's colour is: of one that passed as its margin, of a failure as its logarithm."""
    margin = item.worst.margin
    if item.status == "passed":
        return 0.0 if math.isnan(margin) else round(min(max(margin, 0.0), 1.0), 2)
    if item.status == "failed" and margin > 1.0:
        return round(min(math.log10(min(margin, 1e6)) / 3, 1.0), 2)
    return 0.0 if item.status != "error" else 1.0


def _changes(runs: Comparison, ids: Mapping[str, str]) -> Iterator[ChangeView]:
    for kind, changes in runs.changes.items():
        if kind not in AS_BEFORE:
            for change in changes:
                yield _change(kind, change, growth_in_words(change, kind, runs.noise), ids)


def _change(kind: Kind, change: Change, growth: str, ids: Mapping[str, str]) -> ChangeView:
    before, now = (_told(item) for item in (change.before, change.after))
    return ChangeView(kind, change.item.name, before, now, growth, ids.get(change.item.name, ""))


def _told(item: Item | None) -> str:
    if item is None:
        return ""
    margin = f" {short(item.worst.margin)}" if item.worst.tensors else ""
    return f"{MARKS[item.status]} {_WORDS[item.status]}{margin}"


def draw(run: Digest, name: str, runs: Comparison | None = None) -> str:
    """Return the whole page.

    Args:
        run: what it shows.
        name: the report's name, for its title.
        runs: the run beside an older one, if what changed since is to be shown.
    """
    return draw_with(plotly(), run, name, runs)


def draw_with(plots_by: str, run: Digest, name: str, runs: Comparison | None = None) -> str:
    """Return the page with another library of plots, or none; arguments as for ``draw``."""
    view = page(run, name, runs)
    scripts = [plots_by, script()]
    text = _template().render(
        page=view,
        columns=COLUMNS,
        style=Markup(_file("page.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=Markup(" ".join(f"'sha256-{_hash(script)}'" for script in scripts)),
        data=Markup(data_of(view.plots)),
    )
    return text + "\n"


@functools.cache
def plotly() -> str:
    """Return Plotly's script, 4.8 MB: plotly.py brings the full bundle and no smaller one."""
    from plotly.offline import get_plotlyjs

    bundle: str = get_plotlyjs()
    return bundle.replace("</script", "<\\/script")


def script() -> str:
    """Return the page's own script."""
    return _file("page.js")


def data_of(plots: dict[str, Plot]) -> str:
    """Return JSON for a script element: no text in it ends the element, and none has tags for Plotly."""
    numbers = {key: {"kind": plot.kind, **_escaped(plot.numbers)} for key, plot in plots.items()}
    text = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(value: Any) -> Any:
    """Escape texts as in HTML, since Plotly takes some tags in its labels for markup; JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return html.escape(shown.line(value))
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    return [_escaped(entry) for entry in value] if isinstance(value, list) else value


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _as_letters(value: Any) -> Any:
    """Show control characters as escapes; what is the page's own is left as it is."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else shown.text(value)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_as_letters,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.from_string(_file("page.html.jinja"))
