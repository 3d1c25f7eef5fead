"""How many workers a run has by ``-n auto``, and which GPUs they share; known before anything is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from parity.declaring.source import that_import_parity
from parity.machine import devices, extension, host
from parity.machine.devices import Device
from parity.plugin.options import Options

# What a worker should find at least. On the GPU: its CUDA context, cuBLAS's workspaces and a case of some GiB. On the
# host: Python with PyTorch and TE, which is 0.45 GiB without CUDA, and a case.
GPU_BYTES = 8 * 2**30
HOST_BYTES = 2 * 2**30
HOST_BYTES_WITH_CUDA = 4 * 2**30


def has_cases(config: pytest.Config) -> bool:
    """Whether a file that pytest was asked for imports parity; how other runs use workers is their own business."""
    return next(files_of_cases(config), None) is not None


def files_of_cases(config: pytest.Config) -> Iterator[Path]:
    """The files that pytest was asked for, or that lie in folders it was asked for, and that import parity."""
    start = config.invocation_params.dir
    paths = (start / argument.split("::")[0] for argument in config.args)
    return that_import_parity(paths, config.getini("python_files"), config.getini("norecursedirs"))


def gpus_of(options: Options, environment: Mapping[str, str] = os.environ) -> list[Device]:
    """The GPUs that the run's processes share; none where the CPU kernels run.

    Raises:
        UserError: if ``PARITY_DEVICES`` names none of them.
    """
    if options.backend == "cpu" or not extension.is_installed():
        return []
    return devices.chosen(environment)


def how_many(gpus: Sequence[Device], largest: int | None = None) -> int:
    """The workers of ``-n auto``: as many as find a core, memory of the host, and memory of a GPU.

    A GPU whose memory is unknown gets one.

    Args:
        gpus: that they share.
        largest: bytes that the largest case needs; None where it is unknown.
    """
    limits = [host.cores()]
    free = host.free_memory()
    if free is not None:
        limits.append(free // (HOST_BYTES_WITH_CUDA if gpus else HOST_BYTES))
    if gpus:
        limits.append(sum(_on(gpu, largest or 0) for gpu in gpus))
    return max(1, min(limits))


def _on(gpu: Device, largest: int) -> int:
    """How many workers share a GPU."""
    found = 1 if gpu.free is None else gpu.free // _share(gpu.free, largest)
    return found if gpu.processes is None else min(found, gpu.processes)


def _share(free: int, largest: int) -> int:
    """What a worker should find of a GPU: room for the largest case, unless that needs more than half of it.

    Such a case runs alone, which costs the others its time; a GPU with one worker would cost them all of theirs.
    """
    return max(GPU_BYTES, min(largest, free // 2))
