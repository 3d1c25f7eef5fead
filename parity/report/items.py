"""Gather a run's results, one for each seed, into items, and draw their matrix."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parity import shown
from parity.report.numbers import markdown_table, short
from parity.result import Result, Status, TensorResult
from parity.settings import PRECISION_NAMES

# Gather a run's results, one for each seed, into what pytest calls an item: a case at one precision and size.


WORST_FIRST: tuple[Status, ...] = ("error", "failed", "passed", "skipped")


@dataclass(frozen=True)
class Item:
    """The results of one case at one precision and size.

    Attributes:
        results: at least one; one for each seed, in the seeds' order.
    """

    results: tuple[Result, ...]

    @property
    def status(self) -> Status:
        """The worst status over all seeds; a skip counts only if nothing ran."""
        return min((result.status for result in self.results), key=WORST_FIRST.index)

    @property
    def worst(self) -> Result:
        """The result with this status and the largest margin."""
        alike = [result for result in self.results if result.status == self.status]
        return max(alike, key=lambda result: -math.inf if math.isnan(result.margin) else result.margin)

    @property
    def bad(self) -> tuple[Result, ...]:
        """The results that did not pass, without skips."""
        return tuple(result for result in self.results if result.status in ("failed", "error"))

    @property
    def name(self) -> str:
        """``layernorm_mlp_swiglu[bf16-2x1024x512]``."""
        return self.results[0].item

    @property
    def case(self) -> str:
        return self.results[0].case

    @property
    def precision(self) -> str:
        return self.results[0].precision

    @property
    def size_label(self) -> str:
        return self.results[0].size_label

    @property
    def ranks(self) -> str:
        return self.results[0].ranks


@dataclass(frozen=True)
class AtWorst:
    """Hold one tensor of an item, at the seed where its margin is worst.

    Attributes:
        result: that seed's.
        tensor: the tensor's there.
        seeds: at how many seeds it was compared.
    """

    result: Result
    tensor: TensorResult
    seeds: int


def worst_of_each_tensor(item: Item) -> list[AtWorst]:
    """Return an item's tensors, in the order of its results."""
    at_seeds: dict[str, list[tuple[Result, TensorResult]]] = {}
    for result in item.results:
        for tensor in result.tensors:
            at_seeds.setdefault(tensor.label, []).append((result, tensor))
    worst = (max(each, key=lambda pair: pair[1].margin) for each in at_seeds.values())
    return [AtWorst(result, tensor, len(at_seeds[tensor.label])) for result, tensor in worst]


def in_order(items: Iterable[Item]) -> list[Item]:
    """Order items by file, case, precision, size and attention, whichever worker was faster."""
    items = list(items)
    order = precisions(items)
    return sorted(
        items,
        key=lambda item: (
            item.results[0].path,
            item.case,
            order.index(item.precision),
            [int(number) for number in re.findall(r"\d+", item.size_label)],
            item.size_label,
            item.results[0].forced_attention,
        ),
    )


def precisions(items: Sequence[Item]) -> list[str]:
    """Return the names of the precisions that occur, in the order of ``parity.te``."""
    found = dict.fromkeys(item.precision for item in items)
    return [name for name in PRECISION_NAMES if name in found] + [name for name in found if name not in PRECISION_NAMES]


# The report's overview: a table of cases and precisions, with verdicts and worst margins.


PASSED, FAILED, ERROR, SKIPPED = "✅", "❌", "💥", "–"


def draw_matrix(items: Sequence[Item]) -> str:
    """Return a markdown table, with a row for each case and one for each of its numbers of ranks; a cell is empty if
    the case does not ask for the precision.
    """
    columns = precisions(items)
    rows = []
    for case in dict.fromkeys(item.case for item in items):
        of_case = [item for item in items if item.case == case]
        for ranks in dict.fromkeys(item.ranks for item in of_case):
            alike = [item for item in of_case if item.ranks == ranks]
            cells = [_cell([item for item in alike if item.precision == precision]) for precision in columns]
            rows.append([shown.code(case) + (f", {shown.prose(ranks)}" if ranks else ""), *cells])
    return markdown_table(rows, ["case", *map(shown.prose, columns)])


def verdict_of(item: Item) -> str:
    """Return ``✅ 0.43``, ``❌ 140``, ``💥 error`` or ``–``."""
    if item.status == "skipped":
        return SKIPPED
    if item.status == "error":
        return f"{ERROR} error"
    return f"{PASSED if item.status == 'passed' else FAILED} {short(item.worst.margin)}"


def _cell(items: Sequence[Item]) -> str:
    """Return the worst item over all sizes."""
    for status in ("error", "failed", "passed", "skipped"):
        alike = [item for item in items if item.status == status]
        if alike:
            return verdict_of(max(alike, key=lambda item: 0.0 if status in ("error", "skipped") else item.worst.margin))
    return ""
