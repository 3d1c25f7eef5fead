"""Keep recorded passes on disk: a safetensors file each, and an index beside it that is written last.

A pass without its index was not finished. The index says how large the file is and what is in it, so a recording that
was cut off, or put together from several, is told before anything is judged.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from parity import data_files
from parity.machine import files
from parity.shown import few_of
from parity.user_error import UserError

FORMAT = 1
DELAYED = "DelayedScaling"
_INDEX = ".json"
_TENSORS = ".safetensors"


@dataclass(frozen=True)
class RecordedValue:
    """A value that the model computed, as ``parity.stages.watch`` saw it.

    Attributes:
        name: the function that returned it.
        module: the path of the submodule in which it was computed.
        lineage: the model's own parameters that it was computed from.
        from_input: whether it depends on a floating-point input.
        parents: the places of the values that its function was given.
        weights: the model's parameters that its function was given.
        is_result: see ``Watched``.
        has_gradient: whether its gradient was recorded.
    """

    name: str
    module: str
    lineage: tuple[str, ...]
    from_input: bool
    parents: tuple[int, ...]
    weights: tuple[str, ...]
    is_result: bool
    has_gradient: bool


@dataclass(frozen=True)
class RecordedPass:
    """The index of one pass.

    Attributes:
        run: which recording it belongs to, the same on all ranks.
        rank, ranks: which process recorded it, and how many there were.
        step: the training step, from 0.
        number: which of the step's passes it is, from 0.
        root: the class of the model.
        dtypes: how many parameters have each dtype.
        autocast: the dtype of ``torch.autocast`` around the pass; empty without it.
        recipes: the class of TE's recipe in each submodule of TE's; empty for a module without one.
        is_training: whether the model was in training mode.
        values: what it computed, in order.
        arguments: what it was called with, see ``packed``.
        outputs: the names of its outputs.
        inner: those that another output is computed from, such as logits beside a loss.
        tensors: the shape of each tensor in the file.
        unreached: parameters to which no gradient came.
        frozen: parameters that are not trained.
        notes: what was left out, and why.
        environment: versions and settings, see ``parity.recordings.environment``.
        unscaled: submodules whose delayed scaling had seen no gradient yet.
        tp: over how many ranks TE's modules divide their parameters.
        sequence_parallel: whether these ranks divide sequences as well.
        cp: over how many ranks TE's attention divides sequences.
        splits: along which dimension, in how many blocks, by the parameters' names.
        size: bytes of the file with the tensors.
        format: the version of this format.
    """

    run: str
    rank: int
    ranks: int
    step: int
    number: int
    root: str
    dtypes: dict[str, int]
    autocast: str
    recipes: dict[str, str]
    is_training: bool
    values: tuple[RecordedValue, ...]
    arguments: Any
    outputs: tuple[str, ...]
    inner: tuple[str, ...]
    tensors: dict[str, tuple[int, ...]]
    unreached: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    unscaled: tuple[str, ...] = ()
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    size: int = 0
    format: int = FORMAT

    @property
    def reasons_for_more_error(self) -> tuple[str, ...]:
        """Why single stages may be off by more than the rounding model expects of them; usually there is no reason."""
        reasons = {
            "it ran under torch.autocast, which rounds more often than the model that it is judged by: a stage may be "
            "off by twice the expected error": bool(self.autocast),
            f"{self.tp} ranks add up partial sums, each of which is rounded: a stage that ends with such a sum may be "
            "off by more than the expected error": self.tp > 1,
            "delayed scaling takes its scales from steps that were not recorded, so each tensor is modelled with its "
            "own: a stage may be off by more than the expected error": DELAYED in self.recipes.values(),
        }
        return tuple(reason for reason, applies in reasons.items() if applies)

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors of a kind."""
        prefix = key_of(kind, "")
        return [key[len(prefix) :] for key in self.tensors if key.startswith(prefix)]

    @property
    def stem(self) -> str:
        """The name of its files, without an ending."""
        return f"step-{self.step}-pass-{self.number}-rank-{self.rank}"

    def __str__(self) -> str:
        rank = f" on rank {self.rank}" if self.ranks > 1 else ""
        return f"pass {self.number} of step {self.step}{rank}"


# What is in a file, by its key.


def key_of(kind: str, name: object) -> str:
    """Return the key of a tensor: ``weight layers.0.fc.weight``, ``value 12``, ``gradient of value 12``."""
    return f"{kind} {name}"


def write(folder: Path, one: RecordedPass, tensors: Mapping[str, Tensor]) -> None:
    """Write a pass to a folder, the index last."""
    from safetensors.torch import save_file

    path = folder / f"{one.stem}{_TENSORS}"
    save_file({key: x.contiguous() for key, x in tensors.items()}, path)
    index = dataclasses.replace(one, size=path.stat().st_size)
    files.replace(path.with_suffix(_INDEX), json.dumps(dataclasses.asdict(index)))


@dataclass(frozen=True)
class StoredPass:
    """A pass on disk, whose tensors are read when they are asked for.

    Attributes:
        index: what is in it.
        path: the file with the tensors.
    """

    index: RecordedPass
    path: Path

    def has(self, kind: str, name: object) -> bool:
        """Return whether a tensor was recorded."""
        return key_of(kind, name) in self.index.tensors

    def tensor(self, kind: str, name: object) -> Tensor:
        """Read a tensor."""
        with self.opened() as read_tensor:
            return read_tensor(key_of(kind, name))

    def named(self, kind: str) -> dict[str, Tensor]:
        """Read all tensors of a kind, by name."""
        with self.opened() as read:
            return {name: read(key_of(kind, name)) for name in self.index.names(kind)}

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        """Yield a function that reads a tensor by its key."""
        with _open_tensors(self.path) as file:
            yield file.get_tensor


@contextmanager
def _open_tensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def read(folder: Path) -> list[StoredPass]:
    """Return the passes of a recording, in order, after checking that they are whole and belong together.

    Raises:
        UserError: if the folder holds no recording, a pass was cut off or changed, or passes are of several recordings
            or not of all ranks.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the one that was given to parity.recording")
    indices = sorted(folder.glob(f"step-*{_INDEX}"))
    unfinished = [path for path in folder.glob(f"step-*{_TENSORS}") if not path.with_suffix(_INDEX).exists()]
    if unfinished:
        raise UserError(
            f"{unfinished[0]} has no index, so its pass was cut off while it was written; remove the file to judge the "
            "others, or record again"
        )
    if not indices:
        raise UserError(
            f"{folder} holds no recorded pass: did the training come to the steps that were asked for, and was the "
            "model called within `with parity.recording(...)`?"
        )
    found = sorted(
        (_read_pass(path) for path in indices),
        key=lambda one: (one.index.step, one.index.number, one.index.rank),
    )
    _check_belong_together(folder, [one.index for one in found])
    return found


def _read_pass(path: Path) -> StoredPass:
    try:
        index = data_files.parsed(path.read_bytes(), _make_index)
    except data_files.NotReadableError as error:
        raise UserError(f"{path} is not the index of a recorded pass: {error}") from error
    if index.stem != path.stem:
        raise UserError(f"{path} is the index of {index.stem}; a file was renamed or copied over another")
    tensors = path.with_suffix(_TENSORS)
    size = tensors.stat().st_size if tensors.exists() else None
    if size != index.size:
        has = "is missing" if size is None else f"has {size:,} bytes"
        raise UserError(f"{tensors} {has}, and {index.size:,} were recorded: copy it again, or record again")
    stored = StoredPass(index, tensors)
    _check_tensors(stored)
    return stored


def _make_index(value: Any) -> RecordedPass:
    if value["format"] != FORMAT:
        raise data_files.NotReadableError(
            f"it has format {value['format']}, and this version of parity reads format {FORMAT}; judge it with the "
            "version that recorded it"
        )
    return _make_schema().validate_python(value)


@functools.cache
def _make_schema() -> TypeAdapter[RecordedPass]:
    return TypeAdapter(RecordedPass)


def _check_tensors(stored: StoredPass) -> None:
    with _open_tensors(stored.path) as file:
        held = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    if held != stored.index.tensors:
        differing = sorted(
            key for key in held.keys() | stored.index.tensors.keys() if held.get(key) != stored.index.tensors.get(key)
        )
        raise UserError(
            f"{stored.path} does not hold what its index says ({few_of(differing)}); a file was copied over another"
        )
    for place, value in enumerate(stored.index.values):
        if any(not 0 <= parent < place for parent in value.parents) or not stored.has("value", place):
            raise UserError(f"{stored.path}: value {place} of its index has no tensor, or was made of a later one")


def _check_belong_together(folder: Path, found: Sequence[RecordedPass]) -> None:
    runs = Counter(one.run for one in found)
    if len(runs) > 1:
        raise UserError(
            f"{folder} holds passes of {len(runs)} recordings ({_list_runs(found)}): give each recording a folder of "
            "its own"
        )
    ranks = {one.ranks for one in found}
    if len(ranks) > 1:
        raise UserError(f"{folder} holds passes of runs over {few_of([str(one) for one in sorted(ranks)])} ranks")
    count = ranks.pop()
    by_pass: dict[tuple[int, int], set[int]] = {}
    for one in found:
        by_pass.setdefault((one.step, one.number), set()).add(one.rank)
    for (step, number), held in by_pass.items():
        missing = sorted(set(range(count)) - held)
        if missing:
            raise UserError(
                f"{folder} lacks rank {few_of([str(rank) for rank in missing])} of {count} in pass {number} of step "
                f"{step}: copy the folders of all machines into one"
            )


def _list_runs(found: Sequence[RecordedPass]) -> str:
    steps: dict[str, dict[str, None]] = {}
    for one in found:
        steps.setdefault(one.run, {})[str(one.step)] = None
    return ", ".join(f"{run[:8]}: step {few_of(list(some))}" for run, some in steps.items())


# Arguments, as JSON.


def packed(value: Any, keep: Any) -> Any:
    """Return nested arguments as JSON, with tensors handed to ``keep``, which returns their names."""
    if isinstance(value, Tensor):
        return {"tensor": keep(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [packed(one, keep) for one in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: packed(one, keep) for key, one in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"other": type(value).__name__}


def unpacked(value: Any, tensor: Any) -> Any:
    """Return nested arguments from JSON; ``tensor`` returns a tensor by its name.

    Raises:
        UserError: for an object that JSON cannot hold.
    """
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind in ("list", "tuple"):
        made = [unpacked(one, tensor) for one in content]
        return made if kind == "list" else tuple(made)
    if kind == "dict":
        return {key: unpacked(one, tensor) for key, one in content.items()}
    if kind == "dtype":
        return getattr(torch, content)
    return Unrecorded(content)


@dataclass(frozen=True)
class Unrecorded:
    """An argument that is no tensor, number or text, of which only the class is known."""

    kind: str
