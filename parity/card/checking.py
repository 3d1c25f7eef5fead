"""What differs between two cards of a pair, an older and a newer one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parity.card.card import Card, Comparison
from parity.report.numbers import short

_ORDER = ("passed", "skipped", "failed", "error")


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        told: the difference in words.
        is_worse: whether the newer card proves less: something fails, was not compared, or would pass a mistake.
    """

    told: str
    is_worse: bool = False


def list_changes(before: Card, now: Card) -> list[Change]:
    """Return what has changed from one card to another, first what may be the reason, then what follows."""
    return [*_compare_sources(before, now), *_compare_verdicts(before, now), *_compare_coverage(before, now)]


def _compare_sources(before: Card, now: Card) -> Iterator[Change]:
    for what, old, new in (("model", before.model, now.model), ("commit", before.commit, now.commit)):
        if old != new:
            yield Change(f"{what}: {old or 'none'} before, {new or 'none'} now")
    if before.weights != now.weights:
        yield Change("the reference's weights are others")
    for kind in ("environment", "code"):
        yield from _compare_facts(getattr(before, kind), getattr(now, kind), kind == "environment")


def _compare_facts(before: Mapping[str, str], now: Mapping[str, str], shows_values: bool) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name, "none"), now.get(name, "none")
        if old != new:
            yield Change(f"{name}: {old} before, {new} now" if shows_values else f"{name} has changed")


def _compare_verdicts(before: Card, now: Card) -> Iterator[Change]:
    old, new = ({_name_comparison(one): one for one in card.comparisons} for card in (before, now))
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            yield Change(f"{name}: compared before ({_tell_verdict(old[name])}), not any more", is_worse=True)
        elif name not in old:
            yield Change(
                f"{name}: {_tell_verdict(new[name])}, not compared before", new[name].status in ("failed", "error")
            )
        elif _tell_verdict(old[name]) != _tell_verdict(new[name]):
            is_worse = _ORDER.index(new[name].status) > _ORDER.index(old[name].status)
            yield Change(f"{name}: {_tell_verdict(old[name])} before, {_tell_verdict(new[name])} now", is_worse)
        elif old[name].formats != new[name].formats:
            yield Change(f"{name}: TE's modules computed in other formats", is_worse=True)


def _compare_coverage(before: Card, now: Card) -> Iterator[Change]:
    old, new = ({one.precision: set(one.passed) for one in card.coverage} for card in (before, now))
    for precision in [name for name in old if name in new]:
        for mistake in sorted(new[precision] - old[precision]):
            yield Change(f"{precision}: could not have shown {mistake}, which it could before", is_worse=True)
        for mistake in sorted(old[precision] - new[precision]):
            yield Change(f"{precision}: could have shown {mistake}, which it could not before")


def _name_comparison(one: Comparison) -> str:
    attention = f", {one.attention}" if one.attention else ""
    return f"{one.way} at {one.precision}{f' ({one.size_in_words})' if one.size else ''}{attention}"


def _tell_verdict(one: Comparison) -> str:
    return f"{one.status}, margin {short(one.margin)}" if one.margin is not None else one.status
