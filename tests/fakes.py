"""Made-up results, and stand-ins for the comparison, so that the plugin and the report can be tested without TE."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import forked
import pytest
import torch

from parity import comparison, te
from parity.case import validate
from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.judge.limits import Table
from parity.judge.request import OnProgress, ignore_progress
from parity.machine.devices import Device
from parity.report.environment import Environment
from parity.result import Check, Errors, Finding, Kind, ProvesNothing, Result, TensorResult
from parity.te import Kernels, Precision
from parity.te.attention_backend import AttentionBackend
from parity.user_error import UserError

ENVIRONMENT = Environment(
    date="2026-01-31T12:00Z",
    backend="cpu",
    device="CPU, as an emulated Hopper (compute capability 9.0)",
    cpu="A Processor",
    platform="Linux x86_64",
    python="3.11.7",
    torch="2.13.0",
    transformer_engine="2.20.2",
    cuda="",
    cudnn="",
    parity="0.1.0",
    seeds=(0,),
    items=1,
)
GATE_UP_SWAPPED = Finding("PAR101", "gate-up-swapped", "fc1_weight matches with its halves exchanged")


def errors(relative_l2: float, **counts: Any) -> Errors:
    """Return the errors of a tensor whose root mean square is 1."""
    return Errors(
        relative_l2=relative_l2,
        max_abs=4 * relative_l2,
        max_ulps=relative_l2 * 2**8,
        cosine=1 - relative_l2**2 / 2,
        sqnr_db=-20 * math.log10(relative_l2),
        golden_rms=1.0,
        **counts,
    )


def tensor(name: str = "output", kind: Kind = "output", margin: float = 0.43, **counts: Any) -> TensorResult:
    """Return a tensor with an expected relative L2 error of 1e-3 and a tolerance of three times that."""
    tolerance = 3e-3
    return TensorResult(
        name=name,
        kind=kind,
        shape=(2, 64),
        errors=errors(tolerance * (margin if math.isfinite(margin) else 1.0), **counts),
        expected=errors(1e-3),
        tolerance_relative_l2=tolerance,
        tolerance_max_abs=4 * tolerance,
        checks=(Check("norm", 1.8 * margin, 1.8), Check("row", 0.9, 1.8, "row at 0, 7")),
        margin=margin,
    )


def result(case: str = "mlp", precision: str = "bf16", seed: int = 0, margin: float = 0.43, **fields: Any) -> Result:
    """Return a result with an output and a weight gradient, which is the better of the two."""
    complete = Result(
        case=case,
        precision=precision,
        size={"batch": 2, "hidden": 64},
        size_label="2x64",
        seed=seed,
        backend="cpu",
        status="passed" if margin <= 1 else "failed",
        tensors=(tensor(margin=margin), tensor("fc1.weight", "weight gradient", margin / 2)),
        findings=() if margin <= 1 else (GATE_UP_SWAPPED,),
        path="my_pairs.py",
    )
    return replace(complete, **fields)


def _lack_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _break_the_device() -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def _use_the_device(seconds: float = 0.3, alone: bool = False) -> None:
    """Use the device for a while, visibly to other processes. With ``alone``, run out of memory beside others.

    In its first run, such a process waits for another one, so that it is sure to run out.
    """
    began = time.monotonic()
    used = Path("used-" + os.environ.get("CUDA_VISIBLE_DEVICES", "cpu"))
    used.mkdir(exist_ok=True)
    waited = Path("waited")
    while alone and not waited.exists() and not list(used.iterdir()) and time.monotonic() < began + 20:
        time.sleep(0.01)
    if alone and list(used.iterdir()):
        waited.touch()
        _lack_memory()
    mark = used / str(os.getpid())
    mark.touch()
    time.sleep(seconds)
    beside = len(list(used.iterdir())) - 1
    mark.unlink()
    if alone and beside:
        _lack_memory()


def _hold_the_interpreter() -> None:
    """Hang like C code that does not let Python's other threads run."""
    ctypes.PyDLL(None).sleep(1000)


def _end_the_run() -> None:
    os.kill(int(os.environ[forked.STARTER]) if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), signal.SIGTERM)
    time.sleep(1000)


def _exit_in_a_thread() -> None:
    thread = threading.Thread(target=lambda: os._exit(0))
    thread.start()
    thread.join()


def _exit_in_c_in_a_thread() -> None:
    thread = threading.Thread(target=lambda: ctypes.CDLL(None).exit(0))
    thread.start()
    thread.join()


def _fork(name: str, seconds: float) -> None:
    """Fork a process that sleeps for so many seconds and then continues."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
    else:
        Path(name).write_text(str(child))


def _die_beside_a_fork() -> None:
    _fork("dies_beside_a_fork", 1000)
    os.kill(os.getpid(), signal.SIGKILL)


def _exit_in_a_fork() -> None:
    if os.fork() == 0:
        os._exit(3)
    os.wait()


def _die_once() -> None:
    if not (mark := Path("died")).exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _ignore_interruptions() -> None:
    while True:
        with suppress(KeyboardInterrupt):
            time.sleep(1000)


def _ask_to_end() -> None:
    raise KeyboardInterrupt


def _mute() -> None:
    class Mute(BaseException):
        def __str__(self) -> str:
            raise RuntimeError("\udcff")

        __repr__ = __str__

    raise Mute


def _raise(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


MISHAPS: dict[str, Callable[[], None]] = {
    "exits": lambda: os._exit(0),
    "exits_in_a_thread": _exit_in_a_thread,
    "exits_in_a_fork": _exit_in_a_fork,
    "forks_and_goes_on": lambda: _fork("forks_and_goes_on", 0),
    "forks_what_lives_on": lambda: _fork("forks_what_lives_on", 1000),
    "dies_beside_a_fork": _die_beside_a_fork,
    "exits_in_c": lambda: ctypes.CDLL(None).exit(0),
    "exits_in_c_in_a_thread": _exit_in_c_in_a_thread,
    "exits_in_c_unheard": lambda: ctypes.CDLL(None)._exit(0),
    "raises_ctrl_c": _ask_to_end,
    "hangs_whatever_is_raised": _ignore_interruptions,
    "raises_mutely": _mute,
    "raises_a_surrogate": _raise(ValueError("\udcff\x1b")),
    "dies_once": _die_once,
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "quits": _raise(SystemExit(0)),
    "leaves_pytest": _raise(pytest.exit.Exception("bye")),
    "kills_its_worker": lambda: os._exit(3),
    "hangs": lambda: time.sleep(1000),
    "hangs_for_good": _hold_the_interpreter,
    "breaks_the_device": _break_the_device,
    "never_fits": _lack_memory,
    "fits_alone": lambda: _use_the_device(alone=True),
    **{f"fits_beside_{i}": _use_the_device for i in range(10)},
}


DURING_THE_SEARCH: dict[str, Callable[[], None]] = {
    "fails_and_its_search_kills_it": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fails_and_its_search_exits": lambda: os._exit(3),
    "fails_and_its_search_hangs": lambda: time.sleep(1000),
    "fails_and_its_search_hangs_for_good": _hold_the_interpreter,
    "fails_and_its_search_breaks_the_device": _break_the_device,
    "fails_and_its_search_is_interrupted": _end_the_run,
}


# These cases fail at first. The functions say what happens during the second look; a case that passes it may still die.
DURING_A_SECOND_LOOK: dict[str, Callable[[], None]] = {
    "looks_again_and_dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "looks_again_and_exits": lambda: os._exit(3),
    "looks_again_and_hangs": lambda: time.sleep(1000),
    "looks_again_and_hangs_for_good": _hold_the_interpreter,
    "looks_again_and_is_interrupted": _end_the_run,
    "looks_again_and_passes": lambda: None,
}


@dataclass(frozen=True)
class Judged:
    """A comparison with only what the plugin reads of it, and the case's name if its failure is to be explained."""

    result: Result
    name: str = ""

    @property
    def is_unexplained(self) -> bool:
        return bool(self.name)


def explain_at(judged: Judged, diagnosis: float | None) -> Result:
    """Return the result with its findings; the case's name chooses what happens meanwhile."""
    if not judged.is_unexplained:
        return judged.result
    if diagnosis is None:
        return replace(judged.result, notes=(*judged.result.notes, comparison.NOT_SEARCHED))
    if judged.name in DURING_THE_SEARCH:
        DURING_THE_SEARCH[judged.name]()
    return replace(judged.result, findings=(GATE_UP_SWAPPED,))


def judge_at(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    calibration: Table,
    attention: AttentionBackend | None = None,
    determinism: bool = False,
    on_progress: OnProgress = ignore_progress,
    unwritten: bool = True,
    probe_weights: bool = False,
) -> Judged:
    """Return the result that the case's name chooses; FP8 is not available here."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "cpu")
    notes = (f"computed on {device}",) if device.startswith("GPU") else ()
    chosen = result(case.name, precision.name, seed, size_label=checked.label, path=str(case.path), notes=notes)
    chosen = replace(chosen, forced_attention=attention or "")
    if precision.recipe is not None:
        return Judged(replace(chosen, status="skipped", reason="no FP8 on this machine", tensors=()))
    if case.name == "segfaults_at_seed_1" and seed == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if case.name == "ends_the_run_at_seed_1" and seed == 1:
        _end_the_run()
    if case.name == "raises":
        way = 'Traceback (most recent call last):\n  File "models.py", line 6, in forward'
        reason = "the candidate raised ValueError: no"
        return Judged(replace(chosen, status="error", reason=reason, tensors=(), traceback=way))
    if case.name == "proves_nothing":
        chosen = replace(chosen, notes=(ProvesNothing("nothing is known of the backward pass"),))
    if case.name in MISHAPS:
        MISHAPS[case.name]()
    if "looks_again" in case.name:
        on_progress(replace(chosen, status="failed", tensors=(tensor(margin=2.0),)), False)
        DURING_A_SECOND_LOOK.get(case.name, lambda: None)()
        on_progress(None, True)
        if case.name == "dies_after_it_looks_again":
            os.kill(os.getpid(), signal.SIGKILL)
    if case.name.startswith("fails") and seed != 1:
        return Judged(replace(chosen, status="failed", tensors=(tensor(margin=100.0 + seed),)), case.name)
    return Judged(chosen)


def check_case(case: Case, te: ModuleType) -> list[CheckedSize]:
    """Accept every size of every case but one."""
    if case.name == "misfits":
        raise UserError("pair 'misfits': fc1.weight is 128x64, but fc1_weight is 64x128")
    has_attention = "attention" in case.name
    return [CheckedSize(size, "x".join(map(str, size.values())), has_attention) for size in case.sizes]


def kernels(backend: str = "auto") -> Kernels:
    """Return the CPU's kernels without TE's modules, which the fakes above do not need."""
    return Kernels("cpu", torch.device("cpu"), ModuleType("transformer_engine.pytorch"))


GPUS = [
    Device("GPU-one", "NVIDIA H100", "GPU-one", free=40 * 2**30),
    Device("GPU-two", "NVIDIA H100", "GPU-two", free=40 * 2**30),
]


def install_gpus(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[Device] = GPUS) -> None:
    """Make the code that distributes work see a machine with these GPUs and TE's kernels."""
    monkeypatch.setattr("parity.machine.devices.list_devices", lambda: list(gpus))
    monkeypatch.setattr("parity.machine.devices.is_installed", lambda: True)
    monkeypatch.setattr("parity.machine.devices.cores", lambda: 64)
    monkeypatch.setattr("parity.machine.devices.free_memory", lambda: 2**40)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the stand-ins above."""
    monkeypatch.setattr("parity.plugin.ending.GRACE_SECONDS", 2.0)
    monkeypatch.setattr(comparison, "judge_at", judge_at)
    monkeypatch.setattr(comparison, "explain_at", explain_at)
    monkeypatch.setattr(validate, "check_case", check_case)
    monkeypatch.setattr(te, "kernels", kernels)
