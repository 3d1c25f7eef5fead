"""Settings that need no torch: the precisions' names, the most training steps, how long a search may take."""

from __future__ import annotations

import os
import re

from parity.user_error import UserError

# The precisions' names, for code that need not know what they mean, and so need not import torch.


PRECISION_NAMES = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


# The most steps that a pair may be trained for.


MOST_STEPS = 100_000


# How long the search for the cause of a failure may take in real time by default.


SECONDS = 30.0
VARIABLE = "PARITY_DIAGNOSIS_SECONDS"
LONGEST = 1e9  # Python's timers end at nine times that


def default_seconds() -> float:
    """Return what the environment variable says, for machines on which a search takes longer; 0 for no limit.

    Raises:
        UserError: if it is no number of seconds.
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
