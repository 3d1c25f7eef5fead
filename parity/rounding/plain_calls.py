"""Which of PyTorch's functions a port calls outside of TransformerEngine, in the precision's dtype.

What TE fuses, it computes in FP32 between what it stores. A port's own lines are no such kernel: each function rounds
what it returns, and some round inside. The rounding model is told which they are before a port fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.rounding.biases_by_hand import added_bias
from parity.rounding.phase import NO_BACKWARD
from parity.watching.whose import Owner, module_of, whose

# What calls a port: no line around PyTorch's calls, as of a Sequential, is the port's as well.
_CALLS_PORTS = "parity.execute"
# TE's own lines of PyTorch, each of which rounds as a user's do: a softcap divides, takes a tanh and multiplies.
_UNFUSED_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.backends"

# Copies round nothing by themselves; attention's softmax has a freedom of its own.
_LEFT_OUT = frozenset({"copy_", "clone", "detach", "_softmax", "_safe_softmax"})


@contextmanager
def plain_calls(dtype: torch.dtype) -> Iterator[set[str]]:
    """Within the context, names of ATen functions are added that code of neither TE nor parity calls on activations;
    and those that TE's unfused attention calls.

    Args:
        dtype: of the activations that count.
    """
    recorder = _Recorder(dtype)
    with recorder:
        yield recorder.names


def is_in_place(func: Any) -> bool:
    """Whether an ATen function returns its argument, changed."""
    return any(value.alias_info is not None and value.alias_info.is_write for value in func._schema.returns)


class _Recorder(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        names = {name, *added_bias(name, args)}
        is_new = not names <= self.names and name not in _LEFT_OUT and not func.is_view
        if is_new and self._is_of_activations(func, args) and _is_users(sys._getframe(1)):
            self.names |= names
        return func(*args, **(kwargs or {}))

    def _is_of_activations(self, func: Any, args: Any) -> bool:
        if is_in_place(func) and torch._C._current_graph_task_id() == NO_BACKWARD:  # of weights, by a step of training
            return any(isinstance(x, Tensor) and x.dim() and x.dtype is self._dtype for x in tree_leaves(args[:1]))
        return any(isinstance(x, Tensor) and x.requires_grad and x.dtype is self._dtype for x in tree_leaves(args))


def _is_users(frame: FrameType | None) -> bool:
    """Return whether the nearest code around PyTorch's is neither TE's nor ours, or is as a user's."""
    while frame is not None and (owner := whose(frame)) in (Owner.TORCH, Owner.PYTHON):
        frame = frame.f_back
    if frame is None:
        return False
    return owner is Owner.USER or module_of(frame) in (_CALLS_PORTS, _UNFUSED_ATTENTION)
