"""Declare right ports whose modules can be constructed differently."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from parity.case.case import Case, Pair

# A host is a right port: a case that is in no registry, whose modules can be constructed differently.


SIZES = ("small", "large")
# The precisions of modules that no recipe quantizes. Under a recipe they would compute the same as in BF16.
UNQUANTIZED = ("fp32", "bf16", "fp16")


def host(
    name: str, small: dict[str, Any], large: dict[str, Any], precisions: tuple[str, ...] | None = None
) -> Callable[[Callable[..., Pair]], Case]:
    """Declare the decorated factory as a host with two sizes, in the order of ``SIZES``."""

    def declare(factory: Callable[..., Pair]) -> Case:
        return Case(name, factory, sizes=(small, large), precisions=precisions, path=Path(inspect.getfile(factory)))

    return declare


@dataclass(frozen=True)
class Construction:
    """A call that built a module."""

    build: Callable[..., nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def construct(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Return ``build(*args, **kwargs)``, which ``reconstructed`` can vary."""
    module = build(*args, **kwargs)
    module._construction = Construction(build, args, kwargs)  # type: ignore[assignment]
    return module


def reconstructed(module: nn.Module, **changes: Any) -> nn.Module:
    """Return a new module like one that ``construct`` built, with some keyword arguments changed.

    Raises:
        TypeError: if ``construct`` did not build it.
    """
    construction = construction_of(module)
    return construct(construction.build, *construction.args, **{**construction.kwargs, **changes})


def construction_of(module: nn.Module) -> Construction:
    """Return the call of ``construct`` that built a module.

    Raises:
        TypeError: if there was none.
    """
    construction = getattr(module, "_construction", None)
    if not isinstance(construction, Construction):
        raise TypeError(f"{type(module).__name__} was not built by construct()")
    return construction
