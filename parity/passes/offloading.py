"""Train a candidate whose saved tensors are offloaded to the host's memory, and see what is saved and read back."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from parity.case.training import Model
from parity.trace.whose import is_of_te

# TE's way, if a pair has none of its own: each of TE's modules that lies in none of TE's is a layer by itself.


def by_te(te: ModuleType, journal: Journal, module: nn.Module) -> None:
    """Let TE offload what each of its modules in a candidate saves for the backward pass."""
    for layer in _layers(module):
        layer.forward = partial(_offloaded, te, journal, layer.forward)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    if is_of_te(type(module)):
        yield module
        return
    for one in module.children():
        yield from _layers(one)


def _offloaded(te: ModuleType, journal: Journal, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a module returns, whose saved tensors TE offloads.

    TE's context counts the layers that enter it, and leaves the last one alone (``get_cpu_offload_context`` in
    ``pytorch/cpu_offload.py`` of TE 2.20.2). So each call has a context of its own, in which an empty layer is the
    last.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a single layer leaves nothing to overlap with
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


# What TE's offloading does with each tensor. Its contexts are found where modules are called, whoever has made them.


@dataclass(frozen=True, eq=False)
class _Saved:
    """Hold a tensor's place instead of the tensor, as what TE does itself, with whose it is."""

    layer: int
    place: Any


@dataclass
class Journal:
    """Record what TE's offloading has done since the candidate began to be trained with it.

    Attributes:
        offloaded: how many tensors were taken to be copied to the host.
        misread: the layers whose saved tensors a backward pass sought, and where it read; as the context counts them.
    """

    offloaded: int = 0
    misread: list[tuple[int, int]] = field(default_factory=list)

    def watch(self, te: ModuleType, module: nn.Module) -> None:
        """Follow the contexts in which parts of the module are called from now on."""
        for one in module.modules():
            one.register_forward_pre_hook(lambda *_: self.follow(te))

    def follow(self, te: ModuleType) -> None:
        """Follow the context that is entered, if one is."""
        own = sys.modules.get(f"{te.__name__}.cpu_offload")
        entered = getattr(own, "OFFLOAD_SYNCHRONIZER", None)
        for number, layer in getattr(entered, "layer_states", {}).items():
            if "push_tensor" not in vars(layer):
                self._follow(number, layer)

    def _follow(self, number: int, layer: Any) -> None:
        kind, own = type(layer), weakref.ref(layer)
        held: dict[Any, _Saved] = {}  # what this layer's memory holds now

        def push(x: Any) -> _Saved:
            saved = _Saved(number, kind.push_tensor(own(), x))
            if isinstance(saved.place, int):
                self.offloaded += 1
                held[saved.place] = saved
            return saved

        def pop(saved: Any) -> Any:
            if not isinstance(saved, _Saved):  # of a layer that is not to be offloaded
                return kind.pop_tensor(own(), saved)
            if isinstance(saved.place, int) and held.get(saved.place) is not saved:
                self.misread.append((saved.layer, number))
            return kind.pop_tensor(own(), saved.place)

        def is_offloaded(x: Any) -> bool:
            return bool(kind._check_if_offload(own(), x)) or _is_small_and_may_be(x)

        layer.push_tensor, layer.pop_tensor, layer._check_if_offload = push, pop, is_offloaded


# TE offloads no tensor of less than 256k elements (``_check_if_offload`` there). A pair is smaller as a rule, and what
# offloading gets wrong does not depend on size.
_SMALL = 256 * 1024


def _is_small_and_may_be(x: Any) -> bool:
    """Return whether TE would offload a tensor if it were larger."""
    is_kept = isinstance(x, nn.Parameter) or getattr(x, "_TE_do_not_offload", False)
    of_device = "cuda" if torch.cuda.is_initialized() else "cpu"
    return not is_kept and 0 < x.numel() < _SMALL and x.is_contiguous() and x.device.type == of_device


# What the same training without offloading saves, and what it would compute if it read something else back.

Exchange = Callable[[int, Tensor], Tensor]
"""Return what is read back of a tensor that was saved; called with its number in the step, from 0."""


@contextmanager
def reading_back(model: Model, exchange: Exchange, seen: list[Tensor] | None = None) -> Iterator[None]:
    """Within the context, exchange what calls of the model save for their backward passes.

    Args:
        seen: gets what is saved, each as it is then.
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
