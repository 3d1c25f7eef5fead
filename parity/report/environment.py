"""Record everything that a run's numbers depend on: kernels, device, versions, seeds and limits.

No text in it names a user or a folder, except for the path of a table of limits from elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from parity import shown
from parity.judge.limits import TIMES, Difference, OfPrecision, widest
from parity.machine import devices
from parity.report.earlier import Asked
from parity.report.numbers import markdown_table, short

# Every report describes limits that are not the packaged ones, because a pass with wider limits proves less.


_COLUMNS = (
    *("precision", f"limits more than {TIMES:g} times as wide", f"less than 1/{TIMES:g} as wide", "of", "widest"),
    *("times the packaged one", "tightest", "times the packaged one", "not in the packaged table", "accepted"),
)


def limits_in_words(file: str, compared: Sequence[OfPrecision] | None) -> str:
    """Return a text on how much a table's limits differ from the packaged ones; empty if there is no such table.

    Args:
        file: the table's file; empty for the packaged table.
        compared: how its limits compare with the packaged ones; None if that is not known.
    """
    if not file:
        return ""
    if compared is None:
        return f"{file} (this record does not say how they differ from the packaged ones)"
    if not compared:
        return f"{file} (the same as the packaged ones)"
    of_all = widest(compared)
    if of_all is None:
        return f"{file} (the packaged table has none for these precisions, so that they were compared with nothing)"
    precision, difference = of_all
    wider, tighter, shared = (sum(getattr(each, name) for each in compared) for name in ("wider", "tighter", "shared"))
    if difference.ratio <= 1.0:
        return f"{file} (none is wider than the packaged ones, and {tighter} of {shared} less than 1/{TIMES:g} as wide)"
    return (
        f"{file} ({precision} {_describe_difference(difference)}, {short(difference.ratio)} times as wide, "
        "is the largest difference; "
        f"{wider} of {shared} limits are more than {TIMES:g} times as wide as the packaged ones"
        f"{'; accepted when the table was made' if any(each.accepted for each in compared) else ''})"
    )


def limits_table(compared: Sequence[OfPrecision] | None) -> str:
    """Return a table of limits, a row for each precision; empty if they are the packaged ones or not known."""
    return markdown_table(map(_make_row, compared), _COLUMNS) if compared else ""


def _make_row(each: OfPrecision) -> tuple[object, ...]:
    counts = shown.prose(each.precision), each.wider, each.tighter, each.shared
    return *counts, *_make_cells(each.widest), *_make_cells(each.tightest), each.unknown, shown.prose(each.accepted)


def _make_cells(difference: Difference | None) -> tuple[str, str]:
    return ("", "") if difference is None else (shown.prose(_describe_difference(difference)), short(difference.ratio))


def _describe_difference(difference: Difference) -> str:
    """Return a difference in words, such as ``norm of outputs 351 instead of 1.7``."""
    limits = f"{short(difference.limit)} instead of {short(difference.packaged)}"
    return f"{difference.statistic} of {difference.kind}s {limits}"


# The environment of a run.


KERNELS = {
    "gpu": "real: TransformerEngine's compiled CUDA kernels",
    "cpu": "emulated: TransformerEngine's own Python on parity's CPU kernels",
}


@dataclass(frozen=True)
class Environment:
    """Describe where and with which software a run was made.

    Every text is as the report shows it, and empty where it does not apply. Older records lack some fields.

    Attributes:
        date: the time in UTC, ISO 8601, to the minute.
        backend: ``gpu`` or ``cpu``.
        device: the name of the GPU with its compute capability, or ``CPU`` and the GPU that it emulates, with the
            active kernel choices.
        cpu: the processor's model name.
        platform: the operating system and architecture.
        python, torch, transformer_engine, cuda, cudnn, parity: versions.
        seeds: the seeds of every comparison.
        items: how many items the run was to compare, so that a reader sees whether some have no result.
        cublas: the version of cuBLASLt that TE finds.
        driver: the version of the GPU's driver.
        golden: the device of the FP64 pass, and the measurements by which it was chosen.
        limits: the file of the table of limits; empty for the packaged one.
        limits_compared: how its limits compare with the packaged ones, by precision; empty if they are the same, None
            if that is not known.
        asked: the options and checksums that the run's results also depend on; None if they are not known.
        threads: how many threads PyTorch computed with; 0 if that is not known.
    """

    date: str
    backend: str
    device: str
    cpu: str
    platform: str
    python: str
    torch: str
    transformer_engine: str
    cuda: str
    cudnn: str
    parity: str
    seeds: tuple[int, ...]
    items: int
    cublas: str = ""  # older records lack this and the fields that follow
    driver: str = ""
    golden: str = ""
    limits: str = ""
    limits_compared: tuple[OfPrecision, ...] | None = None
    asked: Asked | None = None
    threads: int = 0

    @property
    def kernels(self) -> str:
        """The kind of kernels, real or emulated, in words."""
        return KERNELS.get(self.backend, self.backend)

    @property
    def facts(self) -> dict[str, str]:
        """Return the facts that every report shows, by label, without those that do not apply."""
        known = {
            "kernels": self.kernels,
            "device": self.device,
            "processor": self.cpu,
            "platform": self.platform,
            "TransformerEngine": self.transformer_engine,
            "PyTorch": self.torch,
            "CUDA": self.cuda,
            "cuBLAS": self.cublas,
            "cuDNN": self.cudnn,
            "driver": self.driver,
            "limits": limits_in_words(self.limits, self.limits_compared),
            "Python": self.python,
            "parity": self.parity,
            "date": self.date,
        }
        return {name: value for name, value in known.items() if value}


def measure(
    backend: str,
    seeds: Sequence[int],
    items: int,
    limits: str = "",
    limits_compared: tuple[OfPrecision, ...] | None = None,
    asked: Asked | None = None,
) -> Environment:
    """Return the environment of this process; the arguments are fields of it."""
    import torch

    from parity.numerics.golden import golden_device
    from parity.te import emulation

    gpu = backend == "gpu"
    return Environment(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        backend=backend,
        device=gpu_name() if gpu else f"CPU, as an {emulation.gpu_name()}",
        cpu=cpu_model(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformer_engine=version("transformer-engine") or "not installed",
        cuda=(torch.version.cuda or "") if gpu else "",
        cudnn=str(torch.backends.cudnn.version() or "") if gpu else "",
        parity=(version(distribution("parity")) or "not installed") + at_commit(),
        seeds=tuple(seeds),
        items=items,
        cublas=cublas_version() if gpu else "",
        driver=driver_version() if gpu else "",
        golden=golden_device(torch.device("cuda", torch.cuda.current_device())).reason if gpu else "",
        limits=limits,
        limits_compared=limits_compared,
        asked=asked,
        threads=torch.get_num_threads(),
    )


def to_json(environment: Environment) -> dict[str, Any]:
    """Return the environment as a dict of JSON types."""
    return {**dataclasses.asdict(environment), "seeds": list(environment.seeds)}


def from_json(record: Mapping[str, Any]) -> Environment:
    """Return the inverse of ``to_json``.

    Raises:
        pydantic.ValidationError: if a field is missing or has a wrong type; it is a ``ValueError``.
    """
    return _make_schema().validate_python(dict(record))


@functools.cache
def _make_schema() -> TypeAdapter[Environment]:
    return TypeAdapter(Environment)


def gpu_name() -> str:
    """Return the GPU's name, such as ``NVIDIA H100 80GB HBM3 (compute capability 9.0)``."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"


def cublas_version() -> str:
    """Return the version of the cuBLASLt that TE's compiled extension calls; empty if that is not loaded."""
    extension = sys.modules.get("transformer_engine_torch")
    return "" if extension is None else version_text(int(extension.get_cublasLt_version()))


def version_text(number: int) -> str:
    """Return ``13.2.0`` for 130200, as cuBLASLt and cuDNN encode their versions."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def driver_version() -> str:
    """Return the driver's version from nvidia-smi, such as ``580.65.06``; empty if nvidia-smi does not run."""
    answer = devices.ask(["--query-gpu=driver_version", "--format=csv,noheader"])
    return next(iter((answer or "").split()), "")


def cpu_model() -> str:
    """Return the processor's model name if it is known, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def at_commit() -> str:
    """Return `` at commit`` and that of the checkout that parity runs from, and whether files differ; else empty."""
    root = Path(__file__).parents[2]
    # A repository around an installed package is not parity's.
    commit = describe_commit(root) if Path(root, ".git").exists() else ""
    return commit and f" at commit {commit}"


def describe_commit(folder: Path) -> str:
    """Return the commit of a folder's repository, and whether files in it differ; empty if it is in none."""
    asked = "git", "-C", str(folder), "describe", "--always", "--exclude=*", "--dirty= with changes"
    with suppress(OSError):  # no git
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def made_by(command: str) -> str:
    """Return the last line of a report: the command that made it and, in a checkout, at which commit."""
    return f"Made by `{command}`{at_commit()}."


def distribution(package: str) -> str:
    """Return the distribution that installed an import package. Their names may differ."""
    # A small file declares a distribution's packages. Looking through the files of all distributions takes far longer.
    declared = (one for one in metadata.distributions() if package in (one.read_text("top_level.txt") or "").split())
    names = (one.metadata["Name"] for one in declared)
    return next(names, None) or next(iter(metadata.packages_distributions().get(package, ())), package)
