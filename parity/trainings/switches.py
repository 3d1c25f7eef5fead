"""Run a candidate as a switch of its training asks: captured in CUDA graphs, compiled by ``torch.compile``, or with
activations that are offloaded to the host.
"""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from parity.case.training import Model
from parity.shown import said
from parity.te import emulation
from parity.trace.whose import is_of_te
from parity.user_error import UserError

if TYPE_CHECKING:
    from parity.te import Kernels

Capture = Callable[..., Callable[..., Tensor] | None]


class NotCaptured(Exception):
    """Raised if something cannot be captured in a graph; its cause is the original error."""


def cuda_of(kernels: Kernels) -> Any:
    """Return ``torch.cuda``, or its emulation if the CPU kernels are used."""
    return torch.cuda if kernels.device.type == "cuda" else emulation.cuda


def captured(
    capture: Capture, model: Model, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Tensor] | None:
    """Capture the candidate, and return the step that replays graphs, or None if calling the module replays them.

    Raises:
        NotCaptured: if something that runs in the capture cannot be captured.
    """
    with _undone_if_it_raises(model.module), _pools_known() as pools:
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        try:
            return capture(model, optimizer, *args, **kwargs)
        except RuntimeError as error:  # CUDA's errors mention a capturing stream, or the capture
            if "captur" not in said(error):
                raise
            if stream is not None:
                _end_capture(stream, pools)
            raise NotCaptured(said(error)) from _find_first_error(error)


def _find_first_error(error: BaseException) -> BaseException:
    """Return the first error of a capture, because the last one only says that there was an error."""
    while isinstance(error.__context__, RuntimeError) and "captur" in said(error.__context__):
        error = error.__context__
    return error


# Clean up after a capture that CUDA refuses to end. PyTorch then leaves the capture's stream as the current one, its
# pool takes allocations, and the generator counts numbers for it (``CUDAGraph::capture_end`` in ``aten/src/ATen/cuda``
# of 2.11), so that the next draw raises "Offset increment outside graph capture".


@contextmanager
def _pools_known() -> Iterator[list[Any]]:
    """Give each capture on a GPU a known memory pool within the context, and hand out the list of pools."""
    kind: Any = torch.cuda.CUDAGraph
    begins = vars(kind).get("capture_begin")
    pools: list[Any] = []
    if begins is None or not torch.cuda.is_initialized():
        yield pools
        return

    def begin(self: Any, pool: Any = None, *args: Any, **kwargs: Any) -> Any:
        pools.append(pool or torch.cuda.graph_pool_handle())
        return begins(self, pools[-1], *args, **kwargs)

    kind.capture_begin = begin
    try:
        yield pools
    finally:
        kind.capture_begin = begins


def _end_capture(stream: torch.cuda.Stream, pools: list[Any]) -> None:
    """Undo what the start of a capture changed, and return to the stream that was current before it."""
    torch.cuda.set_stream(stream)
    if pools:
        torch._C._cuda_endAllocateToPool(stream.device_index, pools[-1])
    fresh = torch.Generator(stream.device).graphsafe_get_state()
    torch.cuda.default_generators[stream.device_index].graphsafe_set_state(fresh)


@contextmanager
def _undone_if_it_raises(module: nn.Module) -> Iterator[None]:
    """Undo changes that TE leaves behind if a capture raises, in classes' calls and in Python's garbage collection.

    ``make_graphed_callables`` in ``pytorch/graph.py`` of TE 2.20.2 makes them.
    """
    calls = {kind: vars(kind).get("__call__") for kind in {type(one) for one in module.modules()}}
    collects = gc.isenabled()
    try:
        yield
    finally:
        (gc.enable if collects else gc.disable)()
        for kind, call in calls.items():
            if call is not None:
                kind.__call__ = call  # type: ignore[method-assign]
            elif "__call__" in vars(kind):
                del kind.__call__


def captured_by_te(te: ModuleType, model: Model, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Make TE capture the module, called as the pair calls it.

    A graph takes only tensors, and TE's function captures the defaults of all other arguments. So the pair's values
    become the module's defaults first.
    """
    module = model.module
    positional, named = _find_module_arguments(model, args, kwargs)
    others = [type(one).__name__ for one in positional if not isinstance(one, Tensor)]
    if others:
        raise UserError(
            "TE's make_graphed_callables takes only tensors as positional arguments, but the candidate is called with "
            f"a {others[0]}; pass it by name in call_candidate, or capture the candidate yourself: "
            "parity.Training(graph=...)"
        )
    constants = {name: one for name, one in named.items() if not isinstance(one, Tensor)}
    if constants:
        module.forward = partial(module.forward, **constants)
    tensors = {name: _clone_arguments(one) for name, one in named.items() if name not in constants}
    te.make_graphed_callables(
        module,
        _clone_arguments(positional),
        sample_kwargs=tensors,
        allow_unused_input=True,
        enabled=model.recipe is not None,
        recipe=model.recipe,
    )


class _Reached(BaseException):
    """Raised when a module is called, to keep it from running."""


def _find_module_arguments(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments with which the pair calls the module itself."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def reached(module: nn.Module, *called_with: Any) -> None:
        found.append(called_with)
        raise _Reached

    hook = model.module.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        model.without_recipe()(*args, **kwargs)
    except _Reached:
        pass
    finally:
        hook.remove()
    if not found:
        raise UserError(
            "call_candidate calls submodules of the candidate instead of the candidate itself, so TE's "
            "make_graphed_callables does not know what to capture: capture these submodules yourself, with "
            "parity.Training(graph=...)"
        )
    return found[0]


def _clone_arguments(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), arguments)


# Compile a candidate by ``torch.compile``, and count the compiled graphs.


Compile = Callable[[nn.Module], object]

# PyTorch's backends for the stages of ``torch.compile``: each adds a stage to those before.
TRACED, DIFFERENTIATED, GENERATED = "eager", "aot_eager", "inductor"


def backends(kernels: Kernels) -> tuple[str, ...]:
    """Return the backends to try if a compiled candidate is wrong; the last is the one that it is compiled by.

    PyTorch generates other code for a CPU than for a GPU, and a C++ compiler needs minutes for it. So no code is
    generated if the CPU kernels are used.
    """
    return (TRACED, DIFFERENTIATED, GENERATED) if kernels.device.type == "cuda" else (TRACED, DIFFERENTIATED)


def compiled_by_torch(backend: str) -> Compile:
    """Return a function that compiles the calls of a module."""
    return partial(nn.Module.compile, backend=backend, dynamic=False)


@contextmanager
def compiled_anew() -> Iterator[Callable[[], int]]:
    """Forget all compiled code before and after the context, and hand out a function that counts compiled graphs.

    PyTorch replaces methods of ``nn.Module`` when it first compiles in a process. This makes it do so at once.
    """
    importlib.import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()
    stats = importlib.import_module("torch._dynamo.utils").counters["stats"]
    torch.compiler.reset()
    before = stats["unique_graphs"]
    try:
        yield lambda: int(stats["unique_graphs"] - before)
    finally:
        torch.compiler.reset()


# Offload a candidate's saved tensors to the host's memory, and record what is saved and read back.


# Offload as TE does, unless a pair has its own way. Each outermost module of TE counts as a layer.


def offloaded_by_te(te: ModuleType, journal: Journal, module: nn.Module) -> None:
    """Make TE offload what each of its modules in a candidate saves for the backward pass."""
    for layer in _find_te_layers(module):
        layer.forward = partial(_call_with_offload, te, journal, layer.forward)


def _find_te_layers(module: nn.Module) -> Iterator[nn.Module]:
    if is_of_te(type(module)):
        yield module
        return
    for one in module.children():
        yield from _find_te_layers(one)


def _call_with_offload(te: ModuleType, journal: Journal, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module while TE offloads its saved tensors, and return what it returns.

    TE's context counts the layers that enter it, and does not offload the last one (``get_cpu_offload_context`` in
    ``pytorch/cpu_offload.py`` of TE 2.20.2). So each call has its own context, in which an empty layer is the last.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TE warns that a single layer leaves nothing to overlap with
        context, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
    with context:
        journal.follow(te)
        returned = forward(*args, **kwargs)
    leaves, spec = tree_flatten(returned)
    for i, one in enumerate(leaves):
        if isinstance(one, Tensor) and one.requires_grad:
            layers_own = synchronize(one)
            with context:
                behind = layers_own.view_as(layers_own)
            leaves[i] = synchronize(behind)
            return tree_unflatten(leaves, spec)
    return returned


# Record what TE's offloading does with each tensor. Calls of modules show its contexts, whoever made them.


@dataclass(frozen=True, eq=False)
class _Saved:
    """A saved tensor's place, which is what TE itself saves, with the number of its layer."""

    layer: int
    place: Any


@dataclass
class Journal:
    """A record of what TE's offloading has done since it was switched on for the candidate.

    Attributes:
        offloaded: how many tensors TE accepted for copying to the host.
        misread: for each wrong read of a backward pass, the layer whose tensor it needed and the layer from which it
            read, as the context numbers them.
    """

    offloaded: int = 0
    misread: list[tuple[int, int]] = field(default_factory=list)

    def watch(self, te: ModuleType, module: nn.Module) -> None:
        """Record the contexts in which parts of the module are called from now on."""
        for one in module.modules():
            one.register_forward_pre_hook(lambda *_: self.follow(te))

    def follow(self, te: ModuleType) -> None:
        """Record what the current offloading context does, if there is one."""
        own = sys.modules.get(f"{te.__name__}.cpu_offload")
        entered = getattr(own, "OFFLOAD_SYNCHRONIZER", None)
        for number, layer in getattr(entered, "layer_states", {}).items():
            if "push_tensor" not in vars(layer):
                self._follow_layer(number, layer)

    def _follow_layer(self, number: int, layer: Any) -> None:
        kind, own = type(layer), weakref.ref(layer)
        held: dict[Any, _Saved] = {}  # what this layer's memory holds now

        def push(x: Any) -> _Saved:
            saved = _Saved(number, kind.push_tensor(own(), x))
            if isinstance(saved.place, int):
                self.offloaded += 1
                held[saved.place] = saved
            return saved

        def pop(saved: Any) -> Any:
            if not isinstance(saved, _Saved):  # from a layer that is not offloaded
                return kind.pop_tensor(own(), saved)
            if isinstance(saved.place, int) and held.get(saved.place) is not saved:
                self.misread.append((saved.layer, number))
            return kind.pop_tensor(own(), saved.place)

        def is_offloaded(x: Any) -> bool:
            return bool(kind._check_if_offload(own(), x)) or _is_small_and_may_be(x)

        layer.push_tensor, layer.pop_tensor, layer._check_if_offload = push, pop, is_offloaded


# TE offloads no tensor of fewer than 256k elements (``_check_if_offload`` there). Pairs are usually smaller, and the
# mistakes of offloading do not depend on size.
_LEAST_OFFLOADED = 256 * 1024


def _is_small_and_may_be(x: Any) -> bool:
    """Return whether TE would offload a tensor if it were larger."""
    is_kept = isinstance(x, nn.Parameter) or getattr(x, "_TE_do_not_offload", False)
    of_device = "cuda" if torch.cuda.is_initialized() else "cpu"
    return not is_kept and 0 < x.numel() < _LEAST_OFFLOADED and x.is_contiguous() and x.device.type == of_device


# Show what the same training saves without offloading, and what it would compute if it read something else back.

Exchange = Callable[[int, Tensor], Tensor]
"""Returns what is read back for a saved tensor, given its number in the step, from 0, and the tensor."""


@contextmanager
def reading_back(model: Model, exchange: Exchange, seen: list[Tensor] | None = None) -> Iterator[None]:
    """Exchange what calls of the model save for their backward passes, within the context.

    Args:
        seen: receives a copy of each tensor when it is saved.
    """
    count = iter(range(sys.maxsize))

    def pack(x: Tensor) -> tuple[int, Tensor]:
        if seen is not None:
            seen.append(x.detach().clone())
        return next(count), x if isinstance(x, nn.Parameter) else x.detach()

    with ExitStack() as stack:
        hooks = saved_tensors_hooks(pack, lambda saved: exchange(*saved))
        stack.enter_context(model.within(lambda: hooks))
        yield
