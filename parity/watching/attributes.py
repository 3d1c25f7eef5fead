"""What modules remember from one call to the next besides parameters and buffers: attributes that a call changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

Attributes = dict[str, tuple[Any, int]]


def attributes_of(module: nn.Module) -> Attributes:
    """What each module's own attributes hold now, by ``name of the module.attribute``."""
    return {
        f"{name}.{key}".removeprefix("."): (value, _mark(value))
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in _OF_EVERY_MODULE
    }


def changed_attributes(module: nn.Module, before: Attributes) -> list[str]:
    """Names of the attributes that are new, or hold something else than before.

    Lists, dicts and sets count as changed where their length is another, tensors where they were written to.
    """
    return [
        name
        for name, (value, mark) in attributes_of(module).items()
        if name not in before or before[name][0] is not value or before[name][1] != mark
    ]


def _mark(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return len(value) if isinstance(value, (list, Mapping, set)) else 0
