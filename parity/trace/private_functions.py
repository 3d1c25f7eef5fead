"""Temporarily replace functions of PyTorch: private ones whose work no mode sees, and two that run CPU kernels.

If PyTorch renames one, this raises an error, because a pass in which nothing was replaced would look like any other.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from parity.user_error import UserError

# The functions of PyTorch that a comparison temporarily replaces.


def _read_torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class PrivateFunction:
    """A function that PyTorch looks up in a module each time it calls it.

    Attributes:
        module: the module where it is looked up.
        name: its name there.
        serves: the public function that calls it.
        since: the first version of PyTorch that has the function, major and minor.
    """

    module: str
    name: str
    serves: str
    since: tuple[int, int]

    def find(self) -> Callable[..., Any] | None:
        """Return the function that the name refers to now, or None if PyTorch is older than the function.

        Raises:
            UserError: if the installed PyTorch should have the function, but does not.
        """
        found = getattr(importlib.import_module(self.module), self.name, None)
        if found is None and _read_torch_version() >= self.since:
            raise UserError(
                f"PyTorch {torch.__version__} has no {self.module}.{self.name}, through which parity follows "
                f"{self.serves}; install another version of PyTorch, or a newer one of parity"
            )
        return found


_IMPL = (
    "_impl" if _read_torch_version() >= (2, 14) else ""
)  # since then, the old name is for callers outside of PyTorch
CHECKPOINT = PrivateFunction(
    "torch.utils.checkpoint",
    f"_checkpoint_without_reentrant_generator{_IMPL}",
    "torch.utils.checkpoint.checkpoint",
    (2, 1),
)
CLIP = PrivateFunction("torch.nn.utils.clip_grad", "_clip_grads_with_norm_", "torch.nn.utils.clip_grad_norm_", (2, 6))
LAYER_NORM = PrivateFunction("torch", "layer_norm", "torch.nn.functional.layer_norm", (2, 0))
EMBEDDING = PrivateFunction("torch", "embedding", "torch.nn.functional.embedding", (2, 0))
EXCHANGED = CHECKPOINT, CLIP, LAYER_NORM, EMBEDDING
"""All functions that a comparison replaces."""

StandIn = Callable[..., Any]
"""A replacement, which is called with the function that it replaces and that function's arguments."""


class _StandIns(threading.local):
    """This thread's stand-ins by function, the outermost context's first."""

    def __init__(self) -> None:
        self.of: dict[PrivateFunction, list[StandIn]] = {}


_HERE = _StandIns()
_LOCK = threading.Lock()
_ORIGINALS: dict[PrivateFunction, tuple[Callable[..., Any], int]] = {}  # with the count of open contexts in all threads


@contextmanager
def exchanged(private: PrivateFunction, stand_in: StandIn) -> Iterator[None]:
    """Make PyTorch call ``stand_in`` instead of the function within the context, only in this thread.

    Contexts may be nested: an inner stand-in gets the outer one as the function that it replaces. The module's own
    function is restored when the last context of all threads is left.

    Raises:
        UserError: as for ``PrivateFunction.find``.
    """
    if not _install_dispatcher(private):
        yield
        return
    here = _HERE.of.setdefault(private, [])
    here.append(stand_in)
    try:
        yield
    finally:
        here.pop()
        _remove_dispatcher(private)


def _install_dispatcher(private: PrivateFunction) -> bool:
    """Install the dispatcher to stand-ins, and return whether there is a function to replace."""
    with _LOCK:
        if private in _ORIGINALS:
            original, contexts = _ORIGINALS[private]
            _ORIGINALS[private] = original, contexts + 1
            return True
        found = private.find()
        if found is None:
            return False
        _ORIGINALS[private] = found, 1
        setattr(importlib.import_module(private.module), private.name, _make_dispatcher(private, found))
        return True


def _make_dispatcher(private: PrivateFunction, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)  # torch.compile asks for a function's name
    def exchangeable(*args: Any, **kwargs: Any) -> Any:
        return _call_stand_ins(private, original, *args, **kwargs)

    return exchangeable


def _remove_dispatcher(private: PrivateFunction) -> None:
    with _LOCK:
        original, contexts = _ORIGINALS.pop(private)
        if contexts > 1:
            _ORIGINALS[private] = original, contexts - 1
        else:
            setattr(importlib.import_module(private.module), private.name, original)


def _call_stand_ins(private: PrivateFunction, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    function = original
    for stand_in in _HERE.of.get(private, ()):
        function = partial(stand_in, function)
    return function(*args, **kwargs)


# Record or change the clipping of gradients by a module that trains in its forward pass.


@contextmanager
def clips_recorded() -> Iterator[list[float]]:
    """Record the largest norm that each clipping within the context allows."""
    norms: list[float] = []

    def see(max_norm: float) -> float:
        norms.append(max_norm)
        return max_norm

    with clipping_at(see):
        yield norms


@contextmanager
def clipping_at(norm: Callable[[float], float]) -> Iterator[None]:
    """Clip gradients at ``norm(max_norm)`` instead of the requested ``max_norm``, within the context."""

    def clip(original: Callable[..., Any], parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        return original(parameters, norm(float(max_norm)), *args, **kwargs)

    with exchanged(CLIP, clip):
        yield
