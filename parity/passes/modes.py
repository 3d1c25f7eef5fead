"""Leave the modes of PyTorch that a comparison must not inherit from the code around it.

Under ``torch.no_grad()`` every gradient would be 0 in all passes, so that all would agree. Under ``torch.autocast`` the
rounding model would round like BF16 at every precision, and expect such an error of the port. The same would happen if
plain FP32 products used TF32 or BF16 (``torch.set_float32_matmul_precision("high")``, or a vendor's
``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE``). This file also makes PyTorch's CPU kernels sum in FP32, as its GPU kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.trace.effects import FP32_SETTINGS, fp32_setting, has_fp32_settings, set_fp32
from parity.trace.private_functions import EMBEDDING, LAYER_NORM, exchanged

_FP32 = "ieee"
# The settings of CUDA's and oneDNN's products that each ``torch.set_float32_matmul_precision`` makes.
_PRODUCTS = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}


@contextmanager
def usual_modes() -> Iterator[None]:
    """Record gradients, cast nothing automatically, and compute FP32 in true FP32 within the context."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        modes.enter_context(_true_fp32())
        modes.enter_context(sums_in_fp32())
        yield


@contextmanager
def _true_fp32() -> Iterator[None]:
    """Make PyTorch compute FP32 products, convolutions and recurrent layers in true FP32 within the context."""
    settings = {place: fp32_setting(place) for place in FP32_SETTINGS} if has_fp32_settings() else {}
    matmul, cudnn = _matmul_precision(), _cudnn_allows_tf32()
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        for place in settings:
            set_fp32(place, _FP32)
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
        for place, setting in settings.items():
            # A setting that equals its parent's follows the parent again, because PyTorch cannot tell the two apart.
            set_fp32(place, "none")
            if fp32_setting(place) != setting:
                set_fp32(place, setting)


def _matmul_precision() -> str:
    """Return ``torch.get_float32_matmul_precision()``.

    That raises if newer settings contradict it, so this tries the settings of each precision until it does not.
    """
    if not has_fp32_settings():
        return torch.get_float32_matmul_precision()
    for name, settings in _PRODUCTS.items():
        for backend, setting in zip(("cuda", "mkldnn"), settings, strict=True):
            set_fp32((backend, "matmul"), setting)
        try:
            if torch.get_float32_matmul_precision() == name:
                return name
        except RuntimeError:
            continue
    return "highest"


def _cudnn_allows_tf32() -> bool:
    """Return ``torch.backends.cudnn.allow_tf32``, which also raises if settings contradict it."""
    if not has_fp32_settings():
        return bool(torch.backends.cudnn.allow_tf32)
    for operation in ("conv", "rnn"):
        set_fp32(("cuda", operation), "tf32")
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return False


# Sum in FP32, as CUDA does, where PyTorch's CPU kernels sum in 16 bits. A port may leave layer norms and embeddings to
# PyTorch. Its CPU kernels sum the gradients of a layer norm's weight and bias, and those of an embedding's rows, in the
# tensors' dtype: in BF16, the former are 8 % off after 4,096 tokens, and 25 % after 16,384 (PyTorch 2.13), which would
# hide mistakes of that size. No GPU makes such an error, because its kernels sum in FP32 and round once
# (``acc_type`` in PyTorch's ``layer_norm_kernel.cu`` and ``EmbeddingBackwardKernel.cu``).


_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@contextmanager
def sums_in_fp32() -> Iterator[None]:
    """Make PyTorch's layer norms and embeddings of 16-bit CPU tensors compute in FP32 and round once, at the end.

    Apart from the order of sums, the results are those of CUDA's kernels. So are the gradients, even if they are
    computed after the context.
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
    """Return the dtype of the first floating-point tensor, or None if it is not 16-bit or any is not on the CPU."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    dtype = next((x.dtype for x in tensors if x.is_floating_point()), None)
    return dtype if dtype in _SIXTEEN_BIT and all(x.device.type == "cpu" for x in tensors) else None
