"""Record digests of what TransformerEngine's kernels and a candidate's modules return in a pass, and of what dropout
drops.

Two traces of the same pass show where it is not reproducible: the first kernel that differs or, if none of TE's kernels
does, the first module.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from parity.trace.whose import is_of_te

EXTENSION = "transformer_engine_torch"
_OUTPUT, _GRADIENT = _BETWEEN = ("output", "gradient")


@dataclass(frozen=True)
class Event:
    """A result that was computed in a pass.

    Attributes:
        what: a kernel's name, ``output`` for a module's output, or ``gradient`` for a gradient that reached a module.
        place: the module in whose forward or backward pass it was computed, and which of the two.
        digest: a digest of its values.
    """

    what: str
    place: str
    digest: str


class Trace:
    """The events of one pass, and the module that is running."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._forward: list[str] = []
        self._backward = ""
        self._seen: set[int] = set()
        self._alive: list[Tensor] = []  # kept, so that no id is reused

    def watch(self, module: nn.Module) -> None:
        """Record the outputs of the module and its parts from now on, and the gradients that reach them."""
        for name, part in module.named_modules():
            label = f"{name or 'the module'} ({type(part).__name__})"
            part.register_forward_pre_hook(functools.partial(self._enter_module, label))
            part.register_forward_hook(functools.partial(self._leave_module, label))

    @contextmanager
    def of_kernels(self) -> Iterator[None]:
        """Record calls of TE's compiled functions, or of their CPU replacements, within the context."""
        extension = sys.modules.get(EXTENSION)
        kernels = {
            name: function
            for name, function in (vars(extension) if extension else {}).items()
            if isinstance(function, (BuiltinFunctionType, FunctionType)) and not name.startswith("_")
        }
        try:
            for name, function in kernels.items():
                setattr(extension, name, self._wrap_function(name, function))
            yield
        finally:
            for name, function in kernels.items():
                setattr(extension, name, function)

    def _wrap_function(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if any(True for _ in _find_plain_tensors(result)):
                self._add_event(name, result)
            return result

        return noted

    def _add_event(self, what: str, values: Any) -> None:
        backward = f"the backward pass of {self._backward}" if self._backward else "no module"
        place = f"the forward pass of {self._forward[-1]}" if self._forward else backward
        self.events.append(Event(what, place, digest_of(values)))

    def _enter_module(self, label: str, module: nn.Module, args: Any) -> None:
        self._forward.append(label)

    def _leave_module(self, label: str, module: nn.Module, args: Any, output: Any) -> None:
        self._add_event(_OUTPUT, output)
        self._forward.pop()
        for x in tree_leaves(output):
            # An output of both a part and the whole belongs to the part.
            if isinstance(x, Tensor) and x.requires_grad and id(x) not in self._seen:
                self._seen.add(id(x))
                self._alive.append(x)
                x.register_hook(functools.partial(self._enter_backward, label))

    def _enter_backward(self, label: str, gradient: Tensor) -> None:
        """Note that the backward pass has reached this module's output, and runs in the module from now on."""
        self._add_event(_GRADIENT, gradient)
        self._backward = label


def first_difference(one: Trace, other: Trace) -> str:
    """Return a description of the place where two traces of a pass first differ; empty if they do not."""
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
    for tensor in _find_plain_tensors(values):
        digest.update(as_bytes(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()


def as_bytes(x: Tensor) -> Tensor:
    """Return the tensor's bytes as a vector of uint8."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _find_plain_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in a tree, including those that quantized tensors consist of."""
    for leaf in tree_leaves(values):
        if type(leaf) in (Tensor, nn.Parameter):
            yield leaf
        elif hasattr(leaf, "__dict__") and is_of_te(type(leaf)):
            yield from (part for part in vars(leaf).values() if type(part) is Tensor)


# Switch dropout off in a module and on again, and record what it drops, and from which random numbers.


# TE's kernels that have dropout, and PyTorch's functions that have it without naming it.
_KERNELS = ("fused_attn_fwd", "dropout_fwd")
_FUNCTIONS = (F.scaled_dot_product_attention,)
_OUTSIDE = "the module"


@dataclass(frozen=True)
class Switched:
    """A dropout probability that was set to 0.

    Attributes:
        name: the name of the module and its attribute.
        module: the module.
        attribute: the attribute.
        value: the original probability.
    """

    name: str
    module: nn.Module
    attribute: str
    value: float

    def restore(self) -> None:
        """Switch this dropout on again."""
        setattr(self.module, self.attribute, self.value)


def switched_off(module: nn.Module) -> list[Switched]:
    """Set every dropout probability in a module to 0, and return those that were not 0."""
    found = []
    for name, part in module.named_modules():
        for attribute, value in list(vars(part).items()):
            is_probability = "drop" in attribute or (attribute == "p" and "Drop" in type(part).__name__)
            if is_probability and isinstance(value, float) and value > 0.0:
                setattr(part, attribute, 0.0)
                found.append(Switched(f"{name}.{attribute}".lstrip("."), part, attribute, value))
    return found


@dataclass(frozen=True)
class Drop:
    """One call that dropped elements at random.

    Attributes:
        function: the name of PyTorch's function or TE's kernel.
        module: the module in whose forward pass it was called.
        given: a digest of the tensors from which it dropped elements.
        state: a digest of the state of the generator from which it drew.
    """

    function: str
    module: str
    given: str
    state: str


@dataclass
class Drops:
    """The calls that dropped elements, in order."""

    made: list[Drop] = field(default_factory=list)
    _modules: list[str] = field(default_factory=lambda: [_OUTSIDE])

    def noted(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function, and note the call if it draws from PyTorch's generator."""
        before = torch.get_rng_state()
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
        digest = digest_of(given)
        returned = function(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            state = hashlib.blake2b(before.numpy().tobytes(), digest_size=16).hexdigest()
            self.made.append(Drop(name, self._modules[-1], digest, state))
        return returned

    def enter(self, name: str, *_: Any) -> None:
        self._modules.append(name)

    def leave(self, *_: Any) -> None:
        self._modules.pop()


@contextmanager
def recorded(module: nn.Module) -> Iterator[Drops]:
    """Record what the module drops by PyTorch's dropout functions and by TE's kernels, within the context."""
    drops = Drops()
    extension = sys.modules.get(EXTENSION)
    kernels = {name: getattr(extension, name) for name in _KERNELS if hasattr(extension, name)}
    hooks = []
    for name, part in module.named_modules():
        label = f"{name or _OUTSIDE} ({type(part).__name__})"
        hooks.append(part.register_forward_pre_hook(functools.partial(drops.enter, label)))
        hooks.append(part.register_forward_hook(drops.leave, always_call=True))
    try:
        for name, kernel in kernels.items():
            setattr(extension, name, _wrap_kernel(drops, name, kernel))
        with _Mode(drops):
            yield drops
    finally:
        for name, kernel in kernels.items():
            setattr(extension, name, kernel)
        for hook in hooks:
            hook.remove()


def _wrap_kernel(drops: Drops, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def noted(*args: Any, **kwargs: Any) -> Any:
        return drops.noted(name, kernel, args, kwargs)

    return noted


class _Mode(TorchFunctionMode):
    def __init__(self, drops: Drops) -> None:
        super().__init__()
        self._drops = drops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if "dropout" in name or func in _FUNCTIONS:
            return self._drops.noted(name, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


# Find out whether two runs computed the same bytes, without keeping the bytes.


_BYTES = 8  # bytes of a checksum: two different tensors share one once in 2**64 times
_CHUNK = 2**24  # elements that are copied from a GPU at once


def checksum(x: Tensor) -> str:
    """Return a checksum of a tensor's bytes, its dtype and its shape."""
    found = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=_BYTES)
    for part in x.detach().reshape(-1).split(_CHUNK):
        if part.numel():
            found.update(part.contiguous().cpu().view(torch.uint8).numpy())
    return found.hexdigest()
