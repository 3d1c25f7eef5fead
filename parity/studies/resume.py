"""The runs of a study that its record lacks, made one after the other, so that an interrupted study goes on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from parity.studies import record

Run = TypeVar("Run", bound=Hashable)
Identity = Callable[[Run], Mapping[str, Any]]


def make_missing(
    path: Path, runs: Iterable[Run], identity: Identity[Run], make: Callable[[Run], Any], doing: str, code: record.Code
) -> None:
    """Make the runs that the record lacks, and append each when it is finished.

    Args:
        path: of the record.
        runs: of the study, in the order in which they are made.
        identity: all that a run's result depends on, see ``record.key``.
        make: the result of a run, as JSON types.
        doing: what the progress bar says.
        code: that makes them, of ``provenance.of``.
    """
    finished = record.read(path)
    pending = [run for run in runs if record.key(identity(run)) not in finished]
    for run in track(pending, doing, console=Console(stderr=True), disable=not pending):
        record.append(path, identity(run), make(run), code)


def recorded(path: Path, runs: Iterable[Run], identity: Identity[Run]) -> dict[Run, Any]:
    """The results of those runs that the record has, as JSON types."""
    finished = record.read(path)
    return {run: finished[key] for run in runs if (key := record.key(identity(run))) in finished}


def completed(
    path: Path, runs: Iterable[Run], identity: Identity[Run], make: Callable[[Run], Any], doing: str, code: record.Code
) -> dict[Run, Any]:
    """The results of all these runs, made where the record lacks them; arguments as for ``make_missing``."""
    every = list(runs)
    make_missing(path, every, identity, make, doing, code)
    return recorded(path, every, identity)
