"""Trees of tensors and modules in another dtype or on another device, and how much memory they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def size_in_bytes(tree: Any) -> int:
    """The memory that the tree's tensors take together."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, what it holds in floating point in another dtype.

    Complex buffers stay as they are: ``module.to(dtype)`` would drop their imaginary part.
    """
    casts: dict[torch.dtype, Callable[[], nn.Module]] = {
        torch.float64: module.double,
        torch.float32: module.float,
        torch.bfloat16: module.bfloat16,
        torch.float16: module.half,
    }
    return casts[dtype]()


def cast(inputs: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """The inputs with floating-point tensors in ``dtype``, and all on the device, if one is given."""
    return tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), inputs)


def on_device(tensors: Any, device: torch.device) -> Any:
    """The same tree with every tensor on the device."""
    return tree_map_only(Tensor, lambda x: x.to(device), tensors)
