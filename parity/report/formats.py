"""Show in which formats TE's modules computed: a table in which modules with the same formats share a row."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from parity.result import Result
from parity.shown import few_of

COLUMNS = ("modules", "forward", "input's gradient", "weight's gradient")
_MOST_TOLD = 4  # names in a cell
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def format_rows(results: Iterable[Result]) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table with the columns ``COLUMNS``, for results of one precision.

    Numbers in names become ``*`` if all modules whose names differ only in them have the same formats.
    """
    modules: dict[tuple[tuple[str, str], ...], dict[str, None]] = defaultdict(dict)
    for result in results:
        for row in result.formats:
            modules[tuple(row.operands.items())].update(dict.fromkeys(row.modules))
    stems: dict[str, set[int]] = defaultdict(set)
    for number, names in enumerate(modules.values()):
        for name in names:
            stems[_NUMBER.sub("*", name)].add(number)
    rows = []
    for operands, names in modules.items():
        shown = dict.fromkeys(_shorten_name(name, names, stems) for name in names)
        rows.append((few_of(list(shown), _MOST_TOLD), *_describe_products(dict(operands))))
    return rows


def _shorten_name(name: str, alike: Iterable[str], stems: Mapping[str, set[int]]) -> str:
    stem = _NUMBER.sub("*", name)
    is_one_of_many = sum(_NUMBER.sub("*", other) == stem for other in alike) > 1
    return (stem if is_one_of_many and len(stems[stem]) == 1 else name) or "the candidate"


def _describe_products(operands: Mapping[str, str]) -> tuple[str, str, str]:
    """Return what each of a module's GEMMs multiplies; of attention, its tensors in the forward and backward pass."""
    attention = {name.removeprefix("attention "): words for name, words in operands.items() if "attention" in name}
    if attention:
        backward = [f"{name.replace('_', ' ')} {words}" for name, words in attention.items() if "gradients" in name]
        forward = [f"{name} {words}" for name, words in attention.items() if "gradients" not in name]
        return "; ".join(forward), "; ".join(backward), ""
    fprop, dgrad, wgrad = (
        " × ".join(f"{words}" for name, words in operands.items() if name.startswith(gemm))
        for gemm in ("fprop", "dgrad", "wgrad")
    )
    return fprop, dgrad, wgrad
