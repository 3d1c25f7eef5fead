"""The table as JSON lines, a line a result, for those who want to compute with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parity.kernel_table.distance import Distance
from parity.kernel_table.table import Comparison
from parity.report import environment as environments
from parity.report.environment import Environment
from parity.report.numbers import short

Entry = dict[str, Any]


def write(comparisons: Iterable[Comparison], environment: Environment, emulated_gpu: str, file: Path) -> None:
    """The environment's line, then one for each result, or for each call that made none.

    Args:
        comparisons: the table.
        environment: of the process with the reference's kernels.
        emulated_gpu: the GPU that the CPU kernels emulated.
        file: written anew.
    """
    lines: list[Entry] = [{"environment": environments.to_json(environment), "emulated_gpu": emulated_gpu}]
    lines += [line for comparison in comparisons for line in _lines(comparison)]
    text = "".join(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8")


def read(file: Path) -> list[Entry]:
    """The results' lines; a distance that is infinite or no number is None."""
    return [line for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()) if "kernel" in line]


def verdict(entries: Sequence[Entry]) -> str:
    """How many results are equal to the bit, the farthest of the others, and what could not be compared."""
    compared = [entry for entry in entries if entry["why_none"] is None]
    equal = sum(entry["different"] == 0 for entry in compared)
    parts = [f"{equal} of {len(compared)} results equal to the bit"]
    apart = [entry for entry in compared if entry["relative"]]
    if apart:
        farthest = max(apart, key=lambda entry: entry["relative"])
        name = f"{farthest['kernel']} ({farthest['variant']}, {farthest['result']})"
        parts.append(f"the farthest is {short(farthest['relative'])} away: {name}")
    if len(entries) > len(compared):
        parts.append(f"{len(entries) - len(compared)} could not be compared")
    return "; ".join(parts)


def _lines(comparison: Comparison) -> Iterator[Entry]:
    call = comparison.call
    named = {"family": call.family, "kernel": call.kernel, "variant": call.variant, "shapes": call.shapes}
    nothing = {"elements": None, "different": None, "max_ulps": None, "relative": None}
    if comparison.why_none is not None:
        yield {**named, "result": None, **nothing, "gpu_seconds": None, "why_none": comparison.why_none}
    for name, distance in comparison.distances.items():
        figures = nothing if isinstance(distance, str) else _figures(distance)
        why = distance if isinstance(distance, str) else None
        yield {**named, "result": name, **figures, "gpu_seconds": comparison.seconds, "why_none": why}


def _figures(distance: Distance) -> Entry:
    return {
        "elements": distance.elements,
        "different": distance.different,
        "max_ulps": distance.max_ulps if math.isfinite(distance.max_ulps) else None,
        "relative": distance.relative if math.isfinite(distance.relative) else None,
    }
