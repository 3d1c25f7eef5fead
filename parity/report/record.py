"""The record of a run: JSON lines, first the environment, then each result as soon as it exists.

What could not be collected is noted between the results, so that a report on the rest does not pass for one on all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from parity.report import environment as environments
from parity.report.environment import Environment
from parity.result import Result, from_json, to_json
from parity.user_error import UserError

Content = TypeVar("Content")


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
        damaged: numbers of the last lines, if they could not be read because of a crash or a full disk.
    """

    environment: Environment
    results: tuple[Result, ...]
    uncollected: tuple[Uncollected, ...] = ()
    damaged: tuple[int, ...] = ()


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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line, encoding="utf-8")


def append(path: Path, line: str) -> None:
    """Add a line; it is in the file when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def read(path: Path) -> Record:
    """Read a record back; leave out last lines that a crash cut short, and report their numbers.

    Raises:
        UserError: if there is no such file, or it is not a record.
    """
    try:
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if lines == [b""]:
        raise UserError(f"{path} is not a record of parity: it is empty; a run writes one to reports/<name>.jsonl")
    parsed = [(number, _parse(line)) for number, line in enumerate(lines, 1)]
    whole = max((number for number, line in parsed if line is not None), default=0)
    broken = next((number for number, line in parsed[:whole] if line is None), 0 if whole else 1)
    if broken:
        raise UserError(f"{path} is not a record of parity: line {broken} is not JSON")
    environment = _content(path, parsed[0], "environment", environments.from_json)
    of_pairs = [entry for entry in parsed[1:whole] if _is_uncollected(entry[1])]
    of_results = [entry for entry in parsed[1:whole] if not _is_uncollected(entry[1])]
    return Record(
        environment,
        results=tuple(_content(path, entry, "result", from_json) for entry in of_results),
        uncollected=tuple(_content(path, entry, "uncollected", _uncollected_from_json) for entry in of_pairs),
        damaged=tuple(range(whole + 1, len(parsed) + 1)),
    )


def _is_uncollected(line: Any) -> bool:
    return isinstance(line, dict) and "uncollected" in line


def _uncollected_from_json(content: Any) -> Uncollected:
    return TypeAdapter(Uncollected).validate_python(content)


def _content(path: Path, entry: tuple[int, Any], kind: str, read_back: Callable[[Any], Content]) -> Content:
    """Return what a numbered line of this kind holds."""
    number, line = entry
    try:
        return read_back(line[kind])
    except ValidationError as error:
        wrong = error.errors()[0]
        what = f"{'.'.join(map(str, (kind, *wrong['loc'])))}: {wrong['msg']}"
    except (LookupError, TypeError, AttributeError):
        what = f"no {kind} in it"
    raise UserError(
        f"{path} is not a record of this version of parity (line {number}, {what}); "
        "a run writes one to reports/<name>.jsonl"
    )


def _line(kind: str, content: Mapping[str, Any]) -> str:
    return json.dumps({kind: content}, allow_nan=False, ensure_ascii=False, default=str) + "\n"


def _parse(line: bytes) -> Any:
    """Return what the line holds; None if it is not JSON, or null, which no line of a record is."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
