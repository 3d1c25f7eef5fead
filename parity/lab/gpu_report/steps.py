"""The steps, in their order: what a reader wants first comes first, in case the time does not suffice."""

from __future__ import annotations

from pathlib import Path

from parity.case import files as built_in
from parity.lab.gpu_report import index, limits
from parity.lab.gpu_report.step import Step
from parity.machine import host

NO_GPU = "no GPU here: emulated kernels, and a small part, to try the step"
_SMALL = "a small part"


def steps(folder: Path, on_gpu: bool, quick: bool, minutes: float) -> list[Step]:
    """Return all steps.

    Args:
        folder: of the report.
        on_gpu: whether TE's real kernels run here; if not, every step is tried on emulated ones.
        quick: whether a small part is enough.
        minutes: for all of them.
    """
    small = quick or not on_gpu
    caveat = NO_GPU if not on_gpu else _SMALL if quick else ""
    backend = ("--backend", "gpu" if on_gpu else "cpu")
    return [
        Step("doctor", "What can this machine run?", _parity("doctor"), 1.2, (), index.doctor),
        Step(
            "suite",
            "Is TE right, on its real kernels, at every precision of this GPU?",
            _parity("run", *backend, "--report", folder, "--name", "suite", *(_SMALL_SUITE if small else _SUITE)),
            2.4,
            ("suite.md", "suite.jsonl"),
            index.suite,
            caveat,
        ),
        Step(
            "limits",
            "Do its errors lie within the packaged limits, and where in them?",
            ("-m", limits.__name__, str(folder / "suite.jsonl"), str(folder / "limits.md")),
            0.4,
            ("limits.md",),
            index.on_limits,
            caveat,
        ),
        Step(
            "kernels",
            "How far are the CPU kernels from the real ones, kernel by kernel?",
            _parity("kernels", "--report", folder / "kernel-table.md", *_kernels(on_gpu, small, minutes)),
            2.0,
            ("kernel-table.md", "kernel-table.jsonl"),
            index.kernels,
            caveat if on_gpu else "no GPU here: CPU kernels against CPU kernels in another process, to try the step",
        ),
        Step(
            "throughput",
            "What does each precision buy, and what does it cost?",
            _parity("throughput", *backend, "--out", folder, *_throughput(small, minutes)),
            2.3,
            ("throughput.md", "throughput.png", "throughput.jsonl"),
            index.throughput,
            caveat,
        ),
        Step(
            "calibration",
            "Which limits would these kernels set?",
            _parity("calibrate", *_calibration(folder, small), *backend),
            1.2,
            ("calibration.md", "calibration.png", "calibration.json"),
            index.calibration,
            caveat or "one seed, TE's modules alone",
        ),
    ]


_SUITE = ("-n", "auto", "--timeout", "60")  # a kernel that hangs costs its item alone, and not the step
_SMALL_SUITE = ("-n", "0", "-k", "rmsnorm or linear_no_bias", "-p", "bf16", "-p", "fp8_current")


def _kernels(on_gpu: bool, small: bool, minutes: float) -> tuple[str, ...]:
    """The table is drawn once its calls are made, so their time ends before the step's."""
    part = ("-k", "rmsnorm") if small else ("--minutes", f"{minutes / 5.5:.2f}")
    return (*(() if on_gpu else ("--reference", "cpu")), *part)


def _throughput(small: bool, minutes: float) -> tuple[str, ...]:
    if small:
        return ("-k", "rmsnorm", "--precisions", "bf16", "--sizes", "declared", "--compiled", "none", "--repeats", "2")
    return ("--minutes", f"{minutes / 5:.2f}", "--repeats", "20", "--compiled", "bf16")


def _calibration(folder: Path, small: bool) -> tuple[str, ...]:
    """Each kind of tensor needs eight different ones: the small part is the file of cases that has most."""
    cases = built_in.folder()
    all_cases = (str(cases), "-n", str(_processes()))
    files = (str(cases / "mlp.py"), "-p", "bf16", "-n", "1") if small else all_cases
    table = ("-o", str(folder / "calibration.json"), "--report", str(folder / "calibration.md"))
    # No verdict uses the table; how much wider its limits are is what the step is to tell.
    return (*files, "--seeds", "1", "--draws", "0", "--accept-wider", *table)


def _processes() -> int:
    """Enough to keep a GPU busy with small modules; each takes memory of its own there."""
    return min(6, host.cores())


def _parity(*arguments: object) -> tuple[str, ...]:
    return ("-m", "parity", *map(str, arguments))
