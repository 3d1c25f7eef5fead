"""Check what ``parity.compare`` accepts besides the pair; each function says what is wrong with an argument.

To compare nothing is a mistake, too: an empty list of results would look like one in which everything passed.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable

from parity.judge.limits import Table
from parity.settings import check_precisions, default_seconds
from parity.user_error import UserError

_BACKENDS = ("auto", "gpu", "cpu")


def checked_precisions(precisions: object) -> list[str]:
    """Return names of precisions, at least one."""
    if isinstance(precisions, str) or not isinstance(precisions, Iterable):
        raise UserError(f'precisions must be a list of names, such as ["bf16"], not {precisions!r}')
    names = list(precisions)
    check_precisions(names, "precisions")
    if not names:
        raise UserError("precisions is empty; leave it out for all of them")
    return names


def checked_seeds(seeds: object) -> list[int]:
    """Return the seeds: whole numbers from 0, Python's or NumPy's, at least one."""
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise UserError(f"seeds must be a list of whole numbers, such as range(3), not {seeds!r}")
    numbers = list(map(_seed, seeds))
    if not numbers:
        raise UserError("seeds is empty; leave it out for seed 0")
    return numbers


def check_kinds(backend: object, calibration: object, determinism: object) -> None:
    """Make sure that the other arguments have the right types.

    Raises:
        UserError: if one is not.
    """
    if backend not in _BACKENDS:
        raise UserError(f"the backend is {backend!r}, but must be one of {', '.join(_BACKENDS)}")
    if not isinstance(determinism, bool):
        raise UserError(f"determinism must be True or False, not {determinism!r}")
    if not (calibration is None or isinstance(calibration, Table)):
        raise UserError(f"calibration must be a table that parity.judge.limits.load() reads, not {calibration!r}")


def checked_diagnosis(diagnose: object, seconds: object) -> float | None:
    """Return the seconds that the search for a failure's cause may take, 0 for no limit; None for no search."""
    if not isinstance(diagnose, bool):
        raise UserError(f"diagnose must be True or False, not {diagnose!r}")
    if seconds is None:
        seconds = default_seconds()
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not is_number or not 0.0 <= float(seconds) <= math.inf:  # type: ignore[arg-type]
        raise UserError(f"diagnosis_seconds must be a number of seconds, or 0 for no limit, not {seconds!r}")
    return float(seconds) if diagnose else None  # type: ignore[arg-type]


def _seed(seed: object) -> int:
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < 2**63:
        raise UserError(f"a seed must be a whole number from 0 to 2**63 - 1, not {seed!r}")
    return number
