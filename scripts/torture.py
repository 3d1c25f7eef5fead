"""Torture runs, records and readers, and write the figures to reports/torture.md (``make torture``).

The sizes are options. ``make torture FULL=1`` uses 200 kills, 100,000 damaged files and 10,000 results, and takes an
hour or more on two cores. Everything is drawn from seeds, so that a failure can be reproduced.
"""

# ruff: noqa: E402 - the tests' helpers can only be imported once their folders are on the path
from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "torture")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PARITY_DIAGNOSIS_SECONDS"] = "0"  # so that findings do not depend on the clock

import kills
import mishaps

from lab import torture
from parity.machine import files
from parity.report.environment import made_by
from parity.report.numbers import markdown_table

_HEAD = """\
# Torture

What runs, records and readers made of kills, damaged files, misbehaving cases and many results; [what this
guarantees](../docs/reliability.md). On a CPU, with emulated kernels."""


def _of_kills(count: int, real: int, seed: int, folder: Path) -> Iterator[str]:
    """Yield the section on killed runs.

    Args:
        count: the number of runs that use stand-ins for the comparison.
        real: the number of further runs, which compare with TE.
        seed: the first run's seed.
        folder: where the runs write their files.
    """
    yield "## Killed runs"
    tally = kills.Tally()
    for number, name in ((count, "stand-ins"), (real, "real")):
        runs = kills.Runs(folder / name, real=name == "real")
        for each in range(seed, seed + number):
            runs.trial(each, tally)
            print(f"killed run {each} ({name}): {len(tally.wrong)} wrong so far", file=sys.stderr, flush=True)
    yield (
        f"{count} runs on stand-ins for the comparison and {real} that compare with TE were sent a signal, one in "
        "three twice, then gone on with, and held against a run that nobody killed: its results but for their times, "
        "its report but for its date, its exit code."
    )
    yield markdown_table(sorted(tally.kills.items()), ["signal", "times"])
    yield markdown_table(sorted(tally.moments.items()), ["when: results were written", "times"])
    yield (
        f"Of {tally.results:,} results that were written when a run was killed, {tally.kept:,} were of items that had "
        "ended, and kept; the others were made again."
    )
    yield _wrong(tally.wrong)


def _of_readers(inputs: int, seed: int) -> Iterator[str]:
    """Yield the section on damaged files."""
    yield "## Damaged files"
    outcomes = torture.run(inputs, seed)
    rows, wrong = [], []
    for each in outcomes:
        otherwise = sum(count for count, _ in each.wrong.values())
        rows.append((each.reader.where, each.reader.what, each.inputs, each.read, each.refused, otherwise))
        wrong += [f"{each.reader.where}: {what} ({count}, first {at})" for what, (count, at) in each.wrong.items()]
    yield markdown_table(rows, ["reader", "of", "files", "read, good lines kept", "refused in a sentence", "otherwise"])
    yield f"{sum(each.inputs for each in outcomes):,} files in all, seed {seed}."
    yield _wrong(wrong)


def _of_mishaps(folder: Path) -> Iterator[str]:
    """Yield the section on misbehaving cases."""
    yield "## Misbehaving cases"
    yield "Each stands between two sound pairs; without workers, a run may end with it."
    rows, wrong = [], []
    for number, mishap in enumerate(mishaps.MISHAPS):
        for workers in (0, 1):
            try:
                found = mishaps.run(mishap, workers, folder / f"{number}-{workers}")
            except OSError as error:
                if not mishap.disk:
                    raise
                rows.append((mishap.what, workers, "", f"not tried: no small disk can be mounted here: {error}", ""))
                continue
            print(f"{mishap.what}, -n {workers}: {found.wrong or 'as it should be'}", file=sys.stderr, flush=True)
            status, reason = found.results.get("odd", ("no result", ""))
            others = sum(found.results.get(name, ("",))[0] == "passed" for name in ("sound1", "sound2"))
            told = f"{status}: {reason[:90]}" if reason else status
            rows.append((mishap.what, workers, "hung" if found.code is None else found.code, told, f"{others} of 2"))
            wrong += [f"{mishap.what}, -n {workers}: {what}" for what in found.wrong]
    yield markdown_table(rows, ["the pair", "workers", "exit code", "its result", "others passed"])
    yield _wrong(wrong)


def _of_soak(results: int, folder: Path) -> Iterator[str]:
    """Yield the section on many results."""
    yield "## Many results"
    found = mishaps.soak(results, folder)
    yield (
        f"{results:,} items were compared in one process, on stand-ins for the comparison, and their record read back: "
        f"{found.megabytes:.0f} MiB. In the run's last third, what pytest itself makes for any test grew by "
        f"{found.by_pytest / 1000:.2f} kB a result, and all other objects of Python's by "
        f"{(found.kept - found.by_pytest) / 1000:.2f} kB."
    )


def _wrong(sentences: Sequence[str]) -> str:
    return "\n".join(f"- **{each}**" for each in sentences) if sentences else "Nothing went wrong."


def main() -> int:
    """Run the parts, write the report, and return 1 if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--real-kills", type=int, default=2)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--results", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="kills,readers,mishaps,soak")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "torture.md")
    asked = parser.parse_args()
    only = asked.only.split(",")
    with tempfile.TemporaryDirectory(prefix="parity-torture-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        parts = {
            "kills": lambda: _of_kills(asked.kills, asked.real_kills, asked.seed, folder / "kills"),
            "readers": lambda: _of_readers(asked.inputs, asked.seed),
            "mishaps": lambda: _of_mishaps(folder / "mishaps"),
            "soak": lambda: _of_soak(asked.results, folder / "soak"),
        }
        sections = [text for part in only for text in parts[part]()]
    files.replace(asked.out, "\n\n".join([_HEAD, *sections, made_by("make torture")]) + "\n")
    print(f"report: {asked.out}")
    return int(any(text.startswith("- **") for text in sections))


if __name__ == "__main__":
    sys.exit(main())
