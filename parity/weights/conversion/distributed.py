"""Read and write folders of ``torch.distributed.checkpoint``, one tensor at a time."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.shown import one_line
from parity.user_error import UserError
from parity.weights.conversion.plan import Plan, is_extra_state, remembering
from parity.weights.conversion.unread import UnreadTensor

METADATA = ".metadata"
DATA = ".distcp"
_NAMED = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMED_TOO = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}


class _Unpickler(pickle.Unpickler):
    """Reads metadata without running code that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in _NAMED or (module, name) in _NAMED_TOO or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Hide the warning that there is one process, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


def read_distributed(folder: Path, within: str = "") -> dict[str, Tensor]:
    """Return the tensors in a folder by their keys; each is read whenever something computes with it.

    Args:
        folder: what ``torch.distributed.checkpoint.save`` wrote, on any number of ranks.
        within: the entry that holds the model, such as ``model``; dots join nested ones.

    Raises:
        UserError: if it is damaged, has no such entry, or holds anything but tensors. A tensor raises it, too.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

    def load(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        try:
            with _in_one_process():
                dcp.load({key: tensor}, storage_reader=Reader(folder), no_dist=True)
        except CheckpointException as error:
            reason = one_line(next(iter(error.failures.values()))[0])
            raise UserError(f"{folder} is damaged: {key!r} cannot be read: {reason}") from None
        return tensor

    try:
        with open(folder / METADATA, "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        held: Mapping[str, Any] = metadata.state_dict_metadata
    except Exception as error:  # the unpickler raises anything for a damaged file
        raise UserError(f"{folder / METADATA} cannot be read: {one_line(error)}") from None
    found: dict[str, Tensor] = {}
    prefix = f"{within}." if within else ""
    for key, one in held.items():
        if not key.startswith(prefix):
            continue
        if isinstance(one, TensorStorageMetadata):
            about = tuple(one.size), one.properties.dtype
            found[key.removeprefix(prefix)] = UnreadTensor(partial(load, key, *about), *about)
        elif not is_extra_state(key):
            raise UserError(f"{folder} holds more than tensors, such as {key!r}; name the model's entry with --within")
    if not found:
        entries = ", ".join(sorted({key.partition(".")[0] for key in held})[:8])
        raise UserError(f"{folder} has no tensors in an entry {within!r}; it has {entries}")
    return found


def write_distributed(folder: Path, plan: Plan) -> list[int]:
    """Write what a conversion makes to an empty folder, one tensor after the other.

    Returns:
        How many bytes each file of tensors has.

    Raises:
        Exception: what a step raises, or writing.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    compute = remembering(plan.steps)  # PyTorch asks for them in this order

    def read(i: int, key: str) -> Tensor:
        return compute(i)[key]

    tensors = {
        made.key: UnreadTensor(partial(read, i, made.key), made.shape, made.dtype)
        for i, step in enumerate(plan.steps)
        for made in step.made
    }
    try:
        with _in_one_process():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    return [file.stat().st_size for file in folder.glob(f"*{DATA}")]
