"""Show on what the results of a pair's candidate depend besides a token's own inputs: a table of axes by precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tabulate import tabulate

from parity import shown
from parity.cli.stages import load_pair
from parity.invariance import Outcome, try_axes
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.report.numbers import short
from parity.settings import PRECISION_NAMES
from parity.te import precision_named, why_refused
from parity.user_error import UserError


def print_axes(target: str, size: str, seed: int, precisions: Sequence[str] | None, backend: str) -> bool:
    """Print what becomes of every axis, and return whether the candidate depends on none.

    Args:
        target: ``my_pairs.py::my_model``, or only the file if it declares one pair.
        size: see ``parse_size``.
        seed: the seed of weights and inputs.
        precisions: keys of ``PRECISIONS``; None for those at which the pair runs here.
        backend: ``auto``, ``gpu`` or ``cpu``.

    Raises:
        UserError: if there is no such pair, size or precision, or the pair cannot run here.
    """
    case, checked, kernels = load_pair(target, size, backend)
    chosen = list(map(precision_named, precisions or case.precisions or PRECISION_NAMES))
    running = chosen if precisions else [one for one in chosen if why_refused(one, kernels) is None]
    if not running:
        raise UserError(f"{case} runs at no precision here: {why_refused(chosen[0], kernels)}")
    requests = [Request(case, checked, one, seed, kernels, packaged()) for one in running]
    found = {one.precision.name: try_axes(one) for one in requests}
    print(shown.text("\n".join(list_lines(found))))
    return all(one.verdict != "depends" for outcomes in found.values() for one in outcomes)


def list_lines(found: dict[str, list[Outcome]]) -> Iterator[str]:
    """Yield the table of outcomes by precision, and what is to be said of its cells."""
    by_axis = list(zip(*found.values(), strict=True))
    rows = [[some[0].axis, *map(describe_cell, some)] for some in by_axis]
    yield from (
        line.rstrip() for line in tabulate(rows, ["", *found], tablefmt="plain", disable_numparse=True).splitlines()
    )
    yield ""
    for some in by_axis:
        told = dict(zip(found, some, strict=True))
        for verdict in ("depends", "reference", "none"):
            names = [name for name, one in told.items() if one.verdict == verdict]
            if names:
                is_at = verdict == "depends" or len(names) < len(found)
                others = f"; so at {', '.join(names[1:])}" * (is_at and len(names) > 1)
                yield f"{some[0].axis}{f' at {names[0]}' * is_at}: {told[names[0]].told}{others}"


def describe_cell(one: Outcome) -> str:
    """Return the verdict with the size of the change."""
    word = {"none": "-", "depends": "DEPENDS"}.get(one.verdict, one.verdict)
    return f"{word} {short(one.change)}" if one.verdict in ("kernels", "recipe", "depends") else word
