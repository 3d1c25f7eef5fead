"""Share among studies what they are asked for and record: names, distributions, a precision's GPU, what parity says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parity import te
from parity.case.case import Rng
from parity.cpu import cuda
from parity.cpu.cuda import emulated
from parity.lab.record import FourDigits
from parity.report.environment import cpu_model, gpu_name
from parity.result import Result
from parity.te import PRECISIONS, Backend, BackendUnavailable, Kernels, Precision, why_unavailable
from parity.user_error import UserError

# Names that a study's settings may hold.


def check_names(field: str, chosen: Iterable[str], known: Collection[str]) -> None:
    """Make sure that all names of a field are known.

    Raises:
        UserError: for one that is not; lists those that are.
    """
    for name in chosen:
        if name not in known:
            raise UserError(f"{field}: there is no {name!r}; there are {', '.join(known)}")


# Distributions of values that quantization treats differently, by name: each draws FP32 tensors of any shape.


Draw = Callable[..., Tensor]


def normal(rng: Rng, *shape: int) -> Tensor:
    """Draw from N(0, 1)."""
    return rng.normal(*shape)


def heavy_tailed(rng: Rng, *shape: int) -> Tensor:
    """Draw from Student's t with three degrees of freedom: its fourth moment is infinite, amaxes grow with the size."""
    chi_squared = rng.normal(3, *shape).square().sum(0)
    return rng.normal(*shape) / (chi_squared / 3).sqrt()


def outliers(rng: Rng, *shape: int) -> Tensor:
    """Draw N(0, 1) + N(0, 100) Bernoulli(0.001), as FlashAttention-3 tests (arXiv 2407.08608, section 4.3)."""
    return rng.normal(*shape) + rng.normal(*shape, std=10.0) * (rng.uniform(*shape) < 0.001)


DISTRIBUTIONS: Mapping[str, Draw] = {"normal": normal, "heavy_tailed": heavy_tailed, "outliers": outliers}


# What a study computes on.


_DEVICES: dict[str, Backend | Literal["auto"]] = {"auto": "auto", "cpu": "cpu", "gpu": "gpu"}


def kernels_on(device: str) -> Kernels:
    """Return TE's kernels on a device: ``cpu``, ``gpu``, or ``auto`` for the GPU where TE's own kernels can run.

    Raises:
        UserError: for another name, or if the device cannot be had.
    """
    if device not in _DEVICES:
        raise UserError(f"device: there is no {device!r}; there are {', '.join(_DEVICES)}")
    try:
        return te.kernels(_DEVICES[device])
    except BackendUnavailable as error:
        raise UserError(f"device: {error}") from None


def name_of(kernels: Kernels) -> str:
    """Return the GPU, or the CPU's model."""
    return gpu_name() if kernels.backend == "gpu" else cpu_model()


# Which GPU a study runs a precision on: the real one, or an emulated one that has it.


def why_nowhere(precision: Precision, kernels: Kernels) -> str | None:
    """Return the reason why no GPU that these kernels offer runs the precision, or None if one does."""
    return None if _choice(precision, kernels) else why_unavailable(precision, kernels)


@contextmanager
def gpu_with(precision: Precision, kernels: Kernels) -> Iterator[str]:
    """Let TE find itself on a GPU that has the precision, within the context: on CPU kernels an emulated one.

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


def told_gpu(precisions: Iterable[str], kernels: Kernels) -> str:
    """Say on which GPU each of these precisions runs, by name of ``PRECISIONS``."""
    by_gpu: dict[str, list[str]] = {}
    for name in precisions:
        with gpu_with(PRECISIONS[name], kernels) as gpu:
            by_gpu.setdefault(gpu, []).append(f"`{name}`")
    return " ".join(f"On an {gpu}: {', '.join(names)}." for gpu, names in by_gpu.items())


@functools.lru_cache(maxsize=64)
def _choice(precision: Precision, kernels: Kernels) -> tuple[cuda.DeviceProperties | None, ...]:
    """Return the first GPU that has the precision, None for the real one; empty if there is none."""
    if kernels.backend == "gpu":
        return () if why_unavailable(precision, kernels) else (None,)
    for gpu in dict.fromkeys((cuda.environment_gpu(), cuda.HOPPER, cuda.BLACKWELL)):
        with emulated(gpu):
            if why_unavailable(precision, kernels) is None:
                return (gpu,)
    return ()


# What parity says, of which studies count how much is right.


@dataclass(frozen=True)
class Said:
    """Hold what parity said of a wrong port or of a right one.

    Attributes:
        status: ``passed``, ``failed`` or ``error``.
        reason: why, if it did not pass.
        margin: the largest.
        findings: titles and messages, the first first.
        seconds: how long it took, with the search for a cause.
    """

    status: str
    reason: str
    margin: FourDigits
    findings: tuple[tuple[str, str], ...]
    seconds: FourDigits

    @classmethod
    def by(cls, result: Result, seconds: float) -> Said:
        """Return what a result says."""
        findings = tuple((found.title, found.message) for found in result.findings)
        return cls(result.status, result.reason, result.margin, findings, seconds)

    def outcome(self, titles: Collection[str], told: str = "") -> str:
        """Return ``named`` or ``detected`` for a wrong one that failed, and otherwise its status.

        Args:
            titles: those that the first finding may have.
            told: what its message must say.
        """
        if self.status != "failed":
            return self.status
        is_named = bool(self.findings) and self.findings[0][0] in titles and told in self.findings[0][1]
        return "named" if is_named else "detected"
