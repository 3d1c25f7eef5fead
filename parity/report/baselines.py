"""Keep records under a name, to compare later runs with, and find those and the records of earlier runs."""

from __future__ import annotations

import os
from pathlib import Path

from parity.machine import files
from parity.user_error import UserError

# Below the folder where parity is started, as pytest-benchmark keeps its own in `.benchmarks`: there is one place,
# whatever a run's report folder is, and a repository can hold it.
FOLDER = Path(".parity/baselines")
# Where records of earlier runs are, below the folder of their report.
RUNS = "runs"
_DIGITS = 4


def path_of(name: str, start: Path) -> Path:
    """Return where the baseline of this name is, or would be.

    Args:
        name: the baseline's.
        start: the folder where parity was started.
    """
    return start / FOLDER / f"{name}.jsonl"


def keep(record: Path, name: str, start: Path) -> tuple[Path, bool]:
    """Keep a record under a name.

    Returns:
        Where it is kept, and whether one of this name was there before.

    Raises:
        OSError: if it cannot be written.
    """
    target = path_of(name, start)
    replaced = target.exists()
    files.replace(target, record.read_bytes())
    return target, replaced


def find(text: str, start: Path, option: str) -> Path:
    """Return the record that a user means: a path, a baseline's name, or an earlier run such as ``7`` or ``night-7``.

    Raises:
        UserError: if there is none; says which there are.
    """
    path = start / text
    if os.path.isfile(path) or path.suffix == ".jsonl":  # which no name is too long for
        return path
    named = path_of(text, start)
    if os.path.isfile(named):
        return named
    earlier = _earlier(text, start / "reports" / RUNS)
    if earlier is not None:
        return earlier
    known = sorted(each.stem for each in (start / FOLDER).glob("*.jsonl"))
    runs = sorted(each.stem for each in (start / "reports" / RUNS).glob("*.jsonl"))
    raise UserError(
        f"{option} is {text!r}, which is no file, no baseline in {FOLDER} ({', '.join(known) or 'there is none'}; "
        f"`parity run --save-as {text}` makes one) and no earlier run in reports/{RUNS} "
        f"({', '.join(runs) or 'there is none'})"
    )


def _earlier(text: str, folder: Path) -> Path | None:
    name, _, number = text.rpartition("-")
    if not (number.isascii() and number.isdigit()):
        return None
    found = numbered(folder, name or "parity", int(number), ".jsonl")
    return found if os.path.isfile(found) else None


def numbered(folder: Path, name: str, number: int, suffix: str) -> Path:
    """Return the path of an earlier run's file: ``runs/parity-0007.jsonl``."""
    return folder / f"{name}-{number:0{_DIGITS}}{suffix}"


def numbers(folder: Path, name: str) -> list[int]:
    """Return the numbers of the earlier runs of this name, the oldest first."""
    stems = (each.stem for each in folder.glob(f"{name}-*.jsonl"))
    ends = (stem.removeprefix(f"{name}-") for stem in stems)
    return sorted(int(end) for end in ends if end.isascii() and end.isdigit())
