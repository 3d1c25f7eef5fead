"""How a host is declared: a case that no registry knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parity.case.case import Case, Pair

SIZES = ("small", "large")


# Of modules that no recipe quantizes: under one they compute what they compute in BF16.
UNQUANTIZED = ("fp32", "bf16", "fp16")


def host(
    name: str, small: dict[str, Any], large: dict[str, Any], precisions: tuple[str, ...] | None = None
) -> Callable[[Callable[..., Pair]], Case]:
    """Declare the decorated factory as a host with two sizes, in the order of ``SIZES``."""

    def declare(factory: Callable[..., Pair]) -> Case:
        return Case(name, factory, sizes=(small, large), precisions=precisions, path=Path(inspect.getfile(factory)))

    return declare
