"""Bytes that PyTorch's kernels read and write, which on a GPU is the time of all that are not matrix products.

Counted are the tensors that an operation takes and returns, each once; views move nothing. A fused operation counts as
one, whatever it does inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Traffic:
    """What a function and its backward move.

    Attributes:
        forward: bytes.
        backward: bytes.
        saved: bytes that the forward keeps for the backward.
        operations: names of the forward's operations.
    """

    forward: int
    backward: int
    saved: int
    operations: tuple[str, ...]


def measure(function: Callable[[Tensor], Tensor], argument: Tensor) -> Traffic:
    """Call a function and differentiate it with respect to its argument."""
    leaf = argument.detach().clone().requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != leaf.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with _Counter() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(leaf)
    gradient = torch.ones_like(result)
    with _Counter() as backward:
        torch.autograd.grad(result, leaf, gradient)
    return Traffic(forward.moved, backward.moved, sum(kept.values()), tuple(forward.operations))


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations.append(func.name().removeprefix("aten::"))
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.moved += sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
        return result
