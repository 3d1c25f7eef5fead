"""Train a module as its pair says: its loss, optimizer and training step, and how states are saved and loaded."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from parity.case.case import MakeOptimizer, Pair, Rng, Training, signed_as_call
from parity.ranks.layout import Parallel
from parity.te import state
from parity.user_error import UserError

# The optimizer of both if the pair names none. Its eps is too small to matter for any gradient.
ADAM: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def reference_optimizer(training: Training) -> MakeOptimizer:
    """Return the function that makes the reference's optimizer."""
    return training.optimizer or (lambda model: AdamW(model.parameters(), **ADAM))


def candidate_optimizer(training: Training, te: ModuleType) -> MakeOptimizer:
    """Return the function that makes the candidate's optimizer."""

    def fused_adam(model: nn.Module) -> Optimizer:
        narrow = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
        made: Optimizer = te.optimizers.FusedAdam(model.parameters(), **ADAM, master_weights=narrow)
        return made

    return training.candidate_optimizer or training.optimizer or fused_adam


def schedule_of(training: Training, optimizer: Optimizer) -> LRScheduler | None:
    """Return the schedule of an optimizer's learning rate; None if there is none.

    Raises:
        UserError: if ``scheduler`` makes something else.
    """
    if training.scheduler is None:
        return None
    made = training.scheduler(optimizer)
    if not callable(getattr(made, "step", None)):
        raise UserError(
            f"a training's scheduler must return a schedule with a method step, such as "
            f"torch.optim.lr_scheduler.StepLR(optimizer, step_size=10), not {type(made).__name__}"
        )
    try:
        inspect.signature(made.step).bind()
    except TypeError as error:
        raise UserError(
            f"parity calls the scheduler's step() without arguments, which {type(made).__name__} does not accept: "
            f"{error}; step it in an optimizer hook, or in the training step"
        ) from error
    return made


class Model:
    """A pair's module as a training step calls it.

    Attributes:
        module: the reference or the candidate.
        micro_batch: the number of the micro-batch, from 0, if a step has several; a TE module is told whether it is
            the first, unless the pair calls it.
        recipe: the precision's recipe, an object of TE's; None if it has none.
        cuda: ``torch.cuda``, or what stands in for its streams and graphs on the CPU kernels.
        calls: the arguments of all calls since this was last cleared.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any] | None,
        loss: Callable[..., Tensor] | None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        recipe: Any = None,
        cuda: Any = torch.cuda,
    ) -> None:
        """Call ``module`` through ``call``, each time in a new context that ``around`` makes, such as TE's autocast."""
        self.module, self.recipe, self.cuda = module, recipe, cuda
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.micro_batch: int | None = None
        self._call, self._loss, self._around = call or nn.Module.__call__, loss or distance_to_targets, around
        self._is_told = call is None and "is_first_microbatch" in inspect.signature(module.forward).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        self.calls.append((args, kwargs))
        if self._is_told and self.micro_batch is not None:
            kwargs = {"is_first_microbatch": self.micro_batch == 0} | kwargs
        with self._around():
            return self._call(self.module, *args, **kwargs)

    def without_recipe(self) -> Model:
        """Return the same model, whose calls are in no context."""
        return Model(self.module, self._call, self._loss, cuda=self.cuda)

    @contextmanager
    def within(self, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Call the module in one more context, which ``around`` makes for each call, until this one is left."""
        outer = self._around

        @contextmanager
        def both() -> Iterator[None]:
            with outer(), around():
                yield

        self._around = both
        try:
            yield
        finally:
            self._around = outer

    def called_by(self, call: Callable[..., Any]) -> Model:
        """Return the same model, which calls its module through ``call``."""
        return Model(self.module, call, self._loss, self._around, self.recipe, self.cuda)

    def parameters(self) -> list[nn.Parameter]:
        """Return the module's parameters."""
        return list(self.module.parameters())

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a call with these inputs, one number."""
        loss = self._loss(self(*args, **kwargs), *args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"the loss of a training must be a tensor that holds one number, not {shape}")
        return loss.reshape(())


def distance_to_targets(returned: Any, *_: Any, **__: Any) -> Tensor:
    """Return a single number as it is; else half the squared distance of the outputs to targets, averaged over tokens.

    All tokens have the same target, so that the loss of a micro-batch is that of its tokens. The target holds multiples
    of 1/8 up to 2, which every precision represents. Averaging only over tokens keeps gradients in FP16's range.
    """
    outputs = [x for x in tree_leaves(returned) if isinstance(x, Tensor) and x.is_floating_point()]
    if len(outputs) == 1 and outputs[0].numel() == 1:
        return outputs[0]
    if not outputs:
        raise UserError(
            "a training needs a loss, and its module returns nothing in floating point; give one as "
            "training=parity.Training(loss=...)"
        )
    return torch.stack([distance_of_part(i, one, one.shape) for i, one in enumerate(outputs)]).sum()


def distance_of_part(
    number: int, output: Tensor, whole: torch.Size, part_of: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return what a part of an output adds to the loss of ``distance_to_targets``.

    Args:
        number: the output's number, from 0.
        output: the part.
        whole: the shape of the whole output.
        part_of: returns the part of a whole tensor; None for a part that is the whole.
    """
    wide = output if output.dtype is torch.float64 else output.float()
    tokens = whole.numel() // whole[-1] if whole else 1
    target = _draw_target(number, whole[-1:], wide.device, wide.dtype)
    if part_of is not None:
        target = part_of(target.expand(whole)).reshape(output.shape)
    return (wide - target).square().sum() / (2 * max(tokens, 1))


# Targets are cached, since a CUDA graph that captures the loss cannot draw them on the host or copy them from there.
@functools.lru_cache(maxsize=64)
def _draw_target(number: int, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (Rng(number, "targets").integers(*shape, low=-16, high=17) / 8).to(device, dtype)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Hold a part of a batch.

    Attributes:
        share: the factor of its loss.
        args, kwargs: the arguments of its call.
    """

    share: float
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def plain_step(
    clip: float | None,
    split: Callable[[Any], Sequence[MicroBatch]] | None = None,
    between_ranks: Parallel | None = None,
) -> Callable[..., Tensor]:
    """Return a plain training step: gradients of one batch, clipping if asked for, and an update.

    Args:
        clip: the largest norm of all gradients; None for no clipping.
        split: splits the inputs into micro-batches, whose gradients are added up.
        between_ranks: what the port does on each rank after a backward pass, and how it computes the norm there.
    """

    def step(model: Model, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        state.clear(model.module)
        if split is None:
            loss = model.loss(*args, **kwargs)
            loss.backward()
        else:
            loss = torch.zeros(())
            for model.micro_batch, part in enumerate(split(kwargs or args)):
                own = part.share * model.loss(*part.args, **part.kwargs)
                own.backward()
                loss = loss.to(own) + own.detach()
        for parameter in model.parameters():
            gradient = state.gradient(parameter)
            if gradient is not None and gradient is not parameter.grad:  # TE added it to main_grad
                parameter.grad = gradient.to(parameter.dtype)
        if between_ranks is not None and between_ranks.finish is not None:
            between_ranks.finish(model.module)
        if clip is not None and between_ranks is not None and between_ranks.gradient_norm is not None:
            norm = torch.as_tensor(between_ranks.gradient_norm(model.module))
            clip_grad._clip_grads_with_norm_(model.parameters(), clip, norm)  # so that a step's watcher sees it
        elif clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return step


def losses(pair: Pair) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return two functions that call the reference and the candidate and return the loss of each."""

    def calling(module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Tensor]:
        def loss(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            return Model(module, call, pair.training.loss).loss(*args, **kwargs)

        return signed_as_call(loss, module, call)

    return calling(pair.reference, pair.call_reference), calling(pair.candidate, pair.call_candidate)


# States of a module and its optimizer in a file, written and read in the ways that trainers do.


@dataclass(frozen=True)
class Way:
    """One way to save and load a training.

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
    """Return an optimizer's whole state, which each rank of a ``ZeroRedundancyOptimizer`` collects from all ranks."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return optimizer.state_dict()
    found: dict[str, Any] = {}
    for rank in range(_count_ranks()):
        optimizer.consolidate_state_dict(to=rank)  # it forgets what another call has collected
        found = optimizer.state_dict() if rank == torch.distributed.get_rank() else found
    return found


# Formats that hold named tensors; everything else, such as an optimizer's settings, is stored beside them as JSON.


_STRUCTURE = "structure"


def _extract_tensors(states: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return the tree in JSON's types, and put its tensors into ``tensors``, by their paths.

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
        return {"dict": [[key, _extract_tensors(one, tensors, f"{path}.{key}")] for key, one in states.items()]}
    if isinstance(states, (list, tuple)):
        kind = "tuple" if isinstance(states, tuple) else "list"
        return {kind: [_extract_tensors(one, tensors, f"{path}.{i}") for i, one in enumerate(states)]}
    if states is None or isinstance(states, (bool, int, float, str)):
        return states
    raise UserError(
        f"{path} in the training's state is a {type(states).__name__}, which is neither a tensor nor JSON, so only "
        "torch.save can store it: leave this switch out, or return a tensor from get_extra_state"
    )


def _insert_tensors(structure: Any, tensors: Mapping[str, Tensor], mesh: Any = None) -> Any:
    """Return the tree that ``_extract_tensors`` took apart.

    ``mesh`` is the device mesh of the ranks that divide tensors.
    """
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "divided":
        path, shape, stride, held = content
        own = tensors[path]
        return own if hasattr(own, "to_local") else _make_dtensor(own, mesh, held, shape, stride)
    if kind == "dict":
        return {key: _insert_tensors(one, tensors, mesh) for key, one in content}
    found = [_insert_tensors(one, tensors, mesh) for one in content]
    return tuple(found) if kind == "tuple" else found


def own_part(x: Any) -> Tensor:
    """Return this rank's part of a tensor that FSDP divides; any other as it is."""
    own: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return own


def _make_dtensor(
    own: Tensor, mesh: Any, held: Sequence[int | None], shape: Sequence[int], stride: Sequence[int]
) -> Any:
    """Return a tensor that FSDP divides, made of this rank's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(own, mesh, _make_placements(held), shape=torch.Size(shape), stride=tuple(stride))


def _make_placements(held: Sequence[int | None]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if dim is None else Shard(dim) for dim in held]


def _find_device_mesh(module: nn.Module) -> Any:
    """Return the device mesh of the ranks that divide the module's parameters; None if they are not divided."""
    parameters: Iterable[Any] = module.parameters()
    return next((one.device_mesh for one in parameters if hasattr(one, "to_local")), None)


def _taken_apart(module: nn.Module, optimizer: Optimizer) -> tuple[str, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    model = _extract_tensors(module.state_dict(), tensors, "model")
    return json.dumps([model, _extract_tensors(_state_of(optimizer), tensors, "optimizer")]), tensors


def _load_states(module: nn.Module, optimizer: Optimizer, structure: str, tensors: Mapping[str, Tensor]) -> None:
    mesh = _find_device_mesh(module)
    model, steps = (_insert_tensors(one, tensors, mesh) for one in json.loads(structure))
    module.load_state_dict(model)
    optimizer.load_state_dict(steps)


# safetensors.


def _save_safetensors(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Write one file of tensors; of those that ranks divide, only this rank's part.

    Tensors that share their memory are written separately.
    """
    structure, tensors = _taken_apart(module, optimizer)
    copies = {name: own_part(x).cpu().clone().contiguous() for name, x in tensors.items()}
    file.write(_import_safetensors("torch").save(copies, metadata={_STRUCTURE: structure}))


def _load_safetensors(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        path.write_bytes(file.read())
        with _import_safetensors().safe_open(path, framework="pt") as opened:
            names = list(opened.keys())  # the file itself cannot be iterated over
            tensors = {name: opened.get_tensor(name) for name in names}
            _load_states(module, optimizer, opened.metadata()[_STRUCTURE], tensors)


def _import_safetensors(submodule: str = "") -> Any:
    try:
        return importlib.import_module(".".join(filter(None, ("safetensors", submodule))))
    except ImportError as error:
        raise UserError("the switch resume-safetensors needs safetensors: pip install safetensors") from error


# torch.distributed.checkpoint, by one process or all ranks. It reads into existing tensors, but a new module's
# ``_extra_state`` has another size than that of one that has run with delayed scaling, so each tensor is allocated in
# the size that the file says. The names of a rank's own tensors begin with its number. Tensors that FSDP divides have
# one name, and each rank writes its part.


def _save_distributed(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    """Write a distributed checkpoint's folder as one archive; all ranks must call this, and each writes all of it."""
    structure, tensors = _taken_apart(module, optimizer)
    states = {_of_rank(name, x): x for name, x in {**tensors, _STRUCTURE: structure}.items()}
    with _shared_folder() as folder, _distributed_checkpoint() as distributed:
        distributed.save(states, checkpoint_id=folder, no_dist=not _count_ranks())
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(folder, arcname="")


def _load_distributed(module: nn.Module, optimizer: Optimizer, file: BinaryIO) -> None:
    with TemporaryDirectory() as folder, _distributed_checkpoint() as distributed:
        with tarfile.open(fileobj=file, mode="r") as archive:
            archive.extractall(folder, filter="data")
        held = distributed.FileSystemReader(folder).read_metadata().state_dict_metadata
        found: dict[str, Any] = {_of_rank(_STRUCTURE): ""}
        distributed.load(found, checkpoint_id=folder, no_dist=not _count_ranks())
        structure = found[_of_rank(_STRUCTURE)]
        divided, mesh = dict(_divided_in(json.loads(structure))), _find_device_mesh(module)
        states: dict[str, Any] = {}
        for name, one in held.items():
            if name in divided:
                states[name] = _allocate_dtensor(one.size, one.properties.dtype, mesh, divided[name])
            elif name.startswith(_of_rank("")) and name != _of_rank(_STRUCTURE):
                states[name] = torch.empty(one.size, dtype=one.properties.dtype)
        distributed.load(states, checkpoint_id=folder, no_dist=not _count_ranks())
    _load_states(module, optimizer, structure, {name.removeprefix(_of_rank("")): x for name, x in states.items()})


def _of_rank(name: str, value: Any = None) -> str:
    """Return the name in a checkpoint of a value that is this rank's own, or that all ranks divide."""
    return (
        name if hasattr(value, "to_local") else f"rank {torch.distributed.get_rank() if _count_ranks() else 0}.{name}"
    )


def _divided_in(structure: Any) -> Iterator[tuple[str, list[int | None]]]:
    """Yield the path of each tensor that ranks divide, and along which dimensions."""
    if isinstance(structure, dict) and "divided" in structure:
        path, _, _, held = structure["divided"]
        yield path, held
    elif isinstance(structure, (dict, list)):
        for one in structure.values() if isinstance(structure, dict) else structure:
            yield from _divided_in(one)


def _allocate_dtensor(size: Sequence[int], dtype: torch.dtype, mesh: Any, held: Sequence[int | None]) -> Any:
    from torch.distributed.tensor import empty

    return empty(*size, dtype=dtype, device_mesh=mesh, placements=_make_placements(held))


def _count_ranks() -> int:
    """Return how many ranks write one checkpoint together; 0 for a process by itself."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0


@contextmanager
def _shared_folder() -> Iterator[str]:
    """Hand all ranks one temporary folder, which exists until all of them have left the context."""
    with TemporaryDirectory() as own:
        folders = [own]
        if _count_ranks():
            torch.distributed.broadcast_object_list(folders)
        yield folders[0]
        if _count_ranks():
            torch.distributed.barrier()


@contextmanager
def _distributed_checkpoint() -> Iterator[Any]:
    """Hand out ``torch.distributed.checkpoint``, without its warning that there may be no other processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("torch.distributed.checkpoint")


WAYS: dict[str, Way] = {
    "resume": Way(save, load),
    "resume-dcp": Way(_save_distributed, _load_distributed),
    "resume-safetensors": Way(_save_safetensors, _load_safetensors),
}
"""Map each switch to its way of saving and loading."""
