"""Find NVIDIA's tests in a checkout of TransformerEngine, and read from its scripts how NVIDIA runs them."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from parity.user_error import UserError

VARIABLE = "TE_TESTS"
TESTS = Path("tests/pytorch")
_SCRIPTS = "qa/L[01]_pytorch_*/test.sh"
_ASSIGNED = re.compile(r"(?:export +|: *\$\{)?(\w+)(?::?=)(.*?)\}?$")
_RUNS_PYTEST = re.compile(r"^\s*((?:\w+=\S* +)*)(?:python3? -m )?pytest (.*?)\s*(?:\|\||&|$)")
_RUNS_SCRIPT = re.compile(r"^python3? (\$TE_PATH/tests/\S+\.py) (-.*?)\s*\|\|")
_PLACE = re.compile(r"\$\{?(\w+)\}?")
# Parts of NVIDIA's command lines that do not matter here: the GPU's number, verbosity, and where results go.
_NO_MATTER = re.compile(r"--junitxml=\S+|--tb=\S+|(?<=\s)-[vs](?=\s)|CUDA_VISIBLE_DEVICES=\S+")


@dataclass(frozen=True)
class Job:
    """Say how NVIDIA runs one file of tests.

    Attributes:
        file: its path below ``tests/pytorch``.
        variables: environment variables, sorted.
        arguments: pytest's arguments.
        before: arguments with which NVIDIA's script first runs the file itself.
        variant: how this way to run the file differs from the first one, for which it is empty.
    """

    file: str
    variables: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.file} ({self.variant})" if self.variant else self.file


def find(place: str | None) -> Path:
    """Return the checkout's folder.

    Raises:
        UserError: if no folder is named, or it holds no tests.
    """
    if not place:
        raise UserError(
            f"NVIDIA's tests are not part of te-parity: set {VARIABLE} to a checkout of "
            "https://github.com/NVIDIA/TransformerEngine (its folders tests/ and qa/ are enough)"
        )
    root = Path(place).resolve()
    for needed in (TESTS, Path("qa")):
        if not (root / needed).is_dir():
            raise UserError(f"{VARIABLE}={place} is no checkout of TransformerEngine: it has no folder {needed}")
    return root


def version(root: Path) -> str:
    """Return the commit and its date, or an empty text if the folder is not a git checkout."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%h of %cs"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def jobs(root: Path, engine: Path) -> list[Job]:
    """Return how NVIDIA's scripts run each file, in their order.

    Args:
        root: the checkout's folder.
        engine: the folder of the installed package ``transformer_engine``, which replaces the checkout's.
    """
    found: dict[str, list[Job]] = {}
    for script in sorted(root.glob(_SCRIPTS), key=lambda path: ("debug" in path.parent.name, path)):
        for job in _of_script(root, engine, script):
            same = found.setdefault(job.file, [])
            if all((job.variables, job.arguments) != (other.variables, other.arguments) for other in same):
                same.append(job if not same else _told_apart(job, same[0]))
    return [job for same in found.values() for job in same]


def unnamed(root: Path, known: list[Job]) -> list[str]:
    """Return the test files that none of NVIDIA's scripts runs."""
    files = {path.relative_to(root / TESTS).as_posix() for path in (root / TESTS).rglob("test_*.py")}
    return sorted(files - {job.file for job in known})


def _told_apart(job: Job, first: Job) -> Job:
    more = [f"{name}={value}" for name, value in job.variables if (name, value) not in first.variables]
    less = [f"without {name}" for name, _ in first.variables if name not in dict(job.variables)]
    words = " ".join(job.arguments) if job.arguments != first.arguments else ""
    told = [each for each in more if "/" not in each] + less + [words] * bool(words)
    return dataclasses.replace(job, variant=", ".join(told))


def _of_script(root: Path, engine: Path, script: Path) -> Iterator[Job]:
    known = {"TE_PATH": str(root)}
    exported: dict[str, str] = {}
    before: dict[str, tuple[str, ...]] = {}
    for line in script.read_text(encoding="utf-8").splitlines():
        line = _NO_MATTER.sub("", line).strip()
        if command := _RUNS_PYTEST.match(line):
            assigned, words = (_filled(part, known, engine) for part in command.groups())
            variables = exported | dict(word.split("=", 1) for word in shlex.split(assigned))
            path, *arguments = shlex.split(words)
            for file in _files(Path(path)):
                name = file.relative_to(root / TESTS).as_posix()
                yield Job(name, tuple(sorted(variables.items())), tuple(arguments), before.get(name, ()))
        elif command := _RUNS_SCRIPT.match(line):
            script_run, words = (_filled(part, known, engine) for part in command.groups())
            before[Path(script_run).relative_to(root / TESTS).as_posix()] = tuple(shlex.split(words))
        elif setting := _ASSIGNED.fullmatch(line):
            name, value = setting.groups()
            known.setdefault(name, _filled(value.strip("\"'"), known, engine))
            if line.startswith("export"):
                exported[name] = known[name]


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.exists() else []


def _filled(text: str, known: Mapping[str, str], engine: Path) -> str:
    """Return the text with a script's variables filled in, and with TE's own files from the installed package."""
    filled = _PLACE.sub(lambda place: known.get(place[1], ""), text)
    return filled.replace(f"{known['TE_PATH']}/transformer_engine", str(engine))
