"""Run many jobs, here or in processes, and keep each result as soon as it exists, so that a stopped run can resume.

The record has a JSON line for each result. A line before them names the code that computed the results that follow it.
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

from parity import data_files, shown
from parity.data_files import LeftOut, NotReadableError, read_toml
from parity.machine import files
from parity.machine.process import processes
from parity.progress import followed
from parity.report.environment import cpu_model, gpu_name, made_by

# A number that a record keeps with four digits, and NaN as null.
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
        path: the record, JSON lines.
        result: the type of a result; pydantic writes it as plain data and reads it back.
        identity: returns everything that a job's result depends on, as JSON types; by default the job's own fields.
        code: the code that computes the results, from ``code_of``; None if a record belongs to one version of parity.
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
        """Return the results of those jobs that are in the record and that this version can read."""
        found = read(self._path)
        keys = {job: key_of(self._identity(job)) for job in jobs}
        results: dict[Job, Result] = {}
        for job, key in keys.items():
            if key in found:
                with suppress(ValidationError):  # the job is run again
                    results[job] = self._types.validate_python(found[key])
        return results

    def keep(self, job: Job, result: Result) -> None:
        """Add a job's result to the record, where it is when this returns."""
        append(self._path, self._identity(job), self._types.dump_python(result), self._code)

    def complete(
        self, jobs: Iterable[Job], make: Callable[[Job], Result], doing: str, workers: int | None = None
    ) -> dict[Job, Result]:
        """Run the jobs that the record lacks, in their order, and return the results of all.

        Args:
            jobs: the jobs; one that comes twice is run once.
            make: returns a job's result; if it runs in processes, a function of a module, or a partial of one.
            doing: what the progress bar says.
            workers: see ``made``.

        Raises:
            UserError: if another process is running jobs of this record.
        """
        every = list(dict.fromkeys(jobs))
        for sentence in data_files.warnings_for(self._path, damaged(self._path)):
            print(f"{shown.line(sentence)}: this line is left out, and its result is computed again", file=sys.stderr)
        with files.claimed(self._path):
            finished = self.finished(every)
            for job, result in made([job for job in every if job not in finished], make, doing, workers):
                self.keep(job, result)
            return self.finished(every)


def made(
    jobs: Sequence[Job], make: Callable[[Job], Made], doing: str, workers: int | None = None
) -> Iterator[tuple[Job, Made]]:
    """Yield each job with its result as soon as that exists, and show a progress bar.

    Args:
        jobs: the jobs, in the order in which they are started.
        make: returns a job's result.
        doing: what the progress bar says.
        workers: how many processes to use, of one thread each; None for this process, as it is.
    """
    if workers is None:
        for job in followed(jobs, doing):
            yield job, make(job)
        return
    with processes(workers) as pool:
        futures = {pool.submit(make, job): job for job in jobs}
        for future in followed(as_completed(futures), doing, len(jobs)):
            yield futures[future], future.result()


# The code that computes a study's results: a checksum of each module of parity that they depend on.
#
# A result is kept even if the code that computed it changes afterwards. So the record names that code, and whoever
# resumes the study is told of the change.


PACKAGES = ("parity", "te_on_cpu", "lab")
# These modules keep results and name their sources, so the results do not depend on them.
_NO_PART = ("parity.measuring.record", "parity.user_error", "te_on_cpu")


@functools.cache
def code_of(module: str) -> Mapping[str, str]:
    """Return checksums of a module and of all that it imports, directly or not, with torch's version and the machine.

    A table beside a module, a TOML file of its name, counts as well. Code that only writes a report is left out, since
    reports are drawn from the record each time. Comments, docstrings and formatting do not count, either.

    Args:
        module: the name of a module of parity.
    """
    found: dict[str, str] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = None if name in found or name in _NO_PART else _find_source(name)
        if path is not None:
            found[name], imported = _of_source(path.read_text(encoding="utf-8"))
            pending += imported
            if (table := path.with_suffix(".toml")).is_file():
                found[f"{name}'s table"] = f"{zlib.crc32(repr(read_toml(table, dict)).encode()):08x}"
    machine = gpu_name() if torch.cuda.is_available() else cpu_model()
    return {"torch": torch.__version__, "machine": machine} | dict(sorted(found.items()))


@functools.cache  # studies have most of their modules in common
def _of_source(text: str) -> tuple[str, list[str]]:
    """Return the checksum of a module, and the names that it imports."""
    tree = without_report(ast.parse(text))
    imported = list(_find_imported_names(tree))
    return checksum(tree), imported


def checksum(tree: ast.Module) -> str:
    """Return a checksum of a module's statements without docstrings, whatever their layout."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return f"{zlib.crc32(ast.unparse(tree).encode()):08x}"


def without_report(tree: ast.Module) -> ast.Module:
    """Return a study's module without ``write`` and all that only ``write`` uses, and any other module as it is."""
    if not {"measured", "write"} <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
        return tree
    statements = [each for node in tree.body for each in _split_import(node)]
    binders: dict[str, list[int]] = {}
    for place, node in enumerate(statements):
        for name in _find_bound_names(node):
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


def _split_import(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield an import of several names as one import for each, and any other statement as it is."""
    if isinstance(node, ast.ImportFrom):
        yield from (ast.ImportFrom(node.module, [alias], node.level) for alias in node.names)
    else:
        yield node


def _find_bound_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    else:
        stores = (each for each in ast.walk(node) if isinstance(each, ast.Name))
        yield from (each.id for each in stores if isinstance(each.ctx, ast.Store))


def changes_of_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names whose checksums differ."""
    return [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]


def _find_imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of parity that a module imports at its top level: modules, and names that may be modules."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in PACKAGES)


def _find_source(name: str) -> Path | None:
    """Return the path of a module's source, or None if the name is not a module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name inside of a module
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def write_sections(path: Path, sections: Iterable[str], command: str) -> Path:
    """Write the sections of a report, then the command and the commit that made it, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join([*sections, made_by(command)]) + "\n", encoding="utf-8")
    return path


# Reading and adding lines. A line that an interruption cut short is left out.


Code = Mapping[str, str]


@dataclass(frozen=True)
class _Entry:
    """A result with the key of its run, the code that computed it (None if the record does not say) and its line."""

    key: str
    result: Any
    code: Code | None
    line: str


@dataclass(frozen=True)
class Outdated:
    """Describe the results of a record that were computed by code other than the present one.

    Attributes:
        results: how many there are.
        of: how many results the record has in all.
        unnamed: for how many of them the record does not name the code.
        changed: the names of what has changed since the others were computed.
    """

    results: int
    of: int
    unnamed: int
    changed: tuple[str, ...]


def read(path: Path) -> dict[str, Any]:
    """Return the results of finished runs by their keys, without damaged lines."""
    return {entry.key: entry.result for entry in _read_entries(path)}


def damaged(path: Path) -> tuple[LeftOut, ...]:
    """Return which lines are damaged, and why. The last one may have been cut short by an interruption."""
    return _read_lines(path).left_out if path.exists() else ()


def append(path: Path, run: Mapping[str, Any], result: Any, code: Code | None = None) -> None:
    """Add a finished run to the file, where it is when this returns.

    Args:
        path: the record; its folder is made if need be.
        run: everything that the result depends on.
        result: plain data.
        code: the code that computed it, from ``code_of``; written if the result before it was computed by other code.
    """
    lines = [json.dumps({"run": run, "result": result})]
    if code is not None and code != _last_code(_read_text(path)):
        lines.insert(0, json.dumps({"code": code}))
    add_lines(path, lines)


def add_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file, making its folder if need be. They begin on a new line if the last one was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_short = path.exists() and path.stat().st_size > 0 and not _ends_a_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_short else "") + "".join(line + "\n" for line in lines))


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""  # read_text would turn \r into \n


def outdated(path: Path, code: Code) -> Outdated | None:
    """Return how many results other code than this computed, or None if there are none or there is no record."""
    latest = {entry.key: entry for entry in _read_entries(path)}
    others = [entry for entry in latest.values() if entry.code != code]
    if not others:
        return None
    changed = {name: None for entry in others if entry.code for name in changes_of_code(entry.code, code)}
    return Outdated(len(others), len(latest), sum(entry.code is None for entry in others), tuple(changed))


def forget_outdated(path: Path, code: Code) -> None:
    """Keep only the results that this code computed, so that a study computes the others again."""
    kept = [entry.line for entry in _read_entries(path) if entry.code == code]
    text = "".join(line + "\n" for line in [json.dumps({"code": code}), *kept])
    files.replace(path, text if kept else "")


def _read_entries(path: Path) -> Iterator[_Entry]:
    if not path.exists():
        return
    code = None
    found = _read_lines(path)
    for number, content in found.good:
        if "code" in content:
            code = content["code"]
        else:
            yield _Entry(key_of(content["run"]), content["result"], code, found.raw[number - 1].decode())


def _read_lines(path: Path) -> data_files.Lines[dict[str, Any]]:
    return data_files.lines(path, _line_of)


def _line_of(content: Any) -> dict[str, Any]:
    """Return a line's content if it names code, or a run with its result.

    Raises:
        NotReadableError: if it does neither.
    """
    if not isinstance(content, dict):
        raise NotReadableError("it is not an object")
    if "code" in content:
        if not isinstance(content["code"], dict):
            raise NotReadableError("code: it is not an object")
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
    """Return a run's key: everything that its result depends on, as sorted JSON."""
    return json.dumps(run, sort_keys=True)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of a run's initial tensors, so that its key differs from those of runs on other data."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), checksum)
    return checksum
