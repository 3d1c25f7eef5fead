"""Modules that remember how they were constructed, so that the same one can be had with another argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Construction:
    """A call that built a module."""

    build: Callable[..., nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def construct(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """``build(*args, **kwargs)``, which ``reconstructed`` can vary."""
    module = build(*args, **kwargs)
    module._construction = Construction(build, args, kwargs)  # type: ignore[assignment]
    return module


def reconstructed(module: nn.Module, **changes: Any) -> nn.Module:
    """A new module like one that ``construct`` built, but for some keyword arguments.

    Raises:
        TypeError: if ``construct`` did not build it.
    """
    construction = construction_of(module)
    return construct(construction.build, *construction.args, **{**construction.kwargs, **changes})


def construction_of(module: nn.Module) -> Construction:
    """The call of ``construct`` that built a module.

    Raises:
        TypeError: if there was none.
    """
    construction = getattr(module, "_construction", None)
    if not isinstance(construction, Construction):
        raise TypeError(f"{type(module).__name__} was not built by construct()")
    return construction
