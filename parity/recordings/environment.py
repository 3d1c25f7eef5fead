"""Say what a process computes with: versions, the GPU, the settings that choose kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch

from parity.report import environment

# Variables that choose kernels, or what they may round.
_PREFIXES = (
    "NVTE_",
    "CUBLAS",
    "CUDNN",
    "NVIDIA_TF32",
    "TORCH_ALLOW_TF32",
    "TORCHINDUCTOR",
    "PYTORCH_CUDA",
    "CUDA_DEVICE_MAX",
)
_PACKAGES = ("torch", "transformer-engine", "transformer-engine-torch", "flash-attn", "triton", "megatron-core")


def describe_environment() -> dict[str, str]:
    """Return what this process's numbers depend on, by name; settings that are not set are left out."""
    on_gpu = torch.cuda.is_available()
    found = {package: environment.version(package) or "" for package in _PACKAGES}
    found |= {
        "device": environment.gpu_name() if on_gpu else environment.cpu_model(),
        "driver": environment.driver_version() if on_gpu else "",
        "cuda": (torch.version.cuda or "") if on_gpu else "",
        "cudnn": str(torch.backends.cudnn.version() or "") if on_gpu else "",
        "cublas": environment.cublas_version() if on_gpu else "",
        "threads": "" if on_gpu else str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "matmul in TF32": str(torch.backends.cuda.matmul.allow_tf32),
        "matmul sums in BF16": str(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "matmul sums in FP16": str(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
    }
    found |= {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    return {name: value for name, value in found.items() if value}


def compare_environments(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield what differs: its name, and its value in each; ``not set`` where one lacks it."""
    for name in dict.fromkeys([*first, *second]):
        one, other = first.get(name, "not set"), second.get(name, "not set")
        if one != other:
            yield name, one, other
