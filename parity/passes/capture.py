"""Capture a candidate in CUDA graphs, as its pair does it, or by TE's own function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from parity.case.training import Model
from parity.cpu import cuda as emulated_cuda
from parity.te import Kernels
from parity.user_error import UserError, said

Capture = Callable[..., Callable[..., Tensor] | None]


class NotCaptured(Exception):
    """Raised if a capture meets what a graph cannot hold; its cause is what was raised."""


def cuda_of(kernels: Kernels) -> Any:
    """Return ``torch.cuda``, or what stands in for it on the CPU kernels."""
    return torch.cuda if kernels.device.type == "cuda" else emulated_cuda


def captured(
    capture: Capture, model: Model, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Tensor] | None:
    """Return the step that replays graphs; None if calling the module does.

    Raises:
        NotCaptured: if what runs in the capture cannot be captured.
    """
    with _undone_if_it_raises(model.module), _pools_known() as pools:
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        try:
            return capture(model, optimizer, *args, **kwargs)
        except RuntimeError as error:  # CUDA's errors speak of a stream that is capturing, or of its capture
            if "captur" not in said(error):
                raise
            if stream is not None:
                _end(stream, pools)
            raise NotCaptured(said(error)) from _first(error)


def _first(error: BaseException) -> BaseException:
    """Return the error that a capture met first: the one at its end only says that there was one."""
    while isinstance(error.__context__, RuntimeError) and "captur" in said(error.__context__):
        error = error.__context__
    return error


# What PyTorch leaves of a capture that CUDA refuses to end (``CUDAGraph::capture_end`` in ``aten/src/ATen/cuda`` of
# 2.11): its stream is the current one, its pool takes allocations, and its generator counts numbers for it. The next
# draw raises "Offset increment outside graph capture".


@contextmanager
def _pools_known() -> Iterator[list[Any]]:
    """Within the context, give each capture on a GPU a pool that is known here."""
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


def _end(stream: torch.cuda.Stream, pools: list[Any]) -> None:
    """End what a capture has begun, and return to the stream from which it was begun."""
    torch.cuda.set_stream(stream)
    if pools:
        torch._C._cuda_endAllocateToPool(stream.device_index, pools[-1])
    fresh = torch.Generator(stream.device).graphsafe_get_state()
    torch.cuda.default_generators[stream.device_index].graphsafe_set_state(fresh)


@contextmanager
def _undone_if_it_raises(module: nn.Module) -> Iterator[None]:
    """Undo what TE does while it captures, and leaves if the capture raises: to classes' calls, and to Python's
    collection of garbage (``make_graphed_callables`` in ``pytorch/graph.py`` of TE 2.20.2).
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


def by_te(te: ModuleType, model: Model, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Let TE capture the module, called as the pair calls it.

    A graph takes tensors alone, and TE's function captures other arguments' defaults; so they become the module's own
    defaults before.
    """
    module = model.module
    positional, named = _arguments(model, args, kwargs)
    others = [type(one).__name__ for one in positional if not isinstance(one, Tensor)]
    if others:
        raise UserError(
            f"TE's make_graphed_callables takes tensors by position, but the candidate is called with a {others[0]}; "
            "let call_candidate pass it by name, or capture it yourself: parity.Training(graph=...)"
        )
    constants = {name: one for name, one in named.items() if not isinstance(one, Tensor)}
    if constants:
        module.forward = partial(module.forward, **constants)
    tensors = {name: _like(one) for name, one in named.items() if name not in constants}
    te.make_graphed_callables(
        module,
        _like(positional),
        sample_kwargs=tensors,
        allow_unused_input=True,
        enabled=model.recipe is not None,
        recipe=model.recipe,
    )


class _Reached(BaseException):
    """Raised where a module is called, so that it does not run."""


def _arguments(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Return with what the pair calls the module itself."""
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
            "call_candidate calls parts of the candidate and not itself, so TE's make_graphed_callables does not know "
            "what to capture: capture these parts yourself, parity.Training(graph=...)"
        )
    return found[0]


def _like(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), arguments)
