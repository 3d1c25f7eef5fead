"""Tensors by the memory that they lie in, which views of one tensor share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def address(x: Tensor) -> int:
    """Of the tensor's memory."""
    return x.untyped_storage().data_ptr()


def addresses(operands: Iterable[Any]) -> set[int]:
    """Of the tensors among the operands."""
    return {address(x) for x in operands if isinstance(x, Tensor)}
