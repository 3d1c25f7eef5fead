"""Write the card of a pair, or tell what has changed since one was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parity import shown
from parity.card.card import Card, read_card, write_card
from parity.card.checking import list_changes
from parity.card.making import make_card
from parity.case import registry
from parity.machine import files
from parity.plugin.options import check_file, parse_backend
from parity.report.templates import render


def write(
    target: str, precisions: Sequence[str], seeds: Sequence[int], backend: str, out: Path | None, covers: bool
) -> bool:
    """Compare a pair, write its card and the page beside it, and return whether everything passed.

    Args:
        target: ``my_pairs.py::my_model``, or only the file if it declares one pair.
        precisions: names of precisions.
        seeds: seeds of weights and inputs.
        backend: ``auto``, ``gpu`` or ``cpu``.
        out: the card's file; None for one beside the pair's file, under the pair's name.
        covers: whether to find out which known mistakes the comparisons would have passed.

    Raises:
        UserError: if there is no such pair, it cannot be compared here, or a file cannot be written.
    """
    case = registry.only(target)
    file = out or case.path.with_name(f"{case.name}.card.yaml")
    page = file.with_suffix(".md")
    for each in (file, page):
        check_file(each, "-o")
    card = make_card(case, precisions, seeds, parse_backend(backend), file.absolute().parent, covers)
    files.replace(file, write_card(card))
    files.replace(page, draw_page(card, file.name))
    for one in card.comparisons:
        print(shown.line(f"{one.way}, {one.precision}: {one.status}"))
    print(f"card: {file}")
    print(f"page: {page}")
    return card.passed


def check(file: Path, backend: str) -> bool:
    """Compare again what a card says, print what has changed, and return whether nothing is worse.

    Raises:
        UserError: if there is no card in the file, or its pair cannot be compared here.
    """
    before = read_card(file)
    path, _, name = before.pair.partition("::")
    case = registry.load_case(file.absolute().parent / path, name)
    precisions = list(dict.fromkeys(one.precision for one in before.comparisons))
    seeds = before.comparisons[0].seeds if before.comparisons else [0]
    now = make_card(case, precisions, seeds, parse_backend(backend), file.absolute().parent, bool(before.coverage))
    changes = list_changes(before, now)
    for change in changes:
        print(shown.line(f"{'✗ ' if change.is_worse else '  '}{change.told}"))
    worse = sum(change.is_worse for change in changes)
    print(f"{len(changes) or 'no'} differences from {file}{f', {worse} for the worse' if worse else ''}")
    return not worse


def draw_page(card: Card, file: str) -> str:
    """Return a card as markdown.

    Args:
        card: the card.
        file: the name of its YAML.
    """
    seen = {(one.precision, str(one.formats)): one for one in card.comparisons if one.formats}
    return render(
        "card/card.md.jinja",
        card=card,
        file=file,
        notes=list(dict.fromkeys(note for one in card.comparisons for note in one.notes)),
        formats=list(seen.values()),
    )
