"""Compile a candidate by ``torch.compile``, and count what was compiled."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from parity.te import Kernels

Compile = Callable[[nn.Module], object]

# PyTorch's backends for what ``torch.compile`` does: each adds a step to those before.
TRACED, DIFFERENTIATED, GENERATED = "eager", "aot_eager", "inductor"


def backends(kernels: Kernels) -> tuple[str, ...]:
    """Return the backends that are to be tried where a compiled candidate is wrong; the last is the one it has.

    What PyTorch generates for a CPU is not what it generates for a GPU, and takes a C++ compiler minutes. So nothing
    is generated on the CPU kernels.
    """
    return (TRACED, DIFFERENTIATED, GENERATED) if kernels.device.type == "cuda" else (TRACED, DIFFERENTIATED)


def by_torch(backend: str) -> Compile:
    """Return what compiles the calls of a module."""
    return partial(nn.Module.compile, backend=backend, dynamic=False)


@contextmanager
def compiled_anew() -> Iterator[Callable[[], int]]:
    """Within the context, nothing is known of what was compiled before; hand out how many graphs are compiled.

    PyTorch replaces methods of ``nn.Module`` when it compiles for the first time in a process, and so it does here.
    """
    importlib.import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()
    stats = importlib.import_module("torch._dynamo.utils").counters["stats"]
    torch.compiler.reset()
    before = stats["unique_graphs"]
    try:
        yield lambda: int(stats["unique_graphs"] - before)
    finally:
        torch.compiler.reset()
