"""The record of a run: JSON lines, first the environment, then each result as soon as it exists.

What could not be collected is noted between the results, so that a report on the rest does not pass for one on all.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from parity import reading
from parity.machine import files
from parity.reading import LeftOut, NotReadableError
from parity.report import environment as environments
from parity.report.environment import Environment
from parity.result import Result, from_json, to_json
from parity.user_error import UserError


@dataclass(frozen=True)
class Uncollected:
    """A pair with a mistake, or a file of pairs, of which nothing was compared.

    Attributes:
        node_id: pytest's.
        message: what is wrong, without a traceback.
    """

    node_id: str
    message: str


@dataclass(frozen=True)
class Record:
    """A run, read back.

    Attributes:
        environment: where and with what it was made.
        results: in the order in which they arrived.
        uncollected: what could not be compared at all, in the order in which it arrived.
        left_out: lines that could not be read, for example the last one because of a crash or a full disk.
    """

    environment: Environment
    results: tuple[Result, ...]
    uncollected: tuple[Uncollected, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def environment_line(environment: Environment) -> str:
    """Return the first line of a record."""
    return _line("environment", environments.to_json(environment))


def result_line(result: Result) -> str:
    """Return a result's line; sizes that are not JSON, such as a dtype, become text."""
    return _line("result", to_json(result))


def uncollected_line(uncollected: Uncollected) -> str:
    """Return the line for what could not be collected."""
    return _line("uncollected", asdict(uncollected))


def environment_of(line: str) -> Environment:
    """Return the inverse of ``environment_line``."""
    return environments.from_json(json.loads(line)["environment"])


def result_of(line: str) -> Result:
    """Return the inverse of ``result_line``."""
    return from_json(json.loads(line)["result"])


def start(path: Path, line: str) -> None:
    """Begin a record with its first line, in place of one from an earlier run; make the folder if need be."""
    files.replace(path, line)


def append(path: Path, line: str) -> None:
    """Add a line; it is in the file when this returns."""
    with path.open("ab") as file:
        file.write(data(line))


def data(line: str) -> bytes:
    """Return a line's bytes; half a surrogate pair, which UTF-8 has not, is written as JSON's escape for it."""
    return line.encode("utf-8", "backslashreplace")


def read(path: Path) -> Record:
    """Read a record back; leave out lines that are damaged, and report their numbers and why.

    Raises:
        UserError: if there is no such file, or it is not a record.
    """
    return of_lines(lines(path))


def lines(path: Path) -> reading.Lines[Environment | Result | Uncollected]:
    """Return what each line of a record holds; those that are damaged are left out.

    Raises:
        UserError: if there is no such file.
    """
    return reading.lines(path, _line_of)


def of_lines(found: reading.Lines[Environment | Result | Uncollected]) -> Record:
    """Return the record that these lines are, see ``read``."""
    path = found.path
    written = "a run writes one to reports/<name>.jsonl"
    if not found.raw:
        raise UserError(f"{path} is not a record of parity: it is empty; {written}")
    contents = found.contents
    environment = contents[0] if contents and found.good[0][0] == 1 else None
    if not isinstance(environment, Environment):
        reason = found.left_out[0].reason if found.left_out and found.left_out[0].number == 1 else "no environment"
        raise UserError(f"{path} is not a record of this version of parity (line 1: {reason}); {written}")
    return Record(
        environment,
        results=tuple(each for each in contents if isinstance(each, Result)),
        uncollected=tuple(each for each in contents if isinstance(each, Uncollected)),
        left_out=found.left_out,
    )


def _line_of(content: Any) -> Environment | Result | Uncollected:
    """Return what a line holds."""
    for kind, read_back in _KINDS.items():
        if isinstance(content, dict) and kind in content:
            try:
                return read_back(content[kind])
            except Exception as error:
                raise NotReadableError(f"{kind}.{reading.why(error)}") from None
    raise NotReadableError(f"no {', '.join(_KINDS)} in it")


def _uncollected_from_json(content: Any) -> Uncollected:
    return _uncollected_type().validate_python(content)


@functools.cache
def _uncollected_type() -> TypeAdapter[Uncollected]:
    return TypeAdapter(Uncollected)


_KINDS: Mapping[str, Callable[[Any], Environment | Result | Uncollected]] = {
    "environment": environments.from_json,
    "result": from_json,
    "uncollected": _uncollected_from_json,
}


def _line(kind: str, content: Mapping[str, Any]) -> str:
    return json.dumps({kind: content}, allow_nan=False, ensure_ascii=False, default=str) + "\n"
