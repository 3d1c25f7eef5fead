"""Make many jobs, here or in processes, and keep each result as soon as it is there, so that what stopped goes on."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from parity import reading, shown
from parity.lab import record
from parity.machine import files
from parity.machine.process import processes
from parity.progress import followed

# A number that a record keeps with four digits, and as null where there is none.
FourDigits = Annotated[
    float,
    PlainSerializer(lambda value: None if math.isnan(value) else float(f"{value:.4g}")),
    BeforeValidator(lambda value: math.nan if value is None else value),
]
Job = TypeVar("Job", bound=Hashable)
Result = TypeVar("Result")
Made = TypeVar("Made")


class Campaign(Generic[Job, Result]):
    """Jobs whose results a record keeps.

    Args:
        path: of the record, JSON lines.
        result: the type of a result; pydantic writes it as plain data and reads it back.
        identity: everything that a job's result depends on, as JSON types; by default the job's own fields.
        code: what computes the results, of ``record.code_of``; None where a record is of one version of parity.
    """

    def __init__(
        self,
        path: Path,
        result: Any,
        identity: Callable[[Job], Mapping[str, Any]] = dataclasses.asdict,  # type: ignore[assignment]
        code: record.Code | None = None,
    ) -> None:
        self._path, self._identity, self._code = path, identity, code
        self._types: TypeAdapter[Result] = TypeAdapter(result)

    def finished(self, jobs: Iterable[Job]) -> dict[Job, Result]:
        """Return the results of those jobs that the record has, in a form that this version reads."""
        found = record.read(self._path)
        keys = {job: record.key_of(self._identity(job)) for job in jobs}
        results: dict[Job, Result] = {}
        for job, key in keys.items():
            if key in found:
                with suppress(ValidationError):  # it is made again
                    results[job] = self._types.validate_python(found[key])
        return results

    def keep(self, job: Job, result: Result) -> None:
        """Add a job's result; it is in the record when this returns."""
        record.append(self._path, self._identity(job), self._types.dump_python(result), self._code)

    def complete(
        self, jobs: Iterable[Job], make: Callable[[Job], Result], doing: str, workers: int | None = None
    ) -> dict[Job, Result]:
        """Make the jobs that the record lacks, in their order, and return the results of all.

        Args:
            jobs: one that comes twice is made once.
            make: a job's result; for processes a function of a module, or a partial of one.
            doing: what the progress bar says.
            workers: see ``made``.

        Raises:
            UserError: if another process makes jobs of this record.
        """
        every = list(dict.fromkeys(jobs))
        for sentence in reading.told(self._path, record.damaged(self._path)):
            print(f"{shown.line(sentence)}: this line is left out, and what it told is made again", file=sys.stderr)
        with files.claimed(self._path):
            finished = self.finished(every)
            for job, result in made([job for job in every if job not in finished], make, doing, workers):
                self.keep(job, result)
            return self.finished(every)


def made(
    jobs: Sequence[Job], make: Callable[[Job], Made], doing: str, workers: int | None = None
) -> Iterator[tuple[Job, Made]]:
    """Yield each job with what is made of it, as soon as it is there, beside a progress bar.

    Args:
        jobs: in the order in which they are begun.
        make: called with a job.
        doing: what the progress bar says.
        workers: processes of one thread each; None for this process, as it is.
    """
    if workers is None:
        for job in followed(jobs, doing):
            yield job, make(job)
        return
    with processes(workers) as pool:
        futures = {pool.submit(make, job): job for job in jobs}
        for future in followed(as_completed(futures), doing, len(jobs)):
            yield futures[future], future.result()
