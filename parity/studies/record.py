"""The record of a study: a JSON line for each finished run, so that an interrupted study goes on where it stopped.

A line of its own, before the results that it holds for, names the code that computed them (``provenance``).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from parity.studies import provenance

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
    """What finished runs gave, by their key; a last line that an interruption cut short is left out."""
    return {entry.key: entry.result for entry in _entries(path)}


def append(path: Path, run: Mapping[str, Any], result: Any, code: Code | None = None) -> None:
    """Add a finished run; it is in the file when this returns.

    Args:
        path: of the record; its folder is made.
        run: everything that the result depends on.
        result: plain data.
        code: that computed it, of ``provenance.of``; written where it is not that of the result before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.dumps({"run": run, "result": result})]
    if code is not None and code != _last_code(text):
        lines.insert(0, json.dumps({"code": code}))
    cut_short = text != "" and not text.endswith("\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_short else "") + "".join(line + "\n" for line in lines))


def outdated(path: Path, code: Code) -> Outdated | None:
    """Which results were computed by other code than this, or None if all are of this or there is no record."""
    latest = {entry.key: entry for entry in _entries(path)}
    others = [entry for entry in latest.values() if entry.code != code]
    if not others:
        return None
    changed = {name: None for entry in others if entry.code for name in provenance.changes(entry.code, code)}
    return Outdated(len(others), len(latest), sum(entry.code is None for entry in others), tuple(changed))


def forget_outdated(path: Path, code: Code) -> None:
    """Leave only the results that this code computed, so that a study computes the others again."""
    kept = [entry.line for entry in _entries(path) if entry.code == code]
    text = "".join(line + "\n" for line in [json.dumps({"code": code}), *kept])
    beside = path.with_suffix(".tmp")
    beside.write_text(text if kept else "", encoding="utf-8")
    beside.replace(path)  # an interruption leaves the one or the other, and no half


def _entries(path: Path) -> Iterator[_Entry]:
    code = None
    for line, content in _lines(path):
        if "code" in content:
            code = content["code"]
        else:
            yield _Entry(key(content["run"]), content["result"], code, line)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield line, json.loads(line)
        except ValueError:
            continue


def _last_code(text: str) -> Code | None:
    for line in reversed(text.splitlines()):
        if line.startswith('{"code":'):
            with suppress(ValueError):  # an interruption cut it short
                code: Code = json.loads(line)["code"]
                return code
    return None


def key(run: Mapping[str, Any]) -> str:
    """A run's name: everything that its result depends on, as sorted JSON."""
    return json.dumps(run, sort_keys=True)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A checksum of what a run starts from; as part of its name it keeps runs on other data from being taken for it."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), checksum)
    return checksum
