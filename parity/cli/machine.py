"""Says what this machine can run, on which kernels, and why not the rest."""

from __future__ import annotations

import multiprocessing
import platform
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate

from parity.report import environment

Availability = dict[str, str]


@dataclass(frozen=True)
class Diagnosis:
    """What was found on this machine.

    Attributes:
        versions: what, and which version or what is wrong with it.
        real: by precision's name, ``yes`` or the reason why TE's compiled kernels cannot run it here.
        emulated: ditto for the CPU kernels.
    """

    versions: tuple[tuple[str, str], ...]
    real: Availability
    emulated: Availability

    def __str__(self) -> str:
        rows = [(name, answer, self.emulated[name]) for name, answer in self.real.items()]
        headers = ["precision", "on real kernels", "on CPU kernels"]
        return "\n\n".join(
            (
                tabulate(self.versions, tablefmt="plain", disable_numparse=True),
                tabulate(rows, headers, tablefmt="simple", disable_numparse=True, maxcolwidths=[None, 50, 50]),
            )
        )


def diagnose() -> Diagnosis:
    """Ask PyTorch, TransformerEngine and the machine; nothing that is missing makes it fail."""
    from parity import te
    from parity.precision import PRECISIONS

    reason = te.why_no_gpu()
    real = _in_own_process("gpu") if reason is None else dict.fromkeys(PRECISIONS, f"no: {reason}")
    return Diagnosis(versions=tuple(_versions()), real=real, emulated=_in_own_process("cpu"))


def availability(backend: Literal["gpu", "cpu"]) -> Availability:
    """By precision's name, ``yes`` or the reason why this process cannot run it on these kernels."""
    from parity import te
    from parity.precision import PRECISIONS, why_unavailable

    try:
        kernels = te.kernels(backend)
    except (RuntimeError, ImportError, OSError) as error:
        return dict.fromkeys(PRECISIONS, f"no: {error}")
    reasons = {name: why_unavailable(precision, kernels) for name, precision in PRECISIONS.items()}
    return {name: "yes" if reason is None else f"no: {reason}" for name, reason in reasons.items()}


def te_range(version: str | None) -> str:
    """Whether the CPU kernels serve a version of TE: ``2.20.2 (CPU kernels serve 2.14 to 2.20)``, or what is wrong."""
    from packaging.version import Version

    from parity.cpu.versions import NEWEST, OLDEST

    if version is None:
        return "not installed: pip install transformer-engine"
    served = f"the CPU kernels serve {OLDEST} to {NEWEST}"
    if Version(version) < OLDEST:
        return f"{version}, too old: {served}"
    if Version(version).release[:2] > NEWEST.release:
        return f"{version}, newer than was tried: {served}"
    return f"{version} ({served})"


def _in_own_process(backend: Literal["gpu", "cpu"]) -> Availability:
    """A process can load TE for one backend only, so that each is asked in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(availability, backend).result()


def _versions() -> Iterator[tuple[str, str]]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a broken driver makes torch warn; that there is no GPU is said below
        has_gpu = torch.cuda.is_available()
    yield "parity", environment.version(environment.distribution("parity")) or "not installed"
    yield "TransformerEngine", te_range(environment.version("transformer-engine"))
    yield "its kernels", environment.version("transformer-engine-torch") or "not installed (only for a GPU)"
    yield "PyTorch", torch.__version__
    yield "CUDA", torch.version.cuda or "not in this PyTorch"
    yield "cuDNN", str(torch.backends.cudnn.version() or "not in this PyTorch")
    yield "GPU", environment.gpu_name() if has_gpu else "none that PyTorch sees"
    yield "processor", environment.cpu_model()
    yield "Python", platform.python_version()
    yield "pytest", environment.version("pytest") or "not installed"
    yield "pytest-xdist", environment.version("pytest-xdist") or "not installed"
