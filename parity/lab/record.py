"""Make many jobs, here or in processes, and keep each result as soon as it is there, so that what stopped goes on.

The record has a JSON line for each result. A line of its own, before the results that it holds for, names the code that
computed them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError
from torch import Tensor

from parity import reading, shown
from parity.machine import files
from parity.machine.process import processes
from parity.progress import followed
from parity.reading import LeftOut, NotReadableError
from parity.report.environment import cpu_model, gpu_name

# A number that a record keeps with four digits, and as null where there is none.
FourDigits = Annotated[
    float,
    PlainSerializer(lambda value: None if math.isnan(value) else float(f"{value:.4g}")),
    BeforeValidator(lambda value: math.nan if value is None else value),
]
Job = TypeVar("Job", bound=Hashable)
Result = TypeVar("Result")
Made = TypeVar("Made")


class Campaign(Generic[Job, Result]):
    """Jobs whose results a record keeps.

    Args:
        path: of the record, JSON lines.
        result: the type of a result; pydantic writes it as plain data and reads it back.
        identity: everything that a job's result depends on, as JSON types; by default the job's own fields.
        code: what computes the results, of ``code_of``; None where a record is of one version of parity.
    """

    def __init__(
        self,
        path: Path,
        result: Any,
        identity: Callable[[Job], Mapping[str, Any]] = dataclasses.asdict,  # type: ignore[assignment]
        code: Code | None = None,
    ) -> None:
        self._path, self._identity, self._code = path, identity, code
        self._types: TypeAdapter[Result] = TypeAdapter(result)

    def finished(self, jobs: Iterable[Job]) -> dict[Job, Result]:
        """Return the results of those jobs that the record has, in a form that this version reads."""
        found = read(self._path)
        keys = {job: key_of(self._identity(job)) for job in jobs}
        results: dict[Job, Result] = {}
        for job, key in keys.items():
            if key in found:
                with suppress(ValidationError):  # it is made again
                    results[job] = self._types.validate_python(found[key])
        return results

    def keep(self, job: Job, result: Result) -> None:
        """Add a job's result; it is in the record when this returns."""
        append(self._path, self._identity(job), self._types.dump_python(result), self._code)

    def complete(
        self, jobs: Iterable[Job], make: Callable[[Job], Result], doing: str, workers: int | None = None
    ) -> dict[Job, Result]:
        """Make the jobs that the record lacks, in their order, and return the results of all.

        Args:
            jobs: one that comes twice is made once.
            make: a job's result; for processes a function of a module, or a partial of one.
            doing: what the progress bar says.
            workers: see ``made``.

        Raises:
            UserError: if another process makes jobs of this record.
        """
        every = list(dict.fromkeys(jobs))
        for sentence in reading.told(self._path, damaged(self._path)):
            print(f"{shown.line(sentence)}: this line is left out, and what it told is made again", file=sys.stderr)
        with files.claimed(self._path):
            finished = self.finished(every)
            for job, result in made([job for job in every if job not in finished], make, doing, workers):
                self.keep(job, result)
            return self.finished(every)


def made(
    jobs: Sequence[Job], make: Callable[[Job], Made], doing: str, workers: int | None = None
) -> Iterator[tuple[Job, Made]]:
    """Yield each job with what is made of it, as soon as it is there, beside a progress bar.

    Args:
        jobs: in the order in which they are begun.
        make: called with a job.
        doing: what the progress bar says.
        workers: processes of one thread each; None for this process, as it is.
    """
    if workers is None:
        for job in followed(jobs, doing):
            yield job, make(job)
        return
    with processes(workers) as pool:
        futures = {pool.submit(make, job): job for job in jobs}
        for future in followed(as_completed(futures), doing, len(jobs)):
            yield futures[future], future.result()


# Which code computes a study's results: a checksum of each module of parity that they depend on.
#
# A result is kept until it is asked for with other settings, also when the code that computed it changes afterwards. So
# the record names that code, and a person who resumes it is told.


PACKAGE = "parity"
# What keeps results and names where they come from has no part in them.
_NO_PART = ("parity.lab.record", "parity.user_error", "parity.cpu")


@functools.cache
def code_of(module: str) -> Mapping[str, str]:
    """Return checksums of a module and of all that it imports, at whatever depth; torch's version, and the machine.

    What only writes a report is left out: reports are drawn from the record each time, so a change of theirs is no
    change of the results. Changes of comments, docstrings or formatting are not, either.

    Args:
        module: name of one of parity's.
    """
    found: dict[str, str] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = None if name in found or name in _NO_PART else _path(name)
        if path is not None:
            found[name], imported = _of_source(path.read_text(encoding="utf-8"))
            pending += imported
    machine = gpu_name() if torch.cuda.is_available() else cpu_model()
    return {"torch": torch.__version__, "machine": machine} | dict(sorted(found.items()))


@functools.cache  # studies have most of their modules in common
def _of_source(text: str) -> tuple[str, list[str]]:
    """Return the checksum of a module, and what it imports."""
    tree = without_report(ast.parse(text))
    imported = list(_imported(tree))
    return checksum(tree), imported


def checksum(tree: ast.Module) -> str:
    """Return a checksum of a module's statements without docstrings, whatever their layout."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return f"{zlib.crc32(ast.unparse(tree).encode()):08x}"


def without_report(tree: ast.Module) -> ast.Module:
    """Return a study's module without ``write`` and without what only that uses; any other module as it is."""
    if not {"measured", "write"} <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
        return tree
    statements = [each for node in tree.body for each in _apart(node)]
    binders: dict[str, list[int]] = {}
    for place, node in enumerate(statements):
        for name in _bound(node):
            binders.setdefault(name, []).append(place)

    def reached_from(pending: list[int]) -> set[int]:
        reached: set[int] = set()
        while pending:
            place = pending.pop()
            if place not in reached:
                reached.add(place)
                used = (node.id for node in ast.walk(statements[place]) if isinstance(node, ast.Name))
                pending += [each for name in used for each in binders.get(name, ())]
        return reached

    of_report = reached_from(list(binders["write"]))
    of_others = reached_from([place for place in range(len(statements)) if place not in of_report])
    kept = [node for place, node in enumerate(statements) if place not in of_report - of_others]
    return ast.Module(kept, tree.type_ignores)


def _apart(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield an import of several names as one import for each, and any other statement as it is."""
    if isinstance(node, ast.ImportFrom):
        yield from (ast.ImportFrom(node.module, [alias], node.level) for alias in node.names)
    else:
        yield node


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    else:
        stores = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        yield from (each.id for each in stores if isinstance(each.ctx, ast.Store))


def changes_of_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of what is not what it was."""
    return [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield names of parity that a module imports at its top level: modules, and what may be one."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == PACKAGE)


def _path(name: str) -> Path | None:
    """Return where a module's source lies; None for what is no module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name inside of a module
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


# Lines are read and added here; a line that an interruption cut short is left out.


Code = Mapping[str, str]


@dataclass(frozen=True)
class _Entry:
    """A result with its run's name, the code that computed it (None if the record does not say) and its line."""

    key: str
    result: Any
    code: Code | None
    line: str


@dataclass(frozen=True)
class Outdated:
    """Results of a record that other code computed than would now.

    Attributes:
        results: how many.
        of: how many results there are.
        unnamed: of how many the record does not name the code.
        changed: names of what has changed since the others.
    """

    results: int
    of: int
    unnamed: int
    changed: tuple[str, ...]


def read(path: Path) -> dict[str, Any]:
    """Return what finished runs gave, by their key; lines that are damaged are left out."""
    return {entry.key: entry.result for entry in _entries(path)}


def damaged(path: Path) -> tuple[LeftOut, ...]:
    """Return which lines are left out, and why: an interruption may have cut the last one short."""
    return _lines(path).left_out if path.exists() else ()


def append(path: Path, run: Mapping[str, Any], result: Any, code: Code | None = None) -> None:
    """Add a finished run; it is in the file when this returns.

    Args:
        path: of the record; its folder is made.
        run: everything that the result depends on.
        result: plain data.
        code: that computed it, of ``code_of``; written where it is not that of the result before.
    """
    lines = [json.dumps({"run": run, "result": result})]
    if code is not None and code != _last_code(_text(path)):
        lines.insert(0, json.dumps({"code": code}))
    add_lines(path, lines)


def add_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file, whose folder is made; they begin a new line if what is there was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_short = path.exists() and path.stat().st_size > 0 and not _ends_a_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_short else "") + "".join(line + "\n" for line in lines))


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""  # as text, \r would end a line


def outdated(path: Path, code: Code) -> Outdated | None:
    """Return which results were computed by other code than this, or None if all are of this or there is no record."""
    latest = {entry.key: entry for entry in _entries(path)}
    others = [entry for entry in latest.values() if entry.code != code]
    if not others:
        return None
    changed = {name: None for entry in others if entry.code for name in changes_of_code(entry.code, code)}
    return Outdated(len(others), len(latest), sum(entry.code is None for entry in others), tuple(changed))


def forget_outdated(path: Path, code: Code) -> None:
    """Leave only the results that this code computed, so that a study computes the others again."""
    kept = [entry.line for entry in _entries(path) if entry.code == code]
    text = "".join(line + "\n" for line in [json.dumps({"code": code}), *kept])
    files.replace(path, text if kept else "")


def _entries(path: Path) -> Iterator[_Entry]:
    if not path.exists():
        return
    code = None
    found = _lines(path)
    for number, content in found.good:
        if "code" in content:
            code = content["code"]
        else:
            yield _Entry(key_of(content["run"]), content["result"], code, found.raw[number - 1].decode())


def _lines(path: Path) -> reading.Lines[dict[str, Any]]:
    return reading.lines(path, _line_of)


def _line_of(content: Any) -> dict[str, Any]:
    """Return a line that names code, or a run with its result."""
    if not isinstance(content, dict):
        raise NotReadableError("it is no object")
    if "code" in content:
        if not isinstance(content["code"], dict):
            raise NotReadableError("code: it is no object")
    elif not isinstance(content["run"], dict) or "result" not in content:
        raise NotReadableError("no run with a result in it")
    return content


def _last_code(text: str) -> Code | None:
    for line in reversed(text.splitlines()):
        if line.startswith('{"code":'):
            with suppress(ValueError, RecursionError):  # an interruption cut it short
                code: Code = json.loads(line)["code"]
                return code
    return None


def key_of(run: Mapping[str, Any]) -> str:
    """Name a run by everything that its result depends on, as sorted JSON."""
    return json.dumps(run, sort_keys=True)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of what a run starts from, which in its name tells it from runs on other data."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), checksum)
    return checksum
