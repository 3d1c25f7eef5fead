"""Settings that need no torch: precision names, the most training steps, and how long a search may take."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable

from parity.user_error import UserError

# The precisions' names, for code that does not need their meaning and so should not have to import torch.


PRECISION_NAMES = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


def check_precisions(names: Iterable[object], where: str) -> None:
    """Check that every name is that of a precision.

    Args:
        names: the names as a user wrote them.
        where: the option or argument that has them, for the message, such as ``--precision``.

    Raises:
        UserError: for the first name that is unknown; suggests the nearest one.
    """
    for name in names:
        if name not in PRECISION_NAMES:
            close = difflib.get_close_matches(str(name).lower(), PRECISION_NAMES, n=1)
            there_are = f"did you mean {close[0]}? There are" if close else "there are"
            raise UserError(f"unknown precision {name!r} in {where}; {there_are} {', '.join(PRECISION_NAMES)}")


# The most steps that a pair may be trained for.


MOST_STEPS = 100_000


# How long the search for the cause of a failure may take in real time by default.


SECONDS = 30.0
VARIABLE = "PARITY_DIAGNOSIS_SECONDS"
LONGEST = 1e9  # Python's timers end at nine times that


def default_seconds() -> float:
    """Return the default limit in seconds, 0 for none; slow machines may set it by the environment variable.

    Raises:
        UserError: if the variable is not a number of seconds.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return SECONDS
    seconds = seconds_of(text)
    if seconds is None:
        raise UserError(f"{VARIABLE} is {text!r}, but must be a number of seconds, or 0 for no limit")
    return seconds


def seconds_of(text: str) -> float | None:
    """Return the number of seconds in a text; None if it is not one."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) and float(text) <= LONGEST else None
