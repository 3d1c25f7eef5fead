"""Switch dropout off in a module and on again, and record from which random numbers it drops what."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from parity.trace.kernels import EXTENSION, digest_of

# TE's kernels that drop, and PyTorch's functions besides those with dropout in their names.
_KERNELS = ("fused_attn_fwd", "dropout_fwd")
_FUNCTIONS = (F.scaled_dot_product_attention,)
_OUTSIDE = "the module"


@dataclass(frozen=True)
class Switched:
    """A probability of dropout that was set to 0.

    Attributes:
        name: of the module and its attribute.
        module: whose it is.
        attribute: the attribute.
        value: what it was.
    """

    name: str
    module: nn.Module
    attribute: str
    value: float

    def restore(self) -> None:
        """Switch it on again."""
        setattr(self.module, self.attribute, self.value)


def switched_off(module: nn.Module) -> list[Switched]:
    """Set every probability of dropout to 0, and return those that were not."""
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
        function: PyTorch's, or TE's kernel.
        module: in whose forward pass it was called.
        given: a digest of the tensors from which it dropped.
        state: a digest of the state of the generator from which it drew.
    """

    function: str
    module: str
    given: str
    state: str


@dataclass
class Drops:
    """The calls that dropped something, in order."""

    made: list[Drop] = field(default_factory=list)
    _modules: list[str] = field(default_factory=lambda: [_OUTSIDE])

    def noted(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what a function returns, and note the call if it has drawn from PyTorch's generator."""
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
    """Within the context, record what the module drops by PyTorch's functions of dropout, and by TE's kernels."""
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
            setattr(extension, name, _noted(drops, name, kernel))
        with _Mode(drops):
            yield drops
    finally:
        for name, kernel in kernels.items():
            setattr(extension, name, kernel)
        for hook in hooks:
            hook.remove()


def _noted(drops: Drops, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
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
