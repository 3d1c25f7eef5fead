"""What an exception says about the device."""

from __future__ import annotations

import pytest
import torch

from parity.te.device_errors import classify, cuda_works


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_may_run_out(error: Exception) -> None:
    assert classify(error, lambda: True) == "out of memory"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("/te/common/gemm.cu:12 in function f: CUDA Error: misaligned address"),
    ],
)
def test_a_kernel_may_break_the_context(error: Exception) -> None:
    assert classify(error, lambda: True) == "broken"


def test_an_error_that_does_not_tell_is_the_devices_if_cuda_answers_no_more() -> None:
    error = RuntimeError("cuDNN Error: CUDNN_STATUS_EXECUTION_FAILED")
    assert classify(error, lambda: False) == "broken"
    assert classify(error, lambda: True) == ""


@pytest.mark.parametrize(
    "error", [ValueError("misaligned address"), RuntimeError("mat1 and mat2 cannot be multiplied")]
)
def test_the_modules_own_errors_are_not_the_devices(error: Exception) -> None:
    assert classify(error) == ""


def test_a_broken_context_is_seen_by_asking_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert cuda_works()

    def fails() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert not cuda_works()


def test_what_pytorch_says_of_an_impossible_allocation_is_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify(raised.value) == "out of memory"
