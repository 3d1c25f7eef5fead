"""What one process of a run works with: its device, its share of that device's memory, and where it keeps its diary."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from parity.plugin.diary import Diary

KEY = "parity"


@dataclass(frozen=True)
class Workplace:
    """A process's place in the run.

    Attributes:
        worker: xdist's name of the worker; empty for a run without workers.
        folder: shared by the run's workers; None without workers, or where it cannot be reached.
        device: the device's identifier, or ``cpu``.
        share: bytes of its memory for each of its workers; None where it is unknown or all of it.
    """

    worker: str = ""
    folder: Path | None = None
    device: str = "cpu"
    share: int | None = None

    @property
    def diary(self) -> Diary | None:
        return Diary(self.folder, self.worker) if self.folder else None

    @property
    def lock(self) -> Path | None:
        """The device's lock file; none on Windows, which has no such lock."""
        if self.folder is None or sys.platform == "win32":
            return None
        return self.folder / f"device-{self.device.replace('/', '-')}"


def of(config: pytest.Config) -> Workplace:
    """This process's, as the controller described it."""
    given = getattr(config, "workerinput", {})
    if KEY not in given:
        return Workplace(worker=given.get("workerid", ""))
    told = given[KEY]
    folder = Path(told["folder"])
    return Workplace(given["workerid"], folder if folder.is_dir() else None, told["device"], told["share"])
