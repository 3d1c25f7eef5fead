"""Sum in FP32, as CUDA does, where PyTorch's kernels for CPUs sum in 16 bits.

A port leaves layer norms and embeddings to PyTorch. Its CPU kernels sum the gradients of a layer norm's weight and
bias, and those of an embedding's rows, in the tensors' dtype: in BF16, the former are 8 % off after 4,096 tokens, and
25 % after 16,384 (PyTorch 2.13), which would hide mistakes of that size. No GPU makes such an error, since its kernels
sum in FP32 and round once (``acc_type`` in PyTorch's ``layer_norm_kernel.cu`` and ``EmbeddingBackwardKernel.cu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.trace.private_functions import EMBEDDING, LAYER_NORM, exchanged

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@contextmanager
def sums_in_fp32() -> Iterator[None]:
    """Within the context, PyTorch's layer norms and embeddings of 16-bit CPU tensors compute in FP32 and round at last.

    Results are those of CUDA's kernels but for the order of sums; gradients as well, whenever they are computed.
    """
    with exchanged(LAYER_NORM, _in_fp32), exchanged(EMBEDDING, _in_fp32):
        yield


def _in_fp32(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    dtype = _dtype_on_cpu(args, kwargs)
    if dtype is None:
        return original(*args, **kwargs)
    args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype in _SIXTEEN_BIT else x, (args, kwargs))
    return original(*args, **kwargs).to(dtype)


def _dtype_on_cpu(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the 16-bit dtype of the first floating-point tensor if all are on the CPU; else None."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    dtype = next((x.dtype for x in tensors if x.is_floating_point()), None)
    return dtype if dtype in _SIXTEEN_BIT and all(x.device.type == "cpu" for x in tensors) else None
