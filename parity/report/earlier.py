"""Find out whether an earlier run matches this one (options, items, code, machine), and keep and find records."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parity.machine import files
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.report.environment import Environment

# The options and the code of a run, as the first line of its record contains them.


@dataclass(frozen=True)
class Asked:
    """Hold everything that the results of a run depend on, apart from the machine and the versions.

    Attributes:
        options: the plugin's options, by name, as the user would write them.
        items: a checksum of the items' ids.
        code: checksums by name: one for each of the user's files that the run imported, by its path; one of all of
            parity; one of the table of limits; and one of the environment variables that TE and parity read.
    """

    options: Mapping[str, str]
    items: str = ""
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)


_PACKAGE = Path(__file__).parents[1]
_KERNELS = _PACKAGE.with_name("te_on_cpu")
PARITY, LIMITS, VARIABLES = "parity's code", "the table of limits", "variables NVTE_* and PARITY_*"
_MOST_FILES = 1_000
# Variables that only say where a run takes place, or that correspond to options.
_NO_MATTER = ("PARITY_DEVICES", "PARITY_BACKEND", "PARITY_TESTS")


def asked(
    options: Mapping[str, str], items: Iterable[str], files: Iterable[Path], start: Path, limits: Path | None
) -> Asked:
    """Return the options and the checksums of the run in this process.

    Args:
        options: as in ``Asked``.
        items: the ids of all items of the run.
        files: the files of pairs.
        start: the folder in which pytest was started; modules in files below it are the user's.
        limits: the file of the table of limits; None for the packaged one.
    """
    code = {PARITY: code_of_parity(), VARIABLES: _checksum_variables()}
    if limits is not None:
        code[LIMITS] = _checksum_files([limits])
    for file in sorted({*files, *_modules_below(start)})[:_MOST_FILES]:
        name = file.relative_to(start) if file.is_relative_to(start) else Path(file.name)
        code[name.as_posix()] = _checksum_files([file])
    return Asked(options, f"{zlib.crc32(chr(10).join(sorted(items)).encode('utf-8', 'replace')):08x}", code)


@functools.cache
def code_of_parity() -> str:
    """Return a checksum of the files of parity that can change the result of a comparison."""
    files = sorted(file for ending in ("py", "json", "toml") for file in _PACKAGE.rglob(f"*.{ending}"))
    used = [file for file in files if file.relative_to(_PACKAGE).parts[0] not in ("measuring", "cli")]
    return _checksum_files([*used, *sorted(_KERNELS.rglob("*.py"))])


def _modules_below(folder: Path) -> Iterator[Path]:
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.startswith(f"{folder}{os.sep}") and "site-packages" not in name:
            file = Path(name)
            if not file.is_relative_to(_PACKAGE) and not file.is_relative_to(_KERNELS):
                yield file


def _checksum_variables() -> str:
    mine = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(("NVTE_", "PARITY_"))]
    return f"{zlib.crc32(chr(0).join(sorted(each for each in mine if not each.startswith(_NO_MATTER))).encode()):08x}"


def _checksum_files(files: Iterable[Path]) -> str:
    checksum = 0
    for file in files:
        try:
            checksum = zlib.crc32(file.read_bytes(), checksum)
        except OSError:
            continue
    return f"{checksum:08x}"


# The differences between two runs, in words.


# Fields that differ between any two runs, that are measured on the machine, or that are compared in other ways.
_ANY = ("date", "parity", "asked", "limits_compared", "golden", "limits", "threads")
_LABELS = {"items": "the number of items", "cpu": "processor", "transformer_engine": "TransformerEngine"}


def differences(before: Environment, now: Environment) -> list[str]:
    """Return sentences about how a run differs from an earlier one; an empty list if it may resume that one."""
    found = [
        f"{_LABELS.get(field.name, field.name)} was {_format_value(old)}, now it is {_format_value(new)}"
        for field in dataclasses.fields(before)
        if field.name not in _ANY and (old := getattr(before, field.name)) != (new := getattr(now, field.name))
    ]
    if before.asked is None or now.asked is None:
        return [*found, "it does not say what it was asked for, as records of older versions do not"]
    found += differences_of_options(before.asked.options, now.asked.options)
    found += [f"{name} changed" for name in changed_code(before.asked.code, now.asked.code)]
    if not found and before.asked.items != now.asked.items:
        found.append("it has other items")
    return found


# The fields that decide how kernels round. The others, such as the processor, can only change the order of sums.
_OF_KERNELS = ("backend", "device", "transformer_engine", "torch", "cuda", "cudnn", "cublas", "driver")
_ATTENTION = "--parity-attention"


def kernels_round_alike(before: Environment, now: Environment) -> bool:
    """Return whether two runs agree in everything that decides how kernels round."""
    if before.asked is None or now.asked is None:
        return False
    return (
        all(getattr(before, name) == getattr(now, name) for name in _OF_KERNELS)
        and before.asked.options.get(_ATTENTION) == now.asked.options.get(_ATTENTION)
        and VARIABLES not in changed_code(before.asked.code, now.asked.code)
    )


# The order in which the CPU kernels sum may also depend on these.
_OF_ORDER = ("cpu", "platform", "threads")


def kernels_are_the_same(before: Environment, now: Environment) -> bool:
    """Return whether both runs computed with the same kernels, which give the same bytes unless they race.

    They did not if parity's code has changed, because it contains the CPU kernels and the code that calls a candidate.
    """
    if before.asked is None or now.asked is None or not kernels_round_alike(before, now):
        return False
    names = _OF_ORDER if now.backend == "cpu" else ()
    pairs = [(getattr(before, name), getattr(now, name)) for name in names]
    pairs.append((before.asked.code.get(PARITY), now.asked.code.get(PARITY)))
    return all(old and old == new for old, new in pairs)


def differences_of_options(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a sentence about each option whose value differs."""
    return [
        f"{name} was {before.get(name, '')!r}, now it is {now.get(name, '')!r}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name, "") != now.get(name, "")
    ]


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names whose checksums differ. Only names in both count, since modules may be imported at any time."""
    return [name for name in before if name in now and before[name] != now[name]]


def _format_value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value) or "none"


# Keep records as baselines for later runs, and find baselines and the records of earlier runs.


# Baselines are kept below the folder where parity is started, as pytest-benchmark keeps its own in `.benchmarks`. This
# place does not depend on a run's report folder, and it can be committed to a repository.
FOLDER = Path(".parity/baselines")
# The folder of the records of earlier runs, in the folder of their report.
RUNS = "runs"
_DIGITS = 4


def path_of(name: str, start: Path) -> Path:
    """Return the path of the baseline with this name, whether it exists or not.

    Args:
        name: the baseline's name.
        start: the folder where parity was started.
    """
    return start / FOLDER / f"{name}.jsonl"


def keep(record: Path, name: str, start: Path) -> tuple[Path, bool]:
    """Keep a record as a baseline.

    Returns:
        The baseline's path, and whether it replaced one with the same name.

    Raises:
        OSError: if it cannot be written.
    """
    target = path_of(name, start)
    replaced = target.exists()
    files.replace(target, record.read_bytes())
    return target, replaced


def find(text: str, start: Path, option: str) -> Path:
    """Return the record that a user means by a path, a baseline's name, or an earlier run such as ``7`` or ``night-7``.

    Raises:
        UserError: if there is none; the message lists the existing ones.
    """
    path = start / text
    if os.path.isfile(path) or path.suffix == ".jsonl":  # isfile does not raise if a name is too long
        return path
    named = path_of(text, start)
    if os.path.isfile(named):
        return named
    earlier = _find_earlier_run(text, start / "reports" / RUNS)
    if earlier is not None:
        return earlier
    known = sorted(each.stem for each in (start / FOLDER).glob("*.jsonl"))
    runs = sorted(each.stem for each in (start / "reports" / RUNS).glob("*.jsonl"))
    raise UserError(
        f"{option} is {text!r}, which is no file, no baseline in {FOLDER} ({', '.join(known) or 'there is none'}; "
        f"`parity run --save-as {text}` makes one) and no earlier run in reports/{RUNS} "
        f"({', '.join(runs) or 'there is none'})"
    )


def _find_earlier_run(text: str, folder: Path) -> Path | None:
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
