"""The manifest of a converted checkpoint: of which source, by which map, and which files it has, with their checksums.

Files are read for their checksums by threads beside the conversion, which finds them in the system's cache of files.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence, Set
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
        source: the source's files, by name; without a checksum those that had not been read when it was written.
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


def path_of(files: Sequence[Path]) -> Path | None:
    """Return the manifest that has these files of one checkpoint, an index first; None if there is none."""
    beside, inside = files[0].with_name(f"{files[0].name}.{NAME}"), files[0].with_name(NAME)
    return next((path for path in (beside, inside) if path.is_file()), None)


def check(files: Sequence[Path], found: Mapping[str, FileMark] | None = None) -> bool:
    """Check that files are those of their manifest, if they have one, and return whether it has checksums.

    Args:
        files: those of a checkpoint that are read, an index first.
        found: what they are known by; None to look only at sizes.

    Raises:
        UserError: if a file is another one, or the manifest is damaged.
    """
    path = path_of(files)
    if path is None:
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
        check(files, {file.name: _mark_file(file, threading.Event()) for file in files})


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
        # A file that was written is not to wait for all of the source.
        self._readers = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._source = {file.name: self._mark(file, 0) for file in self.sources}
        self._files: dict[str, Future[FileMark]] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for reader in self._readers:
            reader.shutdown(cancel_futures=True)

    def add(self, file: Path) -> Future[FileMark]:
        """Note a file that has been written."""
        self._files[file.name] = self._mark(file, 1)
        return self._files[file.name]

    def check_sources(self) -> None:
        """Wait for the source's checksums, and check them by its own manifest.

        Raises:
            UserError: as ``check``.
        """
        if self.sources:
            check(self.sources, {name: future.result() for name, future in self._source.items()})

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
            {
                file.name: self._source[file.name].result() if wait else FileMark(file.stat().st_size)
                for file in self.sources
            },
            {name: future.result() for name, future in self._files.items() if wait or future.done()},
            dict(plan.rounded),
        )

    def _mark(self, file: Path, reader: int) -> Future[FileMark]:
        if self.checksums:
            return self._readers[reader].submit(_mark_file, file, self._ended)
        done: Future[FileMark] = Future()
        done.set_result(FileMark(file.stat().st_size))
        return done


def _mark_file(file: Path, ended: threading.Event) -> FileMark:
    """Read a file, unless the work ends before, and return its size and checksum."""
    digest, size = hashlib.sha256(), 0
    with open(file, "rb", buffering=0) as opened:
        while not ended.is_set() and (part := opened.read(1 << 22)):
            digest.update(part)
            size += len(part)
    return FileMark(size, digest.hexdigest())


def differences(one: Manifest, other: Manifest) -> Iterable[str]:
    """Yield in what two conversions differ, in a user's words."""
    if one.te_parity != other.te_parity:
        yield f"te-parity {one.te_parity}, now {other.te_parity}"
    for name in {**one.conversion, **other.conversion}:
        if one.conversion.get(name) != other.conversion.get(name):
            yield f"{name} {one.conversion.get(name)!r}, now {other.conversion.get(name)!r}"
    if one.map != other.map:
        yield "another weight map"
    if one.steps != other.steps:
        yield "other files of the source, or other tensors"
