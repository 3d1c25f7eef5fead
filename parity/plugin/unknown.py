"""What an id may have meant that names no pair or item: the nearest names that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parity.case import Case


def unknown_pairs(arguments: Iterable[str], start: Path, cases: Iterable[Case]) -> Iterator[str]:
    """A sentence for each id of a file of pairs that names none of them.

    Args:
        arguments: of pytest: files, folders and ids.
        start: folder that relative paths are taken from.
        cases: those that are declared.
    """
    by_file: dict[Path, dict[str, Case]] = {}
    for case in cases:
        by_file.setdefault(case.path, {})[case.name] = case
    for argument in arguments:
        path, _, item = argument.partition("::")
        declared = by_file.get((start / path).resolve(), {})
        name = item.partition("[")[0]
        if not item or not declared:
            continue
        if name == item and name in declared:
            at = ", ".join(declared[name].precisions or ("every precision",))
            yield f"the pair {name!r} of {path} has no item in this run; it is compared at {at}"
        elif name in declared:
            yield f"the pair {name!r} of {path} has no item {item!r}; `pytest {path} --collect-only -q` lists them"
        else:
            yield f"there is no pair {name!r} in {path}; {_advice(path, name, list(declared))}"


def _advice(path: str, name: str, declared: list[str]) -> str:
    close = difflib.get_close_matches(name, declared, n=3)
    ids = " or ".join(f"{path}::{other}" for other in close)
    return f"did you mean {ids}?" if close else f"it declares {', '.join(declared)}"
