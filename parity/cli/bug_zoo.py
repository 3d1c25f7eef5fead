"""Plant the zoo's bugs from the command line and write the report."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from parity.lab.zoo import catalogue, trial
from parity.lab.zoo.planting import SIZES
from parity.settings import check_precisions
from parity.te import PRECISIONS
from parity.user_error import UserError


def run(
    pattern: str, precisions: Sequence[str], sizes: Sequence[str], seeds: Sequence[int], workers: int, out: Path
) -> Path:
    """Judge every chosen bug and the right ports of its hosts; what the record beside the report has is kept.

    Args:
        pattern: a pattern of bugs' names, as in a shell.
        precisions: names; none for each that this machine runs.
        sizes: names in ``SIZES``; none for both.
        seeds: how many of each size, from 0, or how many of all.
        workers: how many processes.
        out: the report; its record has the same name with ``.jsonl``.

    Returns:
        The report's path.

    Raises:
        UserError: for an unknown bug, precision or size, if seeds and sizes do not match, if this machine runs none of
            the precisions, and without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the zoo's plot needs matplotlib: pip install 'te-parity[studies]'")
    check_precisions(precisions, "--precision")
    _check("size", sizes, SIZES)
    asked = tuple(precisions) or tuple(PRECISIONS)
    left_out = trial.unavailable(asked)
    available = tuple(name for name in asked if name not in left_out)
    if not available:
        raise UserError(f"this machine runs none of {', '.join(asked)}: {left_out[asked[0]]}")
    bugs = catalogue.chosen(pattern)
    chosen = tuple(sizes) or SIZES
    if len(seeds) not in (1, len(chosen)) or min(seeds) < 1:
        raise UserError(f"--seeds must be a count for all sizes or one for each of {', '.join(chosen)}, at least 1")
    counts = dict(zip(chosen, [*seeds] * len(chosen) if len(seeds) == 1 else seeds, strict=True))
    plan = trial.Plan(bugs, trial.hosts_of(bugs), available, counts)
    verdicts = trial.run(plan, out.with_suffix(".jsonl"), workers)
    from parity.lab.zoo import report  # draws with matplotlib

    return report.write(verdicts, plan, left_out, out)


def _check(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
