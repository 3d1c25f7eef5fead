"""Record what TransformerEngine's kernels and a candidate's modules return in a pass, as digests in order.

Two traces of the same pass show where the passes first differ: in which kernel or, if none of TE's kernels differs, in
which module.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parity.trace.whose import is_of_te

EXTENSION = "transformer_engine_torch"
_OUTPUT, _GRADIENT = _BETWEEN = ("output", "gradient")


@dataclass(frozen=True)
class Event:
    """Something that was computed.

    Attributes:
        what: the kernel's name, ``output`` of a module, or the ``gradient`` that reached one.
        place: the module in whose forward or backward pass it was, and which of the two.
        digest: a digest of its values.
    """

    what: str
    place: str
    digest: str


class Trace:
    """The events of one pass, and where the pass is."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._forward: list[str] = []
        self._backward = ""
        self._seen: set[int] = set()
        self._alive: list[Tensor] = []  # so that no id is given out again

    def watch(self, module: nn.Module) -> None:
        """Note the outputs of the module and of its parts, and the gradients that reach them."""
        for name, part in module.named_modules():
            label = f"{name or 'the module'} ({type(part).__name__})"
            part.register_forward_pre_hook(functools.partial(self._enter, label))
            part.register_forward_hook(functools.partial(self._leave, label))

    @contextmanager
    def of_kernels(self) -> Iterator[None]:
        """Within the context, note calls of TE's compiled functions, or of those that stand for them."""
        extension = sys.modules.get(EXTENSION)
        kernels = {
            name: function
            for name, function in (vars(extension) if extension else {}).items()
            if isinstance(function, (BuiltinFunctionType, FunctionType)) and not name.startswith("_")
        }
        try:
            for name, function in kernels.items():
                setattr(extension, name, self._noted(name, function))
            yield
        finally:
            for name, function in kernels.items():
                setattr(extension, name, function)

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if any(True for _ in _tensors(result)):
                self._note(name, result)
            return result

        return noted

    def _note(self, what: str, values: Any) -> None:
        backward = f"the backward pass of {self._backward}" if self._backward else "no module"
        place = f"the forward pass of {self._forward[-1]}" if self._forward else backward
        self.events.append(Event(what, place, digest_of(values)))

    def _enter(self, label: str, module: nn.Module, args: Any) -> None:
        self._forward.append(label)

    def _leave(self, label: str, module: nn.Module, args: Any, output: Any) -> None:
        self._note(_OUTPUT, output)
        self._forward.pop()
        for x in tree_leaves(output):
            # An output of a part that is also the whole's belongs to the part.
            if isinstance(x, Tensor) and x.requires_grad and id(x) not in self._seen:
                self._seen.add(id(x))
                self._alive.append(x)
                x.register_hook(functools.partial(self._reached, label))

    def _reached(self, label: str, gradient: Tensor) -> None:
        """Note that the backward pass led to the gradient of this module's output; what follows is in the module."""
        self._note(_GRADIENT, gradient)
        self._backward = label


def first_difference(one: Trace, other: Trace) -> str:
    """Say where two traces of a pass first differ; return an empty text if they do not."""
    for a, b in zip(one.events, other.events, strict=False):
        if (a.what, a.place) != (b.what, b.place):
            return f"{a.what} in {a.place}, but {b.what} in {b.place} the second time"
        if a.digest != b.digest:
            if a.what in _BETWEEN:
                return f"{a.place}, in none of TransformerEngine's kernels"
            return f"the kernel {a.what} in {a.place}"
    if len(one.events) != len(other.events):
        return f"the number of kernels and modules that ran, {len(one.events)} and {len(other.events)}"
    return ""


def digest_of(values: Any) -> str:
    """Return a digest of the values of all tensors in a tree."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in _tensors(values):
        digest.update(as_bytes(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()


def as_bytes(x: Tensor) -> Tensor:
    """Return the tensor's bytes: uint8, one dimension."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield plain tensors, and those that quantized tensors consist of."""
    for leaf in tree_leaves(values):
        if type(leaf) in (Tensor, nn.Parameter):
            yield leaf
        elif hasattr(leaf, "__dict__") and is_of_te(type(leaf)):
            yield from (part for part in vars(leaf).values() if type(part) is Tensor)
