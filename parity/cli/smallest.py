"""Find the smallest case in which a pair fails as it does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from parity import shown, te
from parity.case import registry
from parity.cli.conversion import parse_size
from parity.minimize.minimize import minimize
from parity.plugin.options import check_file, parse_backend
from parity.progress import Following


def print_smallest(target: str, size: str, seed: int, precision: str, backend: str, out: Path | None) -> bool:
    """Print the file of the smallest case, or write it, and return whether it fails in a new process, too.

    Args:
        target: ``my_pairs.py::my_model``, also with an item's brackets, or only the file if it declares one pair.
        size: see ``parse_size``; empty for each of the pair's sizes in turn.
        seed: the seed of weights and inputs.
        precision: a precision's name; brackets take precedence.
        backend: ``auto``, ``gpu`` or ``cpu``.
        out: the file to write; None for standard output.

    Raises:
        UserError: as ``minimize``, and if the file cannot be written.
    """
    if out is not None:
        check_file(out, "-o")
    case = registry.only(target)
    if (chosen := parse_size(case, size)) is not None:
        case = replace(case, sizes=(chosen,))
    item = target.partition("::")[2]
    precisions = [*map(te.precision_named, te.PRECISIONS if "[" in item else [precision])]
    with Following("minimizing") as following:
        found = minimize(case, item, precisions, seed, te.kernels(parse_backend(backend)), following)
    if out is None:
        print(shown.text(found.text), end="")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.text, encoding="utf-8")
    print(shown.text(found.told), file=sys.stderr)
    if found.problem:
        print(shown.text(f"but in a new process this file does not fail like that: {found.problem}"), file=sys.stderr)
    return not found.problem
