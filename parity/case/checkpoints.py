"""Write the states of a module and its optimizer to a file, and read them, in the ways that trainers do."""

from __future__ import annotations

import importlib
import json
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    torch.save({"model": module.state_dict(), "optimizer": _state_of(optimizer)}, file)


def load(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Read what ``save`` has written."""
    states = torch.load(file, weights_only=False, map_location="cpu")
    module.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's whole state, which a ``ZeroRedundancyOptimizer`` collects from all ranks for each."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return optimizer.state_dict()
    found: dict[str, Any] = {}
    for rank in range(_ranks()):
        optimizer.consolidate_state_dict(to=rank)  # it forgets what another call has collected
        found = optimizer.state_dict() if rank == torch.distributed.get_rank() else found
    return found


# Formats of named tensors: what else there is, such as an optimizer's settings, goes beside them as JSON.


_STRUCTURE = "structure"


def _apart(states: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return the same tree as JSON has it, and put its tensors into ``tensors``, by their paths.

    Tensors that FSDP divides stay divided.
    """
    if hasattr(states, "to_local"):
        tensors[path] = states.detach()
        held = [one.dim if one.is_shard() else None for one in states.placements]
        return {"divided": [path, list(states.shape), list(states.stride()), held]}
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


def _together(structure: Any, tensors: Mapping[str, Tensor], mesh: Any = None) -> Any:
    """Return the tree that ``_apart`` took apart; ``mesh`` is that of the ranks which divide tensors."""
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "divided":
        path, shape, stride, held = content
        own = tensors[path]
        return own if hasattr(own, "to_local") else _divided(own, mesh, held, shape, stride)
    if kind == "dict":
        return {key: _together(one, tensors, mesh) for key, one in content}
    found = [_together(one, tensors, mesh) for one in content]
    return tuple(found) if kind == "tuple" else found


def own_part(x: Any) -> Tensor:
    """Return this rank's part of a tensor that FSDP divides; any other as it is."""
    own: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return own


def _divided(own: Tensor, mesh: Any, held: Sequence[int | None], shape: Sequence[int], stride: Sequence[int]) -> Any:
    """Return a tensor that FSDP divides, of this rank's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(own, mesh, _placements(held), shape=torch.Size(shape), stride=tuple(stride))


def _placements(held: Sequence[int | None]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if dim is None else Shard(dim) for dim in held]


def _mesh(module: nn.Module) -> Any:
    """Return that of the ranks which divide the module's parameters; None if none do."""
    parameters: Iterable[Any] = module.parameters()
    return next((one.device_mesh for one in parameters if hasattr(one, "to_local")), None)


def _taken_apart(module: nn.Module, optimizer: Optimizer) -> tuple[str, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    model = _apart(module.state_dict(), tensors, "model")
    return json.dumps([model, _apart(_state_of(optimizer), tensors, "optimizer")]), tensors


def _filled(module: nn.Module, optimizer: Optimizer, structure: str, tensors: Mapping[str, Tensor]) -> None:
    mesh = _mesh(module)
    model, steps = (_together(one, tensors, mesh) for one in json.loads(structure))
    module.load_state_dict(model)
    optimizer.load_state_dict(steps)


# safetensors.


def _save_safetensors(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Write one file of tensors, of those that ranks divide this rank's part.

    Tensors that share their memory are written each by itself.
    """
    structure, tensors = _taken_apart(module, optimizer)
    copies = {name: own_part(x).cpu().clone().contiguous() for name, x in tensors.items()}
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


# torch.distributed.checkpoint, by one process or all ranks. It reads into tensors that are there, and a new module's
# ``_extra_state`` has not the size of one that has run with delayed scaling: so each is made in its size in the file.
# Ranks name their own tensors by their number. Those that FSDP divides have one name, and each rank writes its part.


def _save_distributed(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Write the folder of a distributed checkpoint, as one archive; all ranks have to do so, and each gets it whole."""
    structure, tensors = _taken_apart(module, optimizer)
    states = {_of_rank(name, x): x for name, x in {**tensors, _STRUCTURE: structure}.items()}
    with _shared_folder() as folder, _distributed_checkpoint() as distributed:
        distributed.save(states, checkpoint_id=folder, no_dist=not _ranks())
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(folder, arcname="")


def _load_distributed(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    with TemporaryDirectory() as folder, _distributed_checkpoint() as distributed:
        with tarfile.open(fileobj=file, mode="r") as archive:
            archive.extractall(folder, filter="data")
        held = distributed.FileSystemReader(folder).read_metadata().state_dict_metadata
        found: dict[str, Any] = {_of_rank(_STRUCTURE): ""}
        distributed.load(found, checkpoint_id=folder, no_dist=not _ranks())
        structure = found[_of_rank(_STRUCTURE)]
        divided, mesh = dict(_divided_in(json.loads(structure))), _mesh(module)
        states: dict[str, Any] = {}
        for name, one in held.items():
            if name in divided:
                states[name] = _empty(one.size, one.properties.dtype, mesh, divided[name])
            elif name.startswith(_of_rank("")) and name != _of_rank(_STRUCTURE):
                states[name] = torch.empty(one.size, dtype=one.properties.dtype)
        distributed.load(states, checkpoint_id=folder, no_dist=not _ranks())
    _filled(module, optimizer, structure, {name.removeprefix(_of_rank("")): x for name, x in states.items()})


def _of_rank(name: str, value: Any = None) -> str:
    """Return what a checkpoint calls a value that is this rank's own, or that all ranks divide."""
    return name if hasattr(value, "to_local") else f"rank {torch.distributed.get_rank() if _ranks() else 0}.{name}"


def _divided_in(structure: Any) -> Iterator[tuple[str, list[int | None]]]:
    """Yield the path of each tensor that ranks divide, and along which dimensions."""
    if isinstance(structure, dict) and "divided" in structure:
        path, _, _, held = structure["divided"]
        yield path, held
    elif isinstance(structure, (dict, list)):
        for one in structure.values() if isinstance(structure, dict) else structure:
            yield from _divided_in(one)


def _empty(size: Sequence[int], dtype: torch.dtype, mesh: Any, held: Sequence[int | None]) -> Any:
    from torch.distributed.tensor import empty

    return empty(*size, dtype=dtype, device_mesh=mesh, placements=_placements(held))


def _ranks() -> int:
    """Return how many ranks write one checkpoint together; 0 for a process by itself."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0


@contextmanager
def _shared_folder() -> Iterator[str]:
    """Hand all ranks one temporary folder, which is there until each of them has left it."""
    with TemporaryDirectory() as own:
        folders = [own]
        if _ranks():
            torch.distributed.broadcast_object_list(folders)
        yield folders[0]
        if _ranks():
            torch.distributed.barrier()


@contextmanager
def _distributed_checkpoint() -> Iterator[Any]:
    """Hand out ``torch.distributed.checkpoint``, which does not remark here that there may be no other processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("torch.distributed.checkpoint")


WAYS: dict[str, Way] = {
    "resume": Way(save, load),
    "resume-dcp": Way(_save_distributed, _load_distributed),
    "resume-safetensors": Way(_save_safetensors, _load_safetensors),
}
"""Maps a switch to the way that it asks for."""
