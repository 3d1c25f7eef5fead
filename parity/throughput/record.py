"""The record of a measurement, JSON lines: the environment, the device's peaks, then each row as soon as it exists."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from parity.report import environment as environments
from parity.report.environment import Environment
from parity.throughput.row import Peak, Row

EMULATED = "TE's kernels are emulated on a CPU: these times say nothing about a GPU"


@dataclass(frozen=True)
class Record:
    """What has been measured so far.

    Attributes:
        environment: of the process that measured; None if it has not come that far.
        peaks: of the device.
        rows: in the order in which they were measured.
    """

    environment: Environment | None
    peaks: tuple[Peak, ...]
    rows: tuple[Row, ...]

    @property
    def is_emulated(self) -> bool:
        """Whether TE ran on CPU kernels."""
        return self.environment is not None and self.environment.backend == "cpu"

    def peak_share(self, row: Row) -> float | None:
        """FLOPs a second of both passes over the peak of the row's format; None where either is missing.

        Emulated kernels have none: they compute in other formats than those that they emulate.
        """
        peaks = [peak.flops for peak in self.peaks if peak.format == row.peak_format and not peak.why_none]
        if row.times is None or not row.flops or not peaks or (self.is_emulated and row.implementation == "TE"):
            return None
        return row.flops / row.times.both / peaks[0]


def append(file: Path, content: Environment | Peak | Row) -> None:
    """Add a line; it is in the file when this returns. The environment's line says whether kernels were emulated."""
    if isinstance(content, Environment):
        emulated = content.backend == "cpu"
        line = {
            "environment": environments.to_json(content),
            "emulated": emulated,
            "note": EMULATED if emulated else "",
        }
    elif isinstance(content, Peak):
        line = {"peak": _without_nan(dataclasses.asdict(content))}
    else:
        line = {"row": _without_nan(dataclasses.asdict(content))}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")


def read(file: Path) -> Record:
    """What the lines say; one that was cut short is left out."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    entries = [entry for entry in map(_parse, text.splitlines()) if entry]
    found = [entry["environment"] for entry in entries if "environment" in entry]
    return Record(
        environments.from_json(found[-1]) if found else None,
        TypeAdapter(tuple[Peak, ...]).validate_python([entry["peak"] for entry in entries if "peak" in entry]),
        TypeAdapter(tuple[Row, ...]).validate_python([entry["row"] for entry in entries if "row" in entry]),
    )


def _parse(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:
        return {}


def _without_nan(entry: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinities; as text they are read back, as any number is."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry.items()
    }
