"""A map's problems as a user reads them: what layers repeat is told once, advice is given once, and not too many."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MOST_LINES = 20
MOST_LETTERS = 600

# Numbers in names that count layers or experts: ``layers.3.weight``, ``3.weight``, ``scales.3``, ``weight3``.
_NUMBER = re.compile(r'(?<=[\w\]]\.)\d+(?=\.|")|(?<=["( ])\d+(?=\.[A-Za-z_])|(?<=weight)\d+|(?<=bias)\d+')
_CONSTANT = re.compile(r"constant\([^)]*\)")


@dataclass(frozen=True)
class Problem:
    """What is wrong.

    Attributes:
        text: with the parameters' names and shapes.
        advice: what to do; told once for all problems that have it, whatever constants it names.
    """

    text: str
    advice: str = ""


def lines(problems: Iterable[Problem]) -> list[str]:
    """One for each problem, those of layers that are alike together; of very many the first, of very long the ends."""
    told: set[str] = set()
    found: list[str] = []
    for problem in _together(problems):
        kind = _CONSTANT.sub("", problem.advice)
        text = _short(problem.text)
        found.append(text if not kind or kind in told else f"{text}; {problem.advice}")
        told.add(kind)
    hidden = len(found) - MOST_LINES
    return found if hidden <= 1 else [*found[:MOST_LINES], f"and {hidden} more of such problems"]


def _short(text: str) -> str:
    """Its ends, of an entry that names dozens of experts."""
    end = MOST_LETTERS // 2
    return text if len(text) <= MOST_LETTERS else f"{text[:end]} ... {text[-end:]}"


def _together(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Problems in the order of their first, those merged that differ only in layers' numbers."""
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((_NUMBER.sub("#", problem.text), _NUMBER.sub("#", problem.advice)), []).append(problem)
    for members in alike.values():
        unique = list(dict.fromkeys(members))
        yield from [_merged(unique)] if len(unique) > 1 and _are_all_combinations(unique) else unique


def _columns(problems: Sequence[Problem]) -> list[tuple[int, ...]]:
    """The numbers in each place of the problems' names."""
    each = [[int(number) for number in _NUMBER.findall(f"{p.text}\n{p.advice}")] for p in problems]
    return list(zip(*each, strict=True))


def _are_all_combinations(problems: Sequence[Problem]) -> bool:
    """Whether the numbers that vary independently, as of layers and experts, occur in all combinations."""
    independent = {tuple(number - column[0] for number in column): len(set(column)) for column in _columns(problems)}
    return math.prod(independent.values()) == len(problems)


def _merged(problems: Sequence[Problem]) -> Problem:
    """One problem, with ranges for its numbers."""
    ranges = iter([_ranges(sorted(set(column))) for column in _columns(problems)])
    text = _NUMBER.sub(lambda _: next(ranges), problems[0].text)
    return replace(problems[0], text=text, advice=_NUMBER.sub(lambda _: next(ranges), problems[0].advice))


def _ranges(numbers: Sequence[int]) -> str:
    """``0..11``, or ``0..3,7`` where some are left out."""
    starts = [0, *(i for i, (one, other) in enumerate(pairwise(numbers), 1) if other != one + 1), len(numbers)]
    runs = [numbers[start:stop] for start, stop in pairwise(starts)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
