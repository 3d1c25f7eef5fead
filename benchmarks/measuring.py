"""Measure times, describe the machine, and write results as JSON files with a page drawn from them.

A benchmark measures a ratio within one process or run, so that results from different machines can be compared. The
seconds are shown beside it. Work in this process is measured in processor time of one thread, which other processes
disturb least. Work that waits for other processes is measured in wall time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from tabulate import tabulate

RESULTS = Path(__file__).with_name("results")
_OF_COMMITS = (
    "Each figure is of the commit and the machine that its section names. `python scripts/stale_reports.py` lists "
    "which code has changed since. That an aim was kept then does not say that it is kept now."
)


@dataclass(frozen=True)
class Measure:
    """One of the figures that a benchmark measures.

    Attributes:
        what: the description of the figure.
        value: the figure.
        limit: the aim, which the value should not exceed, or fall below.
        unit: the unit of value and limit; empty for a ratio.
        at_least: whether the limit is a lower one.
    """

    what: str
    value: float
    limit: float | None = None
    unit: str = ""
    at_least: bool = False

    @property
    def holds(self) -> bool | None:
        """Return whether the limit is kept; None if there is no limit."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line; the docstring's first line is its description."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--out", type=Path, help="a JSON file for the result; README.md beside it is drawn again")
    return made


def environment() -> dict[str, str]:
    """Return the environment for processes that are measured from their start; Python may keep compiled code there."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def processor_seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of one call, after a garbage collection."""
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


def wall_seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call in seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(
    doc: str | None,
    measures: Sequence[Measure],
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    out: Path | None,
    machine: dict[str, Any],
) -> None:
    """Print what was measured, and write it to a JSON file.

    Args:
        doc: the benchmark's docstring, whose first line says what is measured.
        measures: the figures.
        headers, rows: the details as a table.
        out: the JSON file, or None to write no file. The README.md beside it is drawn again.
        machine: the result of ``machine``.
    """
    result = {
        "question": (doc or "").splitlines()[0],
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_without_out(sys.argv[1:])]),
        "measures": [asdict(measure) for measure in measures],
        "headers": list(headers),
        "rows": [[str(cell) for cell in row] for row in rows],
        "machine": machine,
    }
    print(_section(result))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (out.parent / "README.md").write_text(page(out.parent), encoding="utf-8")


def machine(threads: int | None = None, kernels: str = "") -> dict[str, Any]:
    """Return the machine and the versions with which something was measured.

    Args:
        threads: PyTorch's number of threads, if it computes in this process.
        kernels: ``gpu`` or ``cpu``, if TE computes.
    """
    from parity.report.environment import at_commit, cpu_model, version

    return {
        "processor": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "kernels": {"gpu": "real", "cpu": "emulated"}.get(kernels, ""),
        "transformer_engine": version("transformer-engine"),
        "torch": metadata.version("torch"),
        "python": sys.version.split()[0],
        "commit": at_commit().removeprefix(" at commit "),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load": round(os.getloadavg()[0], 1),
    }


def page(folder: Path) -> str:
    """Return the text of ``README.md`` for the results in a folder."""
    results = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    rows = [
        [f"[{name}](#{name.replace('_', '-')})", measure.what, _shown(measure), _limit(measure), _verdict(measure)]
        for name, result in results.items()
        for measure in _measures(result)
    ]
    overview = tabulate(
        rows, ["benchmark", "what", "measured", "aim", "kept"], tablefmt="github", disable_numparse=True
    )
    sections = [f"## {name.replace('_', '-')}\n\n{_section(result)}" for name, result in results.items()]
    return "\n\n".join(["# Results of the benchmarks", _OF_COMMITS, overview, *sections]) + "\n"


def median(values: Sequence[float]) -> float:
    """Return the median; there must be at least one value."""
    return statistics.median(values)


def _section(result: dict[str, Any]) -> str:
    machine = result["machine"]
    where = [
        machine["processor"],
        f"{machine['cores']} cores",
        f"{machine['threads']} threads" if machine["threads"] else "",
        f"{machine['kernels']} kernels" if machine["kernels"] else "",
        f"TransformerEngine {machine['transformer_engine']}",
        f"torch {machine['torch']}",
        f"Python {machine['python']}",
        machine["date"],
        f"commit {machine['commit']}" if machine.get("commit") else "",
        f"load {machine['load']} at the end",
    ]
    figures = [f"- {m.what}: **{_shown(m)}** (aim: {_limit(m) or 'none'})" for m in _measures(result)]
    table = tabulate(result["rows"], result["headers"], tablefmt="github", disable_numparse=True)
    lines = [result["question"], f"`{result['command']}`", "\n".join(figures), table, ", ".join(filter(None, where))]
    return "\n\n".join(lines)


def _measures(result: dict[str, Any]) -> list[Measure]:
    return [Measure(**measure) for measure in result["measures"]]


def _shown(measure: Measure) -> str:
    return f"{measure.value:.3g} {measure.unit}".strip()


def _limit(measure: Measure) -> str:
    if measure.limit is None:
        return ""
    return f"{'≥' if measure.at_least else '≤'} {measure.limit:g} {measure.unit}".strip()


def _verdict(measure: Measure) -> str:
    return {True: "yes", False: "**no**", None: ""}[measure.holds]


def _without_out(arguments: Sequence[str]) -> list[str]:
    kept = [argument for argument in arguments if not argument.startswith("--out=")]
    if "--out" in kept:
        place = kept.index("--out")
        del kept[place : place + 2]
    return kept
