"""Compare two runs item by item and tensor by tensor, and draw what changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from parity import shown
from parity.judge import noise
from parity.judge.noise import Kernels
from parity.report import earlier, failure
from parity.report.numbers import markdown_table, plural, seeds, short
from parity.report.record import FAILED, PASSED, Item, Record, in_order, verdict_of
from parity.report.templates import render
from parity.result import Check, Result, TensorResult

# The changes from one run to another, item by item.


Kind = Literal[
    "newly failing",
    "regressed",
    "grown",
    "newly passing",
    "otherwise",
    "improved",
    "other numbers",
    "other bytes",
    "new",
    "gone",
    "within noise",
    "same bytes",
    "not compared",
]
_FAILED = ("failed", "error")
# The golden's norm is summed in FP32, in an order that depends on the device. Other inputs or weights change it by much
# more than this.
_SAME_GOLDEN = 1e-6


@dataclass(frozen=True)
class Statistic:
    """Hold one statistic of one tensor in two runs that computed it from the same numbers.

    Attributes:
        seed: the seed of the results.
        tensor: the tensor's label.
        precision: the precision's name.
        before, after: the statistic in each run.
        elements: the number of elements of the tensor.
        growth: the growth that ``noise.growth`` returns.
    """

    seed: int
    tensor: str
    precision: str
    before: Check
    after: Check
    elements: int
    growth: float

    @property
    def change(self) -> float:
        """Return by how much the value has grown. Unlike ``growth``, this also counts below the expected error."""
        old, new = self.before.value, self.after.value
        if old == new:
            return 0.0
        if self.after.statistic in noise.SIGNED:
            return math.copysign(new - old, abs(new) - abs(old))
        return math.log(new / old) if new > 0.0 < old else math.copysign(math.inf, new - old)

    def allowed(self, noise_of: Noise) -> float:
        """Return the growth that noise explains."""
        return noise.allowed(noise_of.kernels, self.precision, self.after.statistic, self.elements, noise_of.compared)


@dataclass(frozen=True)
class Noise:
    """Describe the noise between two runs.

    Attributes:
        kernels: whether the kernels of both runs round alike.
        compared: how many statistics are compared.
        same: whether both runs use the same kernels, so that their results have no noise at all.
    """

    kernels: Kernels
    compared: int
    same: bool = False

    @property
    def of_kernels_alike(self) -> Noise:
        """Return the noise for the assumption that the kernels of both runs round alike."""
        return replace(self, kernels="alike")


@dataclass(frozen=True)
class Change:
    """One item in two runs; at least one of them has it.

    Attributes:
        before: the item in the older run, or None.
        after: the item in the newer run, or None.
    """

    before: Item | None
    after: Item | None

    @property
    def item(self) -> Item:
        """The item in the newer run if it is there, else in the older one."""
        shown = self.after or self.before
        assert shown is not None
        return shown

    @cached_property
    def statistics(self) -> tuple[Statistic, ...]:
        """Return the statistics of tensors whose bytes differ although the golden is the same."""
        return tuple(found for pair in self._result_pairs for found in _compare_statistics(*pair))

    @cached_property
    def has_same_bytes(self) -> bool:
        """Return whether every tensor of every seed is known to have the same bytes."""
        tensors = [each for before, after in self._result_pairs for each in (before.tensors, after.tensors)]
        seeds_of = [len(item.results) for item in (self.before, self.after) if item is not None]
        return (
            bool(self._result_pairs)
            and seeds_of == 2 * [len(self._result_pairs)]
            and all(each.digest for of_seed in tensors for each in of_seed)
            and all(_collect_digests(before) == _collect_digests(after) for before, after in self._result_pairs)
        )

    def kind(self, given: Noise) -> Kind:
        """Return the kind of this change."""
        before = self.before.status if self.before else None
        after = self.after.status if self.after else None
        if after in _FAILED and before not in _FAILED:
            return "newly failing"
        if before is None:
            return "new"
        if after is None:
            return "gone"
        if after != before:
            return "newly passing" if after == "passed" else "otherwise"
        return self._kind_by_numbers(given)

    def _kind_by_numbers(self, given: Noise) -> Kind:
        """Return the kind of this change if the verdict is the same."""
        if not self._result_pairs:
            return "not compared"
        if self.has_same_bytes:
            return "same bytes"
        if self.grown(given):
            return "regressed"
        if not all(_from_same_numbers(before, after) for before, after in self._result_pairs):
            return "other numbers"
        if self.grown(given.of_kernels_alike):
            return "grown"
        if any(each.growth < -each.allowed(given) for each in self.statistics):
            return "improved"
        return "other bytes" if given.same and self.moved else "within noise"

    @cached_property
    def moved(self) -> tuple[str, ...]:
        """Return the tensors whose bytes differ at some seed although the same kernels would reproduce them."""
        found = (label for pair in self._result_pairs for label in _find_moved_tensors(*pair))
        return tuple(dict.fromkeys(found))

    def most_moved(self, given: Noise) -> Statistic | None:
        """Return the statistic of the moved tensors that grew most, relative to the growth that noise explains."""
        shares = [(each.change / each.allowed(given), each) for each in self.statistics if each.tensor in self.moved]
        return max(shares, key=lambda one: one[0], default=(0.0, None))[1]

    def grown(self, given: Noise) -> list[Statistic]:
        """Return, for each tensor that has grown beyond noise, the statistic that is farthest beyond it."""
        beyond = [(each.growth / each.allowed(given), each) for each in self.statistics if each.growth > 0.0]
        found: dict[str, Statistic] = {}
        for times, each in sorted(beyond, key=lambda one: -one[0]):
            if times > 1.0:
                found.setdefault(each.tensor, each)
        return list(found.values())

    @cached_property
    def _result_pairs(self) -> list[tuple[Result, Result]]:
        """The results of both runs at the seeds where both have tensors."""
        if self.before is None or self.after is None:
            return []
        older = {result.seed: result for result in self.before.results}
        both = [(older[result.seed], result) for result in self.after.results if result.seed in older]
        return [(before, after) for before, after in both if before.tensors and after.tensors]


def _compare_statistics(before: Result, after: Result) -> Iterator[Statistic]:
    older = {tensor.label: tensor for tensor in before.tensors}
    steps = {step for step in {tensor.step for tensor in after.tensors} if _same_golden(before, after, step)}
    for tensor in after.tensors:
        old = older.get(tensor.label)
        if old is None or tensor.step not in steps or (tensor.digest and tensor.digest == old.digest):
            continue
        checks = {check.statistic: check for check in old.checks}
        for check in tensor.checks:
            if check.statistic in checks:
                grown = noise.growth(checks[check.statistic], check, after.precision, tensor.kind)
                yield Statistic(
                    after.seed, tensor.label, after.precision, checks[check.statistic], check, tensor.numel, grown
                )


def _find_moved_tensors(before: Result, after: Result) -> Iterator[str]:
    """Yield the tensors whose bytes differ although the same kernels would reproduce them.

    The CPU kernels always reproduce them. Some kernels of a GPU do not, so both runs must have checked that
    (``--determinism``).
    """
    looked = [each.determinism for each in (before, after)]
    if after.backend != "cpu" and None in looked:
        return
    racing = {label for each in looked if each is not None for label in each.differing}
    older = _collect_digests(before)
    for label, digest in _collect_digests(after).items():
        if digest and older.get(label) and digest != older[label] and label not in racing:
            yield label


def _from_same_numbers(before: Result, after: Result) -> bool:
    return all(_same_golden(before, after, step) for step in {tensor.step for tensor in after.tensors})


def _same_golden(before: Result, after: Result, step: int) -> bool:
    """Return whether both runs had the same inputs, weights and reference, judging by the golden's outputs.

    Gradients are unsuitable, because one that vanishes except for rounding differs in every run.
    """
    older = {tensor.key: tensor for tensor in _select_outputs(before, step)}
    newer = _select_outputs(after, step)
    return bool(newer) and all(
        tensor.key in older
        and math.isclose(tensor.errors.golden_rms, older[tensor.key].errors.golden_rms, rel_tol=_SAME_GOLDEN)
        for tensor in newer
    )


def _select_outputs(result: Result, step: int) -> list[TensorResult]:
    return [tensor for tensor in result.tensors if tensor.kind == "output" and tensor.step == step]


def _collect_digests(result: Result) -> dict[str, str]:
    return {tensor.label: tensor.digest for tensor in result.tensors}


def between(before: Iterable[Result], after: Iterable[Result]) -> list[Change]:
    """Return the change of every item that either run has, in the order of reports.

    Items are matched by name alone, because all pairs of a run have different names, and the path of a file depends on
    where a run was started.
    """
    old, new = _by_name(before), _by_name(after)
    ordered = in_order({**old, **new}.values())
    return [Change(old.get(item.name), new.get(item.name)) for item in ordered]


def _by_name(results: Iterable[Result]) -> dict[str, Item]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.item, []).append(result)
    return {name: Item(tuple(sorted(each, key=lambda result: result.seed))) for name, each in found.items()}


# Draw the changes from one run to another: the differences between the environments, the verdict, and then a table for
# each kind of change.


_COLUMNS = ("item", "before", "now", "worst tensor now", "findings")
_GROWN = ("item", "seed", "tensor", "statistic", "before", "now", "grew", "noise alone")
_MOVED = ("item", "tensors with other bytes", "seed", "grew most", "statistic", "before", "now", "noise alone")
_TITLES: dict[Kind, str] = {
    "newly failing": "Newly failing",
    "regressed": "Regressed",
    "grown": "Grown, as other kernels could explain",
    "newly passing": "Newly passing",
    "otherwise": "Otherwise changed",
    "improved": "Improved",
    "other numbers": "From other numbers",
    "other bytes": "Changed by the code",
    "new": "New",
    "gone": "Gone",
}
_WORDS: dict[Kind, str] = {
    "grown": "grown as other kernels could explain",
    "newly passing": "newly passing",
    "otherwise": "otherwise changed",
    "improved": "improved beyond noise",
    "other numbers": "computed from other numbers",
    "other bytes": "changed by the code, within noise",
    "new": "new",
    "gone": "gone",
    "within noise": "changed within noise",
    "same bytes": "equal to the byte",
    "not compared": "not compared in either run",
}
# The kinds that need no table, and those of tensors that have grown.
AS_BEFORE: tuple[Kind, ...] = ("within noise", "same bytes", "not compared")
_GROWING: tuple[Kind, ...] = ("regressed", "grown")
_MOST_LINES = 5


@dataclass(frozen=True)
class Comparison:
    """Two runs to compare.

    Attributes:
        before, after: the older and the newer run.
        names: the names of both, for the reader.
    """

    before: Record
    after: Record
    names: tuple[str, str]

    @cached_property
    def all(self) -> list[Change]:
        """Return the change of every item that either run has."""
        return between(self.before.results, self.after.results)

    @cached_property
    def noise(self) -> Noise:
        """Return the noise to expect, given the differences between the environments."""
        environments = self.before.environment, self.after.environment
        alike = earlier.kernels_round_alike(*environments)
        same = earlier.kernels_are_the_same(*environments)
        return Noise("alike" if alike else "others", sum(len(change.statistics) for change in self.all), same)

    @cached_property
    def changes(self) -> dict[Kind, list[Change]]:
        """Return the changes by kind."""
        found: dict[Kind, list[Change]] = {}
        for change in self.all:
            found.setdefault(change.kind(self.noise), []).append(change)
        return found

    @property
    def shares_items(self) -> bool:
        """Return whether any item is in both runs."""
        return any(change.before and change.after for change in self.all)

    @property
    def is_worse(self) -> bool:
        """Return whether an item newly fails or has regressed."""
        return "newly failing" in self.changes or "regressed" in self.changes


def differences(runs: Comparison) -> list[str]:
    """Return a sentence for each difference between the environments and between the options of the runs."""
    before, after = (_collect_facts(run) for run in (runs.before, runs.after))
    found = [
        f"{name}: {before.get(name) or 'none'}, now {after.get(name) or 'none'}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name) and name != "date"
    ]
    asked, now = runs.before.environment.asked, runs.after.environment.asked
    if asked is not None and now is not None:
        found += earlier.differences_of_options(asked.options, now.options)
        found += [f"{name} changed" for name in earlier.changed_code(asked.code, now.code)]
    return [shown.line(each) for each in found]


def draw(runs: Comparison) -> str:
    """Return the whole report as GitHub markdown."""
    tables = {"regressed": _draw_growths, "grown": _draw_growths, "other bytes": _draw_movements}
    sections = [
        (kind, title, tables.get(kind, _draw_table)(runs, kind))
        for kind, title in _TITLES.items()
        if kind in runs.changes
    ]
    return render(
        "report/changes.md.jinja",
        names=runs.names,
        differences=differences(runs),
        verdict=verdict(runs),
        sections=sections,
        environments=_draw_environments(runs),
    )


def verdict(runs: Comparison) -> str:
    """Sum up all changes in one line."""
    counts = {kind: len(changes) for kind, changes in runs.changes.items()}
    worse = [
        f"{plural(counts[kind], 'item')} {word}"
        for kind, word in (("newly failing", "newly failing"), ("regressed", "regressed"))
        if kind in counts
    ]
    head = f"{FAILED} {', '.join(worse)}" if worse else f"{PASSED} nothing regressed"
    if not runs.shares_items:
        head = f"⚠️ the runs have no item in common; {head}"
    return ", ".join([head, *(f"{counts[kind]} {text}" for kind, text in _WORDS.items() if kind in counts)])


def lines(runs: Comparison) -> Iterator[str]:
    """Yield the lines for a terminal: differences between the environments, the verdict, and the largest changes."""
    yield from (f"differs: {each}" for each in differences(runs))
    yield verdict(runs)
    told = [
        f"regressed: {change.item.name}, {_show_statistic(worst, runs.noise, f', {_show_growth(worst, worst.growth)}')}"
        for change in runs.changes.get("regressed", ())
        for worst in change.grown(runs.noise)[:1]
    ]
    told += [
        f"changed by the code: {change.item.name}, {_moved_in_words(change)}; {_show_statistic(most, runs.noise)}"
        for change, most in _by_movement(runs)
    ]
    yield from map(shown.line, told[:_MOST_LINES])
    if len(told) > _MOST_LINES:
        yield f"and {len(told) - _MOST_LINES} more in the report"


def growth_in_words(change: Change, kind: Kind, given: Noise) -> str:
    """Return which tensor has grown farthest beyond noise, or which were changed by code; else an empty text."""
    if kind == "other bytes":
        return _moved_in_words(change)
    grown = change.grown(given if kind == "regressed" else given.of_kernels_alike) if kind in _GROWING else []
    return "; ".join(f"{each.tensor}: {each.after.statistic} {_show_growth(each, each.growth)}" for each in grown[:1])


def _moved_in_words(change: Change) -> str:
    tensors = [tensor.label for tensor in change.item.results[0].tensors]
    return f"other bytes in {len(change.moved)} of {plural(len(tensors), 'tensor')} ({', '.join(change.moved)})"


def _by_movement(runs: Comparison) -> list[tuple[Change, Statistic]]:
    """Return each item that code has changed with its statistic that grew most, the largest growth first."""
    found = [(change, change.most_moved(runs.noise)) for change in runs.changes.get("other bytes", ())]
    known = [(change, most) for change, most in found if most is not None]
    return sorted(known, key=lambda one: -one[1].change / one[1].allowed(runs.noise))


def _show_statistic(each: Statistic, given: Noise, by: str = "") -> str:
    old, new = (short(abs(check.value)) for check in (each.before, each.after))
    noise = _show_growth(each, each.allowed(given))
    return f"{each.tensor} (seed {each.seed}): {each.after.statistic} {old}, now {new}{by}; noise: {noise}"


def _show_growth(each: Statistic, growth: float) -> str:
    """Return a growth in words, as a factor or in standard deviations."""
    if each.after.statistic in noise.SIGNED:
        return f"{short(growth)} standard deviations"
    return f"{short(math.exp(min(growth, 700.0)), 3)} times"


def _draw_environments(runs: Comparison) -> str:
    before, after = (_collect_facts(run) for run in (runs.before, runs.after))
    names = [*before, *(name for name in after if name not in before)]
    rows = [(name, before.get(name, ""), after.get(name, "")) for name in names]
    cells = [(*map(shown.prose, row), "" if row[1] == row[2] else "≠") for row in rows]
    return markdown_table(cells, ["environment", "before", "now", ""])


def _collect_facts(run: Record) -> dict[str, str]:
    items = len({result.item for result in run.results})
    facts = {
        **run.environment.facts,
        "seeds": seeds(run.environment.seeds),
        "items with a result": f"{items} of {max(items, run.environment.items)}",
    }
    if run.uncollected:
        facts["not collected"] = ", ".join(each.node_id for each in run.uncollected)
    return facts


def _draw_table(runs: Comparison, kind: Kind) -> str:
    return markdown_table(map(_make_row, runs.changes[kind]), _COLUMNS)


def _make_row(change: Change) -> list[str]:
    after = change.after
    worst = after.worst.worst if after else None
    found = failure.findings(after) if after else []
    return [
        shown.code(change.item.name),
        _draw_cell(change.before),
        _draw_cell(after),
        shown.code(worst.label) if worst else "",
        shown.prose(", ".join(dict.fromkeys(finding.name for finding in found))),
    ]


def _draw_growths(runs: Comparison, kind: Kind) -> str:
    """Return a table of the tensors that have grown, each with the statistic that is farthest beyond noise."""
    given = runs.noise if kind == "regressed" else runs.noise.of_kernels_alike
    rows = [
        [
            shown.code(change.item.name),
            each.seed,
            shown.code(each.tensor),
            shown.prose(each.after.statistic),
            f"{short(abs(each.before.value))} (margin {short(each.before.margin)})",
            f"{short(abs(each.after.value))} (margin {short(each.after.margin)})",
            _show_growth(each, each.growth),
            f"up to {_show_growth(each, each.allowed(given))}",
        ]
        for change in runs.changes[kind]
        for each in change.grown(given)
    ]
    return markdown_table(rows, _GROWN)


def _draw_movements(runs: Comparison, kind: Kind) -> str:
    """Return a table of the items whose numbers were changed by code."""
    rows = [
        [
            shown.code(change.item.name),
            shown.prose(", ".join(change.moved)),
            most.seed,
            shown.code(most.tensor),
            shown.prose(most.after.statistic),
            short(abs(most.before.value), 3),
            short(abs(most.after.value), 3),
            f"up to {_show_growth(most, most.allowed(runs.noise))}",
        ]
        for change, most in _by_movement(runs)
    ]
    return markdown_table(rows, _MOVED)


def _draw_cell(item: Item | None) -> str:
    """Return the item's verdict, with the reason if nothing was compared."""
    if item is None:
        return ""
    return f"{verdict_of(item)} {shown.prose(item.worst.reason)}" if item.worst.reason else verdict_of(item)
