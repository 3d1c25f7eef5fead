"""What each step came to, in one sentence, read from the files that it left."""

from __future__ import annotations

from pathlib import Path

from parity.gpu_report import limits
from parity.kernel_table import record as kernel_record
from parity.precision import PRECISIONS
from parity.report import markdown, record
from parity.report.digest import digest
from parity.report.numbers import short
from parity.throughput import record as throughput_record


def doctor(folder: Path) -> str:
    """Which precisions run on real kernels, from the table that ``parity doctor`` prints."""
    lines = (folder / "logs" / "doctor.txt").read_text(encoding="utf-8").splitlines()
    answers = [words for words in map(str.split, lines) if len(words) > 1 and words[0] in PRECISIONS]
    if not answers:
        return "see its log"
    real = [name for name, answer, *_ in answers if answer.startswith("yes")]
    return f"on real kernels: {', '.join(real) or 'nothing'}"


def suite(folder: Path) -> str:
    """The report's own verdict; draws the report if the run was ended before it could."""
    file = folder / "suite.jsonl"
    run = digest(record.read(file))
    report = file.with_suffix(".md")
    if not report.exists():
        report.write_text(markdown.draw(run, file.stem), encoding="utf-8")
    return markdown.verdict(run)


def on_limits(folder: Path) -> str:
    """How many statistics lie beyond the packaged limits."""
    return limits.verdict(limits.read(folder / "suite.jsonl"))


def kernels(folder: Path) -> str:
    """How much of the table is equal to the bit, and where it is not."""
    return kernel_record.verdict(kernel_record.read(folder / "kernel-table.jsonl"))


def throughput(folder: Path) -> str:
    """How many rows were measured, and the fastest."""
    found = throughput_record.read(folder / "throughput.jsonl")
    measured = [row for row in found.rows if row.times is not None]
    shares = [(share, row) for row in measured if (share := found.peak_share(row)) is not None]
    best = max(shares, key=lambda pair: pair[0], default=None)
    told = ""
    if best is not None:
        told = f"; the best share of a peak is {100 * best[0]:.0f} %, {best[1].name} `{best[1].workload}`"
    slow = sum(row.after is not None and bool(row.after.throttles) for row in measured)
    throttled = f"; {slow} were throttled" if slow else ""
    return f"{len(measured)} of {len(found.rows)} rows measured{told}{throttled}"


def calibration(folder: Path) -> str:
    """How the limits that this machine's kernels would set compare with the packaged ones."""
    widest, key = limits.widest(folder / "calibration.json")
    return f"limits measured here are at most {short(widest)} times the packaged ones ({', '.join(key)})"
