"""What ``nvidia-smi``, the command of NVIDIA's driver, answers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

_LONGEST_ANSWER = 20  # seconds


def ask(arguments: Sequence[str]) -> str | None:
    """Its standard output; None where it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_LONGEST_ANSWER, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
