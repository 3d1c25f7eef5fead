"""Write output for continuous integration: JUnit properties, and job summaries and annotations for GitHub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parity import shown
from parity.report import failure, markdown
from parity.report.markdown import Digest
from parity.report.numbers import plural
from parity.report.record import Item, draw_matrix
from parity.report.templates import render
from parity.result import Result

# GitHub shows ten errors of a step, and accepts a summary of up to one MiB.
MOST_ANNOTATIONS = 10
_MOST_FAILURES = 30


def properties(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of an item's JUnit properties. Margins have six digits, so that they can be plotted.

    Args:
        results: the results of one item, at least one.
    """
    item = Item(tuple(results))
    worst = item.worst
    yield "parity_precision", shown.line(item.precision)
    yield "parity_seeds", ",".join(str(result.seed) for result in results)
    if item.margin and worst.worst is not None:
        yield "parity_margin", f"{worst.margin:.6g}"
        yield "parity_worst_tensor", shown.line(worst.worst.label)
    for finding in failure.findings(item):
        yield "parity_finding", shown.line(finding.name)


def summary(run: Digest, name: str) -> str:
    """Return the summary of a job: the headline, the matrix and the failures.

    Args:
        run: the run that it shows.
        name: the report's name.
    """
    failed = [item for item in run.items if item.status in ("failed", "error")]
    listed = failed[:_MOST_FAILURES]
    return render(
        "report/summary.md.jinja",
        name=name,
        verdict=markdown.verdict(run),
        matrix=draw_matrix(run.items),
        failures=[(item.name, failure.headline(item), failure.findings(item)) for item in listed],
        others=len(failed) - len(listed),
    )


@dataclass(frozen=True)
class Place:
    """The place where a pair is declared.

    Attributes:
        file: the file's path relative to the repository.
        line: the line, counted from 1; 0 if it is not known.
    """

    file: str
    line: int = 0


def annotation(place: Place, title: str, message: str) -> str:
    """Return GitHub's command that marks a line as wrong."""
    at = {"file": place.file, **({"line": str(place.line)} if place.line else {}), "title": title}
    given = ",".join(f"{name}={_escape_text(shown.line(value), in_property=True)}" for name, value in at.items())
    return f"::error {given}::{_escape_text(shown.text(message))}"


def others(count: int) -> str:
    """Return GitHub's command that says how many failures have no annotation."""
    told = f"{plural(count, 'other failure')} of parity, in the summary of this job"
    return f"::notice::{_escape_text(told)}"


def _escape_text(text: str, in_property: bool = False) -> str:
    """Escape the characters that would end a command's message or property, as GitHub's toolkit does."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text
