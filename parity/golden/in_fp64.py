"""Computes a reference in FP64 throughout, also where its code asks for FP32.

``module.double()`` converts parameters and buffers. But a model's author who computes a norm or a softmax "in FP32"
writes ``x.float()`` or ``dtype=torch.float32``, and means: not in half precision. Taken at its word in FP64, that would
round golden to FP32 there, just as the rounding model and the port do: none of them would have an error to judge by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from parity.golden.grouped_products import experts_one_by_one
from parity.golden.long_sequences import attention_in_blocks
from parity.private_functions import CHECKPOINT, exchanged


@contextmanager
def in_fp64() -> Iterator[None]:
    """Within the context, a module in FP64 computes in nothing less, and long attention in blocks."""
    with _calls_in_fp64(), _recomputed_alike():
        yield


@contextmanager
def _calls_in_fp64() -> Iterator[None]:
    with _InFP64(), attention_in_blocks(), experts_one_by_one():
        yield


@contextmanager
def _recomputed_alike() -> Iterator[None]:
    """What ``torch.utils.checkpoint`` computes again in the backward pass is computed alike.

    Autograd computes it under the modes that were active when the forward pass called PyTorch's functions, and a mode
    is none while it handles a call.
    """
    with exchanged(CHECKPOINT, _checkpointed):
        yield


def _checkpointed(original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # What it checkpoints itself may be computed again in another thread, one of autograd's.
    return original(in_fp64()(function), *args, **kwargs)


class _InFP64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        asks_for_fp32 = func is Tensor.float or any(x is torch.float32 for x in given)
        if asks_for_fp32 and _has(torch.float64, given):
            func = Tensor.double if func is Tensor.float else func
            return func(*map(_widened, args), **{name: _widened(x) for name, x in kwargs.items()})
        result = func(*args, **kwargs)
        # An FP32 tensor is made here, or comes from one that the reference holds beside its parameters and buffers.
        if not _has(torch.float32, (result,)) or _has(torch.float32, given):
            return result
        return tree_map_only(Tensor, lambda x: x.double() if x.dtype is torch.float32 else x, result)


def _has(dtype: torch.dtype, values: Iterable[Any]) -> bool:
    """Whether one of the tensors is of the dtype, or one in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is dtype:
                return True
        elif isinstance(value, (list, tuple)) and _has(dtype, value):
            return True
    return False


def _widened(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x
