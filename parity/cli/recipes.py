"""Say what recipes cost in a pair, and which of its layers to keep in BF16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parity import shown
from parity.advice import advice, tables
from parity.cli.stages import load_pair
from parity.plugin.options import check_file
from parity.settings import PRECISION_NAMES
from parity.te import precision_named
from parity.trace.whose import users_line
from parity.user_error import UserError


def advise(
    target: str,
    precisions: Sequence[str] | None,
    size: str,
    seeds: Sequence[int],
    keep: int | None,
    by: str,
    report: Path | None,
    as_json: bool,
    backend: str,
) -> str:
    """Return the text to print about a pair's recipes, after writing the report if one is asked for.

    The arguments are the command's; without precisions, those of the pair that have a recipe are taken.

    Raises:
        UserError: if there is no such pair or size, the folder cannot be written to, or there is nothing to advise.
    """
    if by not in ("", *advice.KINDS):
        raise UserError(f"--by is {by!r}, but must be one of {', '.join(advice.KINDS)}")
    if report is not None:
        check_file(report / "recipes.md", "--report")
    case, checked, kernels = load_pair(target, size, backend)
    names = precisions or [
        name for name in case.precisions or PRECISION_NAMES if precision_named(name).recipe is not None
    ]
    if not names:
        raise UserError(f"{case} asks for no precision with a recipe; name some with -p, such as -p fp8_current,nvfp4")
    try:
        found = advice.advise(case, checked, [precision_named(name) for name in names], seeds, kernels, keep, by)
    except UserError as error:
        raise UserError(f"{case}: {error}") from error
    except Exception as error:  # the pair's code may raise anything
        told = "; at ".join(filter(None, (shown.raised(error), users_line(error))))
        raise UserError(f"{case} cannot be computed: {told}") from error
    subject = case.name, checked.size, seeds, found
    page = [] if report is None else [f"report: {tables.write(report, *subject)}"]
    return tables.to_json(*subject) if as_json else "\n\n".join([tables.describe(found), *page])
