"""What a worker notes on disk while it compares, so that its sudden death loses no result.

A worker's results travel with the report of a finished item; of one that it dies of there is none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What a worker compares now.

    Attributes:
        node_id: of the item.
        running: the record's line for it should it not end: an error with an empty reason or, once there is a verdict,
            that, whose last note tells that the search for the cause was cut short.
        environment: the record's first line.
        limit: how many seconds the comparison may take.
    """

    node_id: str
    running: str
    environment: str
    limit: float

    @property
    def has_verdict(self) -> bool:
        """Return whether only the search for the cause is not at its end."""
        return bool(json.loads(self.running)["result"]["status"] != "error")

    def ended_by(self, cause: str) -> str:
        """The record's line for a comparison that ended so."""
        line = json.loads(self.running)
        result = line["result"]
        if self.has_verdict:
            result["notes"][-1] += f": {cause}"
        else:
            result["reason"] = cause
        return json.dumps(line, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Diary:
    """One worker's files.

    Attributes:
        folder: of all workers of the run.
        worker: its name.
    """

    folder: Path
    worker: str

    @staticmethod
    def all_in(folder: Path) -> list[Diary]:
        """Those of every worker that has begun a comparison."""
        return [Diary(folder, entry.stem) for entry in sorted(folder.glob("*.entry"))]

    @property
    def stacks(self) -> Path:
        """Where the threads' stacks go if the worker runs too long and cannot even say so."""
        return self.folder / f"{self.worker}.stacks"

    def write(self, entry: Entry, finished: str | None) -> None:
        """Begin the next comparison.

        Args:
            entry: the next comparison.
            finished: the record's line of the comparison before it; None if this is the item's first.
        """
        if finished is None:
            self._finished.unlink(missing_ok=True)
        else:
            with self._finished.open("a", encoding="utf-8") as file:
                file.write(finished)
        self.replace(entry)

    def replace(self, entry: Entry) -> None:
        """Note more of the same comparison."""
        draft = self.folder / f"{self.worker}.draft"
        draft.write_text(json.dumps(asdict(entry)), encoding="utf-8")
        draft.replace(self._entry)

    def read(self, node_id: str) -> tuple[Entry, list[str]] | None:
        """The entry and the item's finished lines, if the worker's last entry is about this item."""
        left = self.read_last()
        return left if left is not None and left[0].node_id == node_id else None

    def read_last(self) -> tuple[Entry, list[str]] | None:
        """The last entry and its item's finished lines; None where the worker has begun no comparison."""
        if not self._entry.exists():
            return None
        entry = Entry(**json.loads(self._entry.read_text(encoding="utf-8")))
        lines = self._finished.read_text(encoding="utf-8").splitlines(keepends=True) if self._finished.exists() else []
        return entry, lines

    @property
    def _entry(self) -> Path:
        return self.folder / f"{self.worker}.entry"

    @property
    def _finished(self) -> Path:
        return self.folder / f"{self.worker}.finished"
