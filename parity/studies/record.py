"""The record of a study: a JSON line for each finished run, so that an interrupted study goes on where it stopped."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def read(path: Path) -> dict[str, Any]:
    """What finished runs gave, by their key; a last line that an interruption cut short is left out."""
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[key(entry["run"])] = entry["result"]
    return found


def append(path: Path, run: Mapping[str, Any], result: Any) -> None:
    """Add a finished run; it is in the file when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_short = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        line = json.dumps({"run": run, "result": result})
        file.write(("\n" if cut_short else "") + line + "\n")


def key(run: Mapping[str, Any]) -> str:
    """A run's name: everything that its result depends on, as sorted JSON."""
    return json.dumps(run, sort_keys=True)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A checksum of what a run starts from; as part of its name it keeps runs on other data from being taken for it."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), checksum)
    return checksum
