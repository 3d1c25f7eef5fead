"""``python -m lab same``: check whether two versions of parity computed the same numbers and wrote the same texts.

It shows whether a refactoring changed anything. ``scripts/keep_records.sh`` makes the records of each version. Here
they are compared exactly, every number to its last digit and every text to its last letter, except for times, peaks of
memory, and what a record says about the machine and the code that made it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from parity import data_files
from parity.data_files import NotReadableError
from parity.user_error import UserError

# Fields that differ between any two runs, because they were measured on the machine and not computed.
OF_THE_MACHINE = frozenset({"seconds", "peak_bytes"})
# Keys of lines that say how a record was made, not what was computed.
ABOUT_THE_RECORD = frozenset({"environment", "code"})
# The fields that identify a result of `parity run`. All other records name their runs themselves, in "run".
NAMES_A_RESULT = ("path", "case", "precision", "size_label", "seed", "forced_attention")
SHOWN = 30
LONGEST_TEXT = 60

Values = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """One value that the two records do not share.

    Attributes:
        file: the record's path relative to the folders that were compared.
        run: the run, as the record names it.
        place: the place in the run's result, e.g. ``tensors.0.errors.relative_l2``; empty if one record lacks the run.
        old: the value in the old record; None if it has none there.
        new: the value in the new record; None if it has none there.
    """

    file: str
    run: str
    place: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Comparison:
    """Two sets of records, side by side.

    Attributes:
        files: how many records both have.
        runs: how many runs both have.
        values: how many numbers and texts were compared.
        differences: every value that differs, in the records' order.
    """

    files: int
    runs: int
    values: int
    differences: tuple[Difference, ...]


def compare(old: Path, new: Path) -> Comparison:
    """Compare two records, or all records below two folders.

    Args:
        old: a record (JSON lines), or a folder of records.
        new: the same kind of thing; the records of two folders are matched by name.

    Raises:
        UserError: if there is nothing to compare, or a record cannot be read.
    """
    pairs = list(_pairs(old, new))
    if not pairs:
        raise UserError(f"{old} and {new} hold no record of the same name (NAME.jsonl), so nothing was compared")
    runs = values = 0
    differences: list[Difference] = []
    for name, old_file, new_file in pairs:
        old_runs, new_runs = (_read(file) if file else {} for file in (old_file, new_file))
        if not old_runs and not new_runs:
            raise UserError(f"{old_file or new_file} holds no result, so nothing was compared")
        for run in old_runs.keys() | new_runs.keys():
            if run not in old_runs or run not in new_runs:
                there = ("a result", None) if run in old_runs else (None, "a result")
                differences.append(Difference(name, run, "", *there))
                continue
            runs += 1
            before, after = old_runs[run], new_runs[run]
            places = before.keys() | after.keys()
            values += len(places)
            differences += [
                Difference(name, run, place, before.get(place), after.get(place))
                for place in places
                if place not in before or place not in after or not _is_same(before[place], after[place])
            ]
    ordered = sorted(differences, key=lambda each: (each.file, each.run, each.place))
    return Comparison(sum(bool(a and b) for _, a, b in pairs), runs, values, tuple(ordered))


def draw(comparison: Comparison) -> str:
    """Return a text for a terminal: what was compared, the first differences, and how many each file has."""
    compared = f"{comparison.values:,} numbers and texts of {comparison.runs:,} results in {comparison.files:,} records"
    differences = comparison.differences
    if not differences:
        return f"the same: {compared}"
    rows = [
        (each.file, _short(_told(each.run)), each.place, _short(each.old), _short(each.new), _change(each))
        for each in differences[:SHOWN]
    ]
    table = tabulate(rows, ["record", "run", "where", "old", "new", "change"], tablefmt="simple", disable_numparse=True)
    more = [f"... and {len(differences) - SHOWN:,} more"] if len(differences) > SHOWN else []
    counts = [f"{file}: {count:,}" for file, count in Counter(each.file for each in differences).items()]
    verdict = f"{len(differences):,} differences in {compared} ({', '.join(counts)})"
    return "\n".join([table, *more, verdict])


def _pairs(old: Path, new: Path) -> Iterator[tuple[str, Path | None, Path | None]]:
    """Yield the name and both paths of each record, with None if a side lacks it."""
    for path in (old, new):
        if not path.exists():
            raise UserError(f"there is no record or folder {path}")
    if old.is_dir() != new.is_dir():
        raise UserError(f"give two records or two folders: one of {old} and {new} is a folder and the other is not")
    if not old.is_dir():
        yield new.name, old, new
        return
    old_files, new_files = (
        {str(file.relative_to(folder)): file for file in folder.rglob("*.jsonl")} for folder in (old, new)
    )
    for name in sorted(old_files.keys() | new_files.keys()):
        yield name, old_files.get(name), new_files.get(name)


def _read(file: Path) -> dict[str, Values]:
    """Return the values of every run by its name. A later line of the same run replaces an earlier one.

    Raises:
        UserError: if a line is damaged, because the rest of the record might only seem to be the same.
    """
    found = data_files.lines(file, _run)
    if found.left_out:
        number, reason = found.left_out[0].number, found.left_out[0].reason
        raise UserError(f"{file} is not a record: line {number}: {reason}")
    return {name: values for name, values in found.contents if name}


def _run(content: Any) -> tuple[str, Values]:
    """Return the name and the values of the run on a line, both empty if there is none."""
    if not isinstance(content, dict):
        raise NotReadableError("it is not an object")
    if content.keys() & ABOUT_THE_RECORD:
        return "", {}
    result = content.get("result", {})
    if "run" in content:
        named = content["run"]
    elif "uncollected" in content:
        named = content["uncollected"].get("node_id")
    else:
        named = {field: result.get(field) for field in NAMES_A_RESULT}
    return json.dumps(named, sort_keys=True), dict(_values(content, ""))


def _told(run: str) -> str:
    """Return the values that identify a run, without the names of the fields."""
    named = json.loads(run)
    return " ".join(str(value) for value in named.values() if value) if isinstance(named, dict) else str(named)


def _values(content: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its place; a container that is empty is a leaf, too, so that it does not vanish."""
    if isinstance(content, dict) and content:
        for key, value in content.items():
            if key not in OF_THE_MACHINE:
                yield from _values(value, f"{place}.{key}" if place else key)
    elif isinstance(content, list) and content:
        for index, value in enumerate(content):
            yield from _values(value, f"{place}.{index}")
    else:
        yield place, content


def _is_same(old: Any, new: Any) -> bool:
    """Return whether two leaves are the same; 1 and 1.0 are not, 0.0 and -0.0 are not, NaN and NaN are."""
    return type(old) is type(new) and repr(old) == repr(new)


def _change(difference: Difference) -> str:
    """Return the relative change of a number, or an empty text if there is none."""
    old, new = difference.old, difference.new
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in (old, new)) or not old:
        return ""
    return f"{(new - old) / abs(old):+.1e}"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."
