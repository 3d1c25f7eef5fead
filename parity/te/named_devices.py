"""Let code that names a GPU make its modules and tensors on the CPU, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


@contextmanager
def cuda_is_cpu_without_gpu() -> Iterator[None]:
    """Within the context, ``device="cuda"``, ``device=0``, ``.cuda()`` and ``.to("cuda")`` mean the CPU if PyTorch sees
    no GPU.

    So a factory that was written on a GPU machine builds its pair on a laptop. Parity moves modules and inputs to where
    the kernels run in any case.
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
