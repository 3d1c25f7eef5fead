"""Show which known mistakes a comparison of a pair would have passed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tabulate import tabulate

from parity import shown
from parity.case.case import Case
from parity.cli.stages import load_pair
from parity.coverage import Tried, missed, try_mistakes
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.mistakes.codes import CODES, check_accepts
from parity.report.numbers import short
from parity.te import precision_named

_HEADERS = ("finding", "mistake that passes", "where", "moves an output by", "margin")
_NAMED = 6
_WIDTHS = [None, 60, 30, None, None]  # in columns of text


def print_missed(target: str, size: str, seed: int, precision: str, backend: str, probe_weights: bool) -> bool:
    """Print the mistakes that a comparison would have passed, and return whether the pair accepts all of them.

    Args:
        target: ``my_pairs.py::my_model``, or only the file if it declares one pair.
        size: see ``parse_size``.
        seed: the seed of weights and inputs.
        precision: a key of ``PRECISIONS``.
        backend: ``auto``, ``gpu`` or ``cpu``.
        probe_weights: whether the comparison is with probing weights as well.

    Raises:
        UserError: if there is no such pair, size or precision, or the pair cannot be compared here.
    """
    case, checked, kernels = load_pair(target, size, backend)
    check_accepts(case)
    request = Request(case, checked, precision_named(precision), seed, kernels, packaged(), probe_weights=probe_weights)
    tried = try_mistakes(request)
    rows = _one_of_each(missed(tried))
    print(shown.text("\n".join(_list_lines(case, tried, rows))))
    return all(_is_accepted(case, one) for one, *_ in rows)


def _one_of_each(passed: Sequence[Tried]) -> list[list[Tried]]:
    """Return the mistakes of each title in the same place, the likeliest first, and those first that show most."""
    found: dict[tuple[str, str], list[Tried]] = {}
    for one in passed:
        found.setdefault((one.mistake.title, one.place), []).append(one)
    return sorted(found.values(), key=lambda alike: (alike[0].effect, alike[0].margin), reverse=True)


def _is_accepted(case: Case, one: Tried) -> bool:
    return one.mistake.title in case.accepts


def _list_lines(case: Case, tried: Sequence[Tried], rows: Sequence[Sequence[Tried]]) -> Iterator[str]:
    if rows:
        table = [_make_row(case, alike) for alike in rows]
        text = tabulate(table, _HEADERS, tablefmt="plain", disable_numparse=True, maxcolwidths=_WIDTHS)
        yield from (line.rstrip() for line in text.splitlines())
        yield ""
    found = sum(one.is_shown for one in tried)
    yield f"{found} of {len(tried)} known mistakes in the reference's operations would have failed here"
    if rows:
        named = list(dict.fromkeys(alike[0].mistake.name for alike in rows if not _is_accepted(case, alike[0])))
        told = f"this run could not have shown: {shown.few_of(named, _NAMED)}"
        yield told if named else "the pair accepts all others by their titles"
    unused = [title for title in case.accepts if all(alike[0].mistake.title != title for alike in rows)]
    if unused:
        yield f"the pair accepts {', '.join(unused)}, but no mistake of this name passes here"


def _make_row(case: Case, alike: Sequence[Tried]) -> tuple[str, ...]:
    first = alike[0]
    mistake = f"{first.mistake.name}: {first.mistake.repair}"
    if len(alike) > 1:
        mistake += f"; also {shown.few_of([one.mistake.name for one in alike[1:]], 2)}"
    title = f"{CODES[first.mistake.title]} {first.mistake.title}{' (accepted)' * _is_accepted(case, first)}"
    moves = f"{short(first.effect)} × its limit" if first.effect else "nothing"
    return title, mistake, first.place, moves, "the same bits" if first.is_idle else short(first.margin)
