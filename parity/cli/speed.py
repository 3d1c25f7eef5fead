"""Measures throughput from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parity import te
from parity.cli import suite
from parity.lab.throughput import command, workload
from parity.plugin.options import parse_backend, parse_precisions
from parity.precision import PRECISIONS
from parity.user_error import UserError

SIZES = ("auto", "large", "declared")


def run(
    paths: Sequence[str] | None,
    precisions: str,
    backend: str,
    sizes: str,
    keyword: str,
    repeats: int | None,
    compiled: str,
    minutes: float | None,
    folder: Path,
) -> Path:
    """Measure the built-in workloads, or those of files; returns the report's path.

    Args:
        paths: files of pairs, measured at the sizes that they declare; none for the built-in workloads.
        precisions: names separated by commas; empty for all.
        backend: ``auto``, ``gpu`` or ``cpu``.
        sizes: a name in ``SIZES``; ``auto`` is ``large`` on a GPU and ``declared`` on a CPU.
        keyword: words separated by commas, of which a workload's name has to contain one.
        compiled: ``all``, ``none``, or names of precisions in which the plain module is also compiled.
        repeats, minutes: see ``command.Settings``.
        folder: of the report.

    Raises:
        UserError: for an unknown precision, backend or choice of sizes, a file that is none of pairs, and a keyword
            that no workload has.
    """
    if sizes not in SIZES:
        raise UserError(f"--sizes is {sizes!r}, but must be one of {', '.join(SIZES)}")
    asked = parse_backend(backend)
    chosen = parse_precisions(precisions, "--precisions") or tuple(PRECISIONS)
    on_gpu = asked != "cpu" and te.why_no_gpu() is None
    if paths:
        workloads = workload.declared(suite.cases(paths))
    else:
        workloads = workload.built_in(large=on_gpu if sizes == "auto" else sizes == "large")
    named = () if compiled in ("all", "none") else parse_precisions(compiled, "--compiled") or ()
    to_compile = chosen if compiled == "all" else named
    settings = command.Settings(workload.select(workloads, keyword), chosen, asked, repeats, to_compile, minutes)
    return command.run(settings, folder)
