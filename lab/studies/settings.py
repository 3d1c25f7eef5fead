"""Provide what studies share: checks of names, distributions, the GPU of a precision, and parity's verdicts."""

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
from parity.measuring.record import FourDigits
from parity.report.environment import cpu_model, gpu_name
from parity.result import Result
from parity.te import PRECISIONS, Backend, BackendUnavailable, Kernels, Precision, why_unavailable
from parity.user_error import UserError
from te_on_cpu import cuda
from te_on_cpu.cuda import emulated

# Checks of the names in a study's settings.


def check_names(field: str, chosen: Iterable[str], known: Collection[str]) -> None:
    """Check that all names in a field are known.

    Raises:
        UserError: if one is not; the message lists the known names.
    """
    for name in chosen:
        if name not in known:
            raise UserError(f"{field}: unknown name {name!r}; choose from {', '.join(known)}")


# Distributions that quantization treats differently. Each draws FP32 tensors of any shape.


Draw = Callable[..., Tensor]


def normal(rng: Rng, *shape: int) -> Tensor:
    """Draw from N(0, 1)."""
    return rng.normal(*shape)


def heavy_tailed(rng: Rng, *shape: int) -> Tensor:
    """Draw from Student's t with three degrees of freedom. Its fourth moment is infinite, so amaxes grow with size."""
    chi_squared = rng.normal(3, *shape).square().sum(0)
    return rng.normal(*shape) / (chi_squared / 3).sqrt()


def outliers(rng: Rng, *shape: int) -> Tensor:
    """Draw N(0, 1) + N(0, 100) Bernoulli(0.001), as FlashAttention-3 tests (arXiv 2407.08608, section 4.3)."""
    return rng.normal(*shape) + rng.normal(*shape, std=10.0) * (rng.uniform(*shape) < 0.001)


DISTRIBUTIONS: Mapping[str, Draw] = {"normal": normal, "heavy_tailed": heavy_tailed, "outliers": outliers}


# The device that a study computes on.


_DEVICES: dict[str, Backend | Literal["auto"]] = {"auto": "auto", "cpu": "cpu", "gpu": "gpu"}


def kernels_on(device: str) -> Kernels:
    """Return TE's kernels on a device: ``cpu``, ``gpu``, or ``auto`` for the GPU where TE's own kernels can run.

    Raises:
        UserError: if the name is unknown or the device is not available.
    """
    if device not in _DEVICES:
        raise UserError(f"device: unknown name {device!r}; choose from {', '.join(_DEVICES)}")
    try:
        return te.kernels(_DEVICES[device])
    except BackendUnavailable as error:
        raise UserError(f"device: {error}") from None


def name_of(kernels: Kernels) -> str:
    """Return the name of the GPU, or the model of the CPU."""
    return gpu_name() if kernels.backend == "gpu" else cpu_model()


# The GPU that a study runs a precision on: the real one, or an emulated one that supports the precision.


def why_nowhere(precision: Precision, kernels: Kernels) -> str | None:
    """Return why no GPU of these kernels can run the precision, or None if one can."""
    return None if _choice(precision, kernels) else why_unavailable(precision, kernels)


@contextmanager
def gpu_with(precision: Precision, kernels: Kernels) -> Iterator[str]:
    """Make TE run on a GPU that supports the precision, within the context. On CPU kernels the GPU is emulated.

    The emulated GPU that the environment chooses is preferred, if it supports the precision.

    Yields:
        The GPU's name.

    Raises:
        ValueError: if there is no such GPU (see ``why_nowhere``).
    """
    choice = _choice(precision, kernels)
    if not choice:
        raise ValueError(f"no GPU here runs {precision.name}: {why_nowhere(precision, kernels)}")
    (gpu,) = choice
    with nullcontext() if gpu is None else emulated(gpu):
        yield torch.cuda.get_device_name() if gpu is None else gpu.name


def told_gpu(precisions: Iterable[str], kernels: Kernels) -> str:
    """Return a sentence that says which GPU runs each of these precisions, given by name."""
    by_gpu: dict[str, list[str]] = {}
    for name in precisions:
        with gpu_with(PRECISIONS[name], kernels) as gpu:
            by_gpu.setdefault(gpu, []).append(f"`{name}`")
    return " ".join(f"On an {gpu}: {', '.join(names)}." for gpu, names in by_gpu.items())


@functools.lru_cache(maxsize=64)
def _choice(precision: Precision, kernels: Kernels) -> tuple[cuda.DeviceProperties | None, ...]:
    """Return the first GPU that supports the precision (None for the real one) as a tuple, empty if there is none."""
    if kernels.backend == "gpu":
        return () if why_unavailable(precision, kernels) else (None,)
    for gpu in dict.fromkeys((cuda.environment_gpu(), cuda.HOPPER, cuda.BLACKWELL)):
        with emulated(gpu):
            if why_unavailable(precision, kernels) is None:
                return (gpu,)
    return ()


# Parity's verdicts, which studies compare with the planted mistakes.


@dataclass(frozen=True)
class Said:
    """Hold parity's verdict on a wrong or right port.

    Attributes:
        status: ``passed``, ``failed`` or ``error``.
        reason: why it did not pass.
        margin: the largest margin.
        findings: title and message of each finding, in parity's order.
        seconds: how long it took, including the search for a cause.
    """

    status: str
    reason: str
    margin: FourDigits
    findings: tuple[tuple[str, str], ...]
    seconds: FourDigits

    @classmethod
    def by(cls, result: Result, seconds: float) -> Said:
        """Return the verdict of a result that took this many seconds."""
        findings = tuple((found.title, found.message) for found in result.findings)
        return cls(result.status, result.reason, result.margin, findings, seconds)

    def outcome(self, titles: Collection[str], told: str = "") -> str:
        """Return ``named`` or ``detected`` if a wrong port failed, otherwise its status.

        Args:
            titles: titles that the first finding may have if it is right.
            told: text that its message must contain.
        """
        if self.status != "failed":
            return self.status
        is_named = bool(self.findings) and self.findings[0][0] in titles and told in self.findings[0][1]
        return "named" if is_named else "detected"
