"""Let code that names a GPU run without one, and distinguish errors of the device from errors of the port."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from parity.result import DeviceError
from parity.shown import said

_CPU = torch.device("cpu")


@contextmanager
def cuda_is_cpu_without_gpu() -> Iterator[None]:
    """Let ``device="cuda"``, ``device=0``, ``.cuda()`` and ``.to("cuda")`` mean the CPU if PyTorch sees no GPU.

    With this, a factory that was written on a GPU machine can build its pair on a laptop. Parity always moves modules
    and inputs to where the kernels run.
    """
    if torch.cuda.is_available():
        yield
        return
    with _CudaIsCpu():
        yield


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if _is_cuda(named.get("device")):
            named["device"] = _CPU
        moves = func is Tensor.to
        return func(*[_CPU if _is_cuda(arg, is_device=moves) else arg for arg in args], **named)


def _is_cuda(argument: Any, is_device: bool = True) -> bool:
    """Return whether an argument names a GPU; a text or a number does so only where a device is expected."""
    if isinstance(argument, torch.device):
        return argument.type == "cuda"
    if not is_device or isinstance(argument, bool):
        return False
    return isinstance(argument, int) or (isinstance(argument, str) and argument.partition(":")[0] == "cuda")


@contextmanager
def refusing_meta_tensors() -> Iterator[None]:
    """Let TE's compiled functions raise in this context if they are given a tensor on the meta device.

    They would read its address, which is 0. After such an illegal access CUDA no longer answers. A module that
    quantizes its weights when it creates them passes such tensors. The CPU kernels are written in Python, and compute
    shapes from them.

    Raises:
        TypeError: within the context.
    """
    compiled = sys.modules.get("transformer_engine_torch")
    functions = {name: one for name, one in vars(compiled).items() if inspect.isbuiltin(one)} if compiled else {}

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(one, Tensor) and one.is_meta for one in tree_leaves((args, kwargs))):
                raise TypeError(f"TransformerEngine's compiled {name} needs memory, and a tensor on meta has none")
            return function(*args, **kwargs)

        return call

    for name, function in functions.items():
        setattr(compiled, name, refusing(name, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(compiled, name, function)


# Distinguish errors of the device from errors of the port: memory ran out, or a kernel broke the CUDA context.


# PyTorch's CPU allocator, cuBLAS, and the texts of cudaErrorMemoryAllocation and CUDNN_STATUS_ALLOC_FAILED.
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|_ALLOC_FAILED", re.IGNORECASE)

# The texts of those CUDA errors after which "the process must be terminated and relaunched" (CUDA runtime API,
# cudaError_t): numbers 214, 220, 700, 702, and 710 to 719.
_BROKEN = re.compile(
    "uncorrectable ECC error|uncorrectable NVLink error|illegal memory access|launch timed out and was terminated|"
    "device-side assert triggered|hardware stack error|illegal instruction|misaligned address|"
    "operation not supported on global/shared address space|invalid program counter|unspecified launch failure",
    re.IGNORECASE,
)


def classify(error: BaseException, context_works: Callable[[], bool] | None = None) -> DeviceError:
    """Return what an exception says about the device.

    Args:
        error: the exception.
        context_works: called to find out whether CUDA still works, if the message alone does not say; asks CUDA by
            default.

    Returns:
        ``out of memory``: the same may succeed when others use less memory. ``broken``: every later CUDA call of this
        process fails. Empty: it is not an error of the device.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out of memory"
    if not isinstance(error, RuntimeError):
        return ""
    text = said(error)
    if _BROKEN.search(text):
        return "broken"
    if _OUT_OF_MEMORY.search(text):
        return "out of memory"
    return "" if (context_works or cuda_works)() else "broken"


def cuda_works() -> bool:
    """Return whether CUDA answers; a context that an error has broken repeats it at every call."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
