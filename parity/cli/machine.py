"""Find out what this machine can run, and how fast."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tabulate import tabulate

from parity import te
from parity.case.case import Case
from parity.machine.process import spawned
from parity.measuring.throughput import command, workload
from parity.plugin.options import parse_backend, parse_precisions
from parity.progress import Following
from parity.report import environment
from parity.settings import PRECISION_NAMES
from parity.te import PRECISIONS
from parity.user_error import UserError

# Find out what this machine and each kind of GPU can run, on which kernels, and why they cannot run the rest.


Availability = dict[str, str]
_WITHOUT_A_GPU = """\
No GPU here ({why}).
What works: every pair is compared, on CPU kernels that emulate the GPU of your choice, at the precisions in its column.
What needs a GPU: TransformerEngine's compiled kernels (parity run --backend gpu, parity kernels, parity gpu-report).
parity throughput measures the speed of the CPU kernels here, which says nothing about a GPU's.
"""
# These are older than any version that TE requires, so that TE says which versions it requires.
_OLD_CUDA, _OLD_CUBLASLT = "11.0", 110000


@dataclass(frozen=True)
class Diagnosis:
    """Describe what was found on this machine.

    Attributes:
        versions: the name of each part, with its version or what is wrong with it.
        real: for each precision's name, ``yes`` or the reason why TE's compiled kernels cannot run it here.
        emulated: the same for each GPU that the CPU kernels emulate, by its name: what TE says about a real one.
        libraries: the versions of CUDA and its libraries that TE finds on emulated GPUs.
        no_gpu: why TE's compiled kernels cannot run here at all; empty if they can.
    """

    versions: tuple[tuple[str, str], ...]
    real: Availability
    emulated: dict[str, Availability]
    libraries: str
    no_gpu: str = ""

    def __str__(self) -> str:
        """Return a table of versions, a table with a column for each GPU, and the notes that its cells refer to."""
        notes: dict[str, int] = {}

        def cell(answer: str) -> str:
            verdict, _, why = answer.partition(": ")
            return f"{verdict} ({notes.setdefault(why, len(notes) + 1)})" if why else verdict

        columns = self.emulated if self.no_gpu else {"this GPU": self.real, **self.emulated}
        here = _WITHOUT_A_GPU.format(why=self.no_gpu)
        rows = [(name, *(cell(answers[name]) for answers in columns.values())) for name in next(iter(columns.values()))]
        return "\n\n".join(
            (
                tabulate(self.versions, tablefmt="plain", disable_numparse=True),
                tabulate(rows, ["precision", *columns], tablefmt="simple", disable_numparse=True),
                "\n".join(f"({number}) {why}" for why, number in notes.items()),
                (here if self.no_gpu else "")
                + f"Of a GPU by name, this is what TransformerEngine itself says, with {self.libraries}.\n"
                "The CPU kernels emulate each: PARITY_EMULATED_GPU=ada, hopper (unless set) or blackwell.",
            )
        )


def diagnose() -> Diagnosis:
    """Return what PyTorch, TransformerEngine and the machine say. Missing parts are reported, not raised."""
    from parity import te

    reason = te.why_no_gpu()
    # A process loads TE for one backend only.
    with Following("asking TransformerEngine what it runs"), spawned(1) as of_cpu, spawned(1) as of_gpu:
        emulated = of_cpu.submit(emulated_availability)
        asked = of_gpu.submit(availability, "gpu") if reason is None else None
        real = asked.result() if asked else dict.fromkeys(PRECISIONS, f"no: {reason}")
        return Diagnosis(tuple(_list_versions()), real, *emulated.result(), no_gpu=reason or "")


def availability(backend: Literal["gpu", "cpu"]) -> Availability:
    """Return, for each precision's name, ``yes`` or the reason why this process cannot run it on these kernels."""
    from parity import te
    from parity.te import why_unavailable

    try:
        kernels = te.kernels(backend)
    except (RuntimeError, ImportError, OSError) as error:
        return dict.fromkeys(PRECISIONS, f"no: {error}")
    reasons = {name: why_unavailable(precision, kernels) for name, precision in PRECISIONS.items()}
    return {name: "yes" if reason is None else f"no: {reason}" for name, reason in reasons.items()}


def emulated_availability() -> tuple[dict[str, Availability], str]:
    """Return what each emulated GPU can run, by the GPU's name, and a text with the versions of its libraries.

    A ``yes`` may be followed by what TE would say with older libraries, which tells what a real GPU needs.
    """
    from parity.te.emulation import cuda

    def answers(gpu: cuda.DeviceProperties) -> Availability:
        with cuda.emulated(gpu):
            now = availability("cpu")
            with cuda.emulated_libraries(cuda_version=_OLD_CUDA):
                on_old_cuda = availability("cpu")
            with cuda.emulated_libraries(cublaslt=_OLD_CUBLASLT):
                on_old_cublas = availability("cpu")
        return {name: _with_needs(answer, on_old_cuda[name], on_old_cublas[name]) for name, answer in now.items()}

    names = {gpu: f"{gpu.name.removeprefix('emulated ')} {gpu.major}.{gpu.minor}" for gpu in cuda.GPUS.values()}
    found = {name: answers(gpu) for gpu, name in names.items()}
    cublaslt, cudnn = (environment.version_text(of()) for of in (cuda.cublaslt_version, cuda.cudnn_version))
    libraries = f"CUDA {cuda.CUDA_VERSION}, cuBLAS {cublaslt} and cuDNN {cudnn}"
    return found, libraries


def _with_needs(answer: str, *on_older: str) -> str:
    """Return the answer, with the complaints of TE about older libraries added if it is ``yes``."""
    said = [older.partition(": ")[2] for older in on_older if older != "yes"]
    return answer if answer != "yes" or not said else f"yes: {' '.join(dict.fromkeys(said))}"


def te_range(version: str | None) -> str:
    """Return a version of TE with the versions that the CPU kernels serve, or what is wrong with that version."""
    from packaging.version import Version

    from parity.te.emulation import NEWEST, OLDEST

    if version is None:
        return "not installed: pip install transformer-engine"
    served = f"the CPU kernels serve {OLDEST} to {NEWEST}"
    if Version(version) < OLDEST:
        return f"{version}, too old: {served}"
    if Version(version).release[:2] > NEWEST.release:
        return f"{version}, newer than was tried: {served}"
    return f"{version} ({served})"


def _list_versions() -> Iterator[tuple[str, str]]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a broken driver makes torch warn, but the lack of a GPU is reported below
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


# Measure throughput from the command line.


SIZES = ("auto", "large", "declared")


def run(
    cases: Sequence[Case] | None,
    precisions: str,
    backend: str,
    sizes: str,
    keyword: str,
    repeats: int | None,
    compiled: str,
    minutes: float | None,
    folder: Path,
) -> Path:
    """Measure the built-in workloads, or cases, and return the report's path.

    Args:
        cases: pairs to measure at the sizes that they declare; None for the built-in workloads.
        precisions: names separated by commas; empty for all.
        backend: ``auto``, ``gpu`` or ``cpu``.
        sizes: a name in ``SIZES``; ``auto`` is ``large`` on a GPU and ``declared`` on a CPU.
        keyword: words separated by commas; a workload's name has to contain one of them.
        compiled: ``all``, ``none``, or names of precisions in which the plain module is also compiled.
        repeats, minutes: see ``command.Settings``.
        folder: the folder for the report.

    Raises:
        UserError: for an unknown precision, backend or choice of sizes, or a keyword that matches no workload.
    """
    if sizes not in SIZES:
        raise UserError(f"--sizes is {sizes!r}, but must be one of {', '.join(SIZES)}")
    asked = parse_backend(backend)
    chosen = parse_precisions(precisions, "--precisions") or PRECISION_NAMES
    on_gpu = asked != "cpu" and te.why_no_gpu() is None
    if cases:
        workloads = workload.declared(cases)
    else:
        workloads = workload.built_in(large=on_gpu if sizes == "auto" else sizes == "large")
    named = () if compiled in ("all", "none") else parse_precisions(compiled, "--compiled") or ()
    to_compile = chosen if compiled == "all" else named
    settings = command.Settings(workload.select(workloads, keyword), chosen, asked, repeats, to_compile, minutes)
    return command.run(settings, folder)
