"""Write the states of a module and its optimizer to a file, and read them, in the ways that trainers do."""

from __future__ import annotations

import importlib
import json
import tarfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parity.te import state
from parity.user_error import UserError


@dataclass(frozen=True)
class Way:
    """Save and load a training in one way.

    Attributes:
        save: called as ``save(module, optimizer, file)``.
        load: called as ``load(module, optimizer, file)`` with what ``save`` has written.
    """

    save: Callable[[nn.Module, Optimizer, BinaryIO], None]
    load: Callable[[nn.Module, Optimizer, BinaryIO], None]


# torch.save, as most training loops do.


def save(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Write the states of both by ``torch.save``."""
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)


def load(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Read what ``save`` has written."""
    states = torch.load(file, weights_only=False, map_location="cpu")
    module.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])


# Formats of named tensors: what else there is, such as an optimizer's settings, goes beside them as JSON.


_STRUCTURE = "structure"


def _apart(states: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return the same tree as JSON has it, and put its tensors into ``tensors``, by their paths."""
    if isinstance(states, Tensor):
        tensors[path] = state.dequantized_tensor(states.detach(), torch.float32)  # as optimizers read it
        return {"tensor": path}
    if isinstance(states, Mapping):
        return {"dict": [[key, _apart(one, tensors, f"{path}.{key}")] for key, one in states.items()]}
    if isinstance(states, (list, tuple)):
        kind = "tuple" if isinstance(states, tuple) else "list"
        return {kind: [_apart(one, tensors, f"{path}.{i}") for i, one in enumerate(states)]}
    if states is None or isinstance(states, (bool, int, float, str)):
        return states
    raise UserError(
        f"{path} of the training's state is a {type(states).__name__}, which is neither a tensor nor JSON, so that "
        "only torch.save keeps it: leave this switch out, or return a tensor from get_extra_state"
    )


def _together(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that ``_apart`` took apart."""
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _together(one, tensors) for key, one in content}
    found = [_together(one, tensors) for one in content]
    return tuple(found) if kind == "tuple" else found


def _taken_apart(module: nn.Module, optimizer: Optimizer) -> tuple[str, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    model = _apart(module.state_dict(), tensors, "model")
    return json.dumps([model, _apart(optimizer.state_dict(), tensors, "optimizer")]), tensors


def _filled(module: nn.Module, optimizer: Optimizer, structure: str, tensors: Mapping[str, Tensor]) -> None:
    model, steps = (_together(one, tensors) for one in json.loads(structure))
    module.load_state_dict(model)
    optimizer.load_state_dict(steps)


# safetensors.


def _save_safetensors(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Write one file of tensors; those that share their memory are written each by itself."""
    structure, tensors = _taken_apart(module, optimizer)
    copies = {name: x.cpu().clone().contiguous() for name, x in tensors.items()}
    file.write(_safetensors("torch").save(copies, metadata={_STRUCTURE: structure}))


def _load_safetensors(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        path.write_bytes(file.read())
        with _safetensors().safe_open(path, framework="pt") as opened:
            names = list(opened.keys())  # the file itself cannot be iterated over
            tensors = {name: opened.get_tensor(name) for name in names}
            _filled(module, optimizer, opened.metadata()[_STRUCTURE], tensors)


def _safetensors(submodule: str = "") -> Any:
    try:
        return importlib.import_module(".".join(filter(None, ("safetensors", submodule))))
    except ImportError as error:
        raise UserError("the switch resume-safetensors needs safetensors: pip install safetensors") from error


# torch.distributed.checkpoint, in one process. It reads into tensors that are there, and a new module's
# ``_extra_state`` has not the size of one that has run with delayed scaling: so each is made in its size in the file.


def _save_distributed(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Write the folder of a distributed checkpoint, as one archive."""
    structure, tensors = _taken_apart(module, optimizer)
    with TemporaryDirectory() as folder, _as_one_process() as distributed:
        distributed.save({**tensors, _STRUCTURE: structure}, checkpoint_id=folder, no_dist=True)
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(folder, arcname="")


def _load_distributed(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    with TemporaryDirectory() as folder, _as_one_process() as distributed:
        with tarfile.open(fileobj=file, mode="r") as archive:
            archive.extractall(folder, filter="data")
        held = distributed.FileSystemReader(folder).read_metadata().state_dict_metadata
        states: dict[str, Any] = {
            name: torch.empty(one.size, dtype=one.properties.dtype) if name != _STRUCTURE else ""
            for name, one in held.items()
        }
        distributed.load(states, checkpoint_id=folder, no_dist=True)
    _filled(module, optimizer, states.pop(_STRUCTURE), states)


@contextmanager
def _as_one_process() -> Iterator[Any]:
    """Hand out ``torch.distributed.checkpoint``, which does not remark here that there are no other processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("torch.distributed.checkpoint")


WAYS: dict[str, Way] = {
    "resume": Way(save, load),
    "resume-dcp": Way(_save_distributed, _load_distributed),
    "resume-safetensors": Way(_save_safetensors, _load_safetensors),
}
"""Maps a switch to the way that it asks for."""
