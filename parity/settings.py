"""Settings that need no torch: precision names, limits of steps and of a search, and a project's defaults."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from parity.user_error import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

# The precisions' names, for code that does not need their meaning and so should not have to import torch.


PRECISION_NAMES = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")

DECLARED_PRECISIONS: dict[str, Any] = {}
"""Those that ``parity.recipe`` has declared by name, of ``parity.te.Precision``."""


AXES = (
    *("batch-size", "batch-place", "padding-right", "padding-left", "padding-garbage", "packing"),
    *("prefix", "decoding", "micro-batches", "recompute", "ranks"),
)
"""What a pair may be invariant to, see ``parity.invariance``."""


def check_precisions(names: Iterable[object], where: str) -> None:
    """Check that every name is that of a precision.

    Args:
        names: the names as a user wrote them.
        where: the option or argument that has them, for the message, such as ``--precision``.

    Raises:
        UserError: for the first name that is unknown; suggests the nearest one.
    """
    for name in names:
        if name not in PRECISION_NAMES and name not in DECLARED_PRECISIONS:
            close = difflib.get_close_matches(str(name).lower(), PRECISION_NAMES, n=1)
            there_are = f"did you mean {close[0]}? There are" if close else "there are"
            known = ", ".join([*PRECISION_NAMES, *DECLARED_PRECISIONS])
            yours = "and FILE::NAME for a parity.recipe of yours"
            raise UserError(f"unknown precision {name!r} in {where}; {there_are} {known}, {yours}")


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


# The defaults of a project: ``[tool.parity]`` in its pyproject.toml.


def of_project(paths: Iterable[Path], start: Path, known: Iterable[str]) -> dict[str, str]:
    """Return the defaults of options, as on the command line, from the nearest pyproject.toml that has some.

    It is searched for as pytest searches for its own configuration: from the paths' common folder upwards, then from
    the folder where the run was started. Lists become texts with commas; a file or folder is relative to that of the
    pyproject.toml.

    Args:
        paths: absolute paths of the files and folders to be compared.
        start: where the run was started.
        known: the names of the options.

    Raises:
        UserError: for an option that does not exist or a value that is nothing like that; names it.
    """
    existing = [str(path) for path in paths if path.exists()]
    for top in [*([Path(os.path.commonpath(existing))] if existing else []), start]:
        for file in (folder / "pyproject.toml" for folder in (top, *top.parents)):
            try:
                found = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["parity"].items()
            except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a broken file is not parity's
                continue
            return {name: _as_option(name, value, known, file) for name, value in found}
    return {}


_PATHS = ("report", "calibration")
_TEXTS = (*_PATHS, "name", "address", "against", "save-as")  # whatever the text is, it is valid


def _as_option(name: str, value: object, known: Iterable[str], file: Path) -> str:
    where = f"{file}: [tool.parity]: {name}"
    if name not in known:
        raise UserError(f"{where} is not an option; there are {', '.join(known)}")
    if not isinstance(value, str if name in _TEXTS else (str, int, float, list)):
        raise UserError(f"{where} is {value!r}, but must be {'a text' if name in _TEXTS else 'as on the command line'}")
    if isinstance(value, list):
        return "".join(f"{_resolve_beside(part, file) if name == 'precisions' else part}," for part in value)
    if isinstance(value, bool):
        return ("no", "yes")[value]
    if name == "precisions":
        return ",".join(_resolve_beside(part, file) for part in str(value).split(","))
    return str(file.parent / str(value) if name in _PATHS else value)


def _resolve_beside(precision: object, file: Path) -> str:
    """Return a precision's name, with the path before it, if it has one, relative to the file's folder."""
    text = str(precision).strip()
    return str(file.parent / text) if "::" in text else text
