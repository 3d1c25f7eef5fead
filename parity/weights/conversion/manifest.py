"""The manifest of a converted checkpoint: of which source, by which map, and which files it has, with their checksums.

Files are read for their checksums by threads beside the conversion, which finds them in the system's cache of files.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from parity import data_files
from parity.user_error import UserError
from parity.weights.conversion.plan import Plan

NAME = "parity.manifest.json"  # in a folder; a file of its own has it beside, after its own name


@dataclass(frozen=True)
class FileMark:
    """What a file is known by.

    Attributes:
        bytes: its size.
        sha256: its checksum in hexadecimal digits; None if none was computed.
    """

    bytes: int
    sha256: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Attributes:
        te_parity: the version that has written it.
        conversion: the pair, and the arguments of the command.
        map: the checksum of the weight map.
        tensors: how many there are.
        steps: the checksum of all names, shapes, dtypes and files that the conversion makes, and of what it is made of.
        source: the source's files, by name; none in an unfinished one.
        files: the checkpoint's own files that are whole.
        rounded: how far the map's arithmetic may have moved each tensor.
    """

    te_parity: str
    conversion: dict[str, Any]
    map: str
    tensors: int
    steps: str
    source: dict[str, FileMark]
    files: dict[str, FileMark]
    rounded: dict[str, float]

    def differences(self, other: Manifest) -> list[str]:
        """Return in what another conversion differs from this one, in a user's words."""
        one, two = (
            {**x.conversion, "te-parity": x.te_parity, "weight map": x.map, "tensors or files of the source": x.steps}
            for x in (self, other)
        )
        return [name for name in {**one, **two} if one.get(name) != two.get(name)]

    def to_json(self) -> bytes:
        """Return it as text."""
        return json.dumps(asdict(self), indent=2).encode() + b"\n"


_MANIFEST = TypeAdapter(Manifest)


def parse(text: bytes, path: Path) -> Manifest:
    """Return what a manifest says.

    Raises:
        UserError: if it is damaged.
    """
    try:
        return data_files.parsed(text, _MANIFEST.validate_python)
    except data_files.NotReadableError as error:
        raise UserError(f"{path} cannot be read: {error}; without it, files are taken as they are") from None


def check(files: Sequence[Path], found: Mapping[str, FileMark] | None = None) -> bool:
    """Check that files are those of their manifest, if they have one, and return whether it has checksums.

    Args:
        files: those of a checkpoint that are read, an index first.
        found: what they are known by; None to look only at sizes.

    Raises:
        UserError: if a file is another one, or the manifest is damaged.
    """
    beside, inside = files[0].with_name(f"{files[0].name}.{NAME}"), files[0].with_name(NAME)
    path = beside if beside.is_file() else inside
    if not path.is_file():
        return False
    told = parse(data_files.bytes_of(path, ""), path).files
    for file in filter(os.path.isfile, files):  # what is missing is told when it is read
        mark = told.get(file.name)
        here = found[file.name] if found else FileMark(file.stat().st_size)
        if mark is None:
            if len(files) == 1:  # a file that has nothing to do with those beside it
                continue
            wrong = "is not one of its files"
        elif here.bytes != mark.bytes:
            wrong = f"has {here.bytes:,} bytes, not {mark.bytes:,}"
        elif here.sha256 and mark.sha256 and here.sha256 != mark.sha256:
            wrong = "has another content"
        else:
            continue
        raise UserError(
            f"{file} is not as {path} says: it {wrong}; was it copied whole, and is it of the same checkpoint? If it "
            "was changed on purpose, delete the manifest"
        )
    return any(mark.sha256 for mark in told.values())


def check_content(files: Sequence[Path]) -> None:
    """Check sizes and, if the manifest of these files has them, checksums.

    Raises:
        UserError: as ``check``.
    """
    if check(files):
        check(files, {file.name: _mark_file(file) for file in files})


@dataclass
class Record:
    """What a conversion's manifest will say; a context in which files are read for their checksums.

    Args:
        conversion: the pair, and the arguments of the command.
        sources: the source's files, an index first.
        checksums: whether to compute checksums. Without, only sizes are told and checked.

    Attributes:
        continued: names of files that an earlier call had written.
    """

    conversion: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Path] = ()
    checksums: bool = True
    continued: Set[str] = frozenset()

    def __enter__(self) -> Record:
        self._ended = threading.Event()
        self._readers = ThreadPoolExecutor(2)  # one for the source, one for what is written
        self._source = self._readers.submit(self._mark_sources)
        self._files: dict[str, Future[FileMark]] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._readers.shutdown(cancel_futures=True)

    def add(self, file: Path) -> Future[FileMark]:
        """Note a file that has been written."""
        self._files[file.name] = self._readers.submit(_mark_file, file, self.checksums, self._ended)
        return self._files[file.name]

    def check_sources(self) -> None:
        """Wait for the source's checksums, and check them by its own manifest.

        Raises:
            UserError: as ``check``.
        """
        if self.sources:
            check(self.sources, self._source.result())

    def manifest(self, plan: Plan, layout: str = "", wait: bool = True) -> Manifest:
        """Return the manifest.

        Args:
            plan: the conversion.
            layout: says which tensor is in which file.
            wait: whether to wait for all checksums; else files that are not done are left out.
        """
        marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self.sources]
        made = [one for step in plan.steps for one in step.made]
        steps = repr((marks, made, layout))
        return Manifest(
            metadata.version("te-parity"),
            dict(self.conversion),
            plan.map_checksum,
            len(made),
            hashlib.sha256(steps.encode()).hexdigest(),
            self._source.result() if wait else {},
            {name: future.result() for name, future in self._files.items() if wait or future.done()},
            dict(plan.rounded),
        )

    def _mark_sources(self) -> dict[str, FileMark]:
        return {file.name: _mark_file(file, self.checksums, self._ended) for file in self.sources}


def _mark_file(file: Path, checksums: bool = True, ended: threading.Event | None = None) -> FileMark:
    """Return a file's size and, unless the work ends before, its checksum."""
    if not checksums:
        return FileMark(file.stat().st_size)
    digest, size = hashlib.sha256(), 0
    with open(file, "rb", buffering=0) as opened:
        while not (ended and ended.is_set()) and (part := opened.read(1 << 22)):
            digest.update(part)
            size += len(part)
    return FileMark(size, digest.hexdigest())
