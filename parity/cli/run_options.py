"""The options of ``parity run`` as the plugin's, each checked under the name by which the user gave it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parity.machine.writable import check_file
from parity.plugin import options
from parity.user_error import UserError


def as_plugins(
    precision: Sequence[str] | None,
    backend: str | None,
    seeds: str | None,
    attention: str | None,
    determinism: bool,
    timeout: str | None,
    diagnosis: str | None,
    calibration: Path | None,
    report: Path | None,
    name: str | None,
) -> list[str]:
    """Arguments of pytest; what the user left out is left out.

    Raises:
        UserError: if a value is not valid; names the option of ``parity run``.
    """
    if precision:
        options.parse_precisions(",".join(precision), "--precision")
    if backend is not None:
        options.parse_backend(backend)
    if seeds is not None:
        options.parse_seeds(seeds)
    if attention is not None:
        options.parse_attention(attention)
    if timeout is not None:
        options.parse_timeout(timeout)
    if diagnosis is not None:
        options.parse_diagnosis(diagnosis)
    if name is not None:
        options.parse_name(name, "--name")
    if calibration is not None:
        options.check_calibration(calibration, "--calibration")
    if report is not None:
        for ending in ("jsonl", "md"):
            check_file(report.absolute() / f"{name or 'parity'}.{ending}", "--report")
    given = {
        "precisions": ",".join(precision) if precision else None,
        "backend": backend,
        "seeds": seeds,
        "attention": attention,
        "determinism": "yes" if determinism else None,
        "timeout": timeout,
        "diagnosis": diagnosis,
        "calibration": None if calibration is None else str(calibration),
        "report": None if report is None else str(report),
        "name": name,
    }
    return [f"--parity-{option}={value}" for option, value in given.items() if value is not None]


def workers(text: str) -> list[str]:
    """The argument of pytest-xdist for so many processes, or ``auto``.

    Raises:
        UserError: if it is neither.
    """
    if text != "auto" and not text.isdecimal():
        raise UserError(f"-n is {text!r}, but must be a number of processes or auto")
    return ["-n", text]
