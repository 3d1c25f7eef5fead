"""Which GPU a study runs a precision on: the real one, or an emulated one that has it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from parity.cpu import cuda
from parity.cpu.emulated_gpu import emulated
from parity.precision import PRECISIONS, Precision, why_unavailable
from parity.te import Kernels


def why_nowhere(precision: Precision, kernels: Kernels) -> str | None:
    """The reason why no GPU that these kernels offer runs the precision, or None if one does."""
    return None if _choice(precision, kernels) else why_unavailable(precision, kernels)


@contextmanager
def gpu_with(precision: Precision, kernels: Kernels) -> Iterator[str]:
    """Within the context, TE finds itself on a GPU that has the precision: on CPU kernels an emulated one.

    The environment's emulated GPU is taken where it will do, as it is without this context.

    Yields:
        The GPU's name.

    Raises:
        ValueError: if there is none, see ``why_nowhere``.
    """
    choice = _choice(precision, kernels)
    if not choice:
        raise ValueError(f"no GPU here runs {precision.name}: {why_nowhere(precision, kernels)}")
    (gpu,) = choice
    with nullcontext() if gpu is None else emulated(gpu):
        yield torch.cuda.get_device_name() if gpu is None else gpu.name


def told(precisions: Iterable[str], kernels: Kernels) -> str:
    """Sentences that say on which GPU each of these precisions runs, by name of ``PRECISIONS``."""
    by_gpu: dict[str, list[str]] = {}
    for name in precisions:
        with gpu_with(PRECISIONS[name], kernels) as gpu:
            by_gpu.setdefault(gpu, []).append(f"`{name}`")
    return " ".join(f"On an {gpu}: {', '.join(names)}." for gpu, names in by_gpu.items())


@functools.lru_cache(maxsize=64)
def _choice(precision: Precision, kernels: Kernels) -> tuple[cuda.DeviceProperties | None, ...]:
    """The first GPU that has the precision, None for the real one; empty if there is none."""
    if kernels.backend == "gpu":
        return () if why_unavailable(precision, kernels) else (None,)
    for gpu in dict.fromkeys((cuda.environment_gpu(), cuda.HOPPER, cuda.BLACKWELL)):
        with emulated(gpu):
            if why_unavailable(precision, kernels) is None:
                return (gpu,)
    return ()
