"""One trial: a bug in a host at one size, precision and seed, judged by parity and by every rival; or no bug."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from parity.case import Case
from parity.cast import cast
from parity.comparison import compare_at
from parity.cpu.products import tf32
from parity.declaring.validate import CheckedSize, check_case
from parity.limits.table import Table, packaged
from parity.precision import PRECISIONS, Precision
from parity.prepare import Prepared, forget, prepare
from parity.te import Kernels
from parity.zoo import passes, rivals, signal
from parity.zoo.bug import Bug, planted
from parity.zoo.catalogue import BUGS
from parity.zoo.hosts.case import SIZES
from parity.zoo.hosts.catalogue import HOSTS
from parity.zoo.passes import Tensors
from parity.zoo.signal import Signal

CLEAN = ""


@dataclass(frozen=True)
class Trial:
    """What is judged.

    Attributes:
        bug: a name of the catalogue, or ``CLEAN``.
        host: a name of the hosts.
        size: ``small`` or ``large``.
        precision: a name of ``parity.precision.PRECISIONS``.
        seed: of weights, inputs and output gradients.
    """

    bug: str
    host: str
    size: str
    precision: str
    seed: int


@dataclass(frozen=True)
class Verdict:
    """What every rule says of a trial.

    Attributes:
        status: parity's, ``passed``, ``failed`` or ``error``.
        margin: parity's largest; infinite where something is not finite.
        worst: the tensor that has it.
        findings: parity's titles, the first first.
        tensors: how many tensors were compared.
        failed_tensors: how many of them parity rejects.
        rejected: how many of them each rival rejects.
        signals: the bug's in each tensor; empty for a clean trial.
        reason: why there was an error.
        seconds: of parity's comparison.
        backend: ``cpu`` or ``gpu``.
        messages: of the findings, in the same order.
    """

    status: str
    margin: float
    worst: str
    findings: tuple[str, ...]
    tensors: int
    failed_tensors: int
    rejected: dict[str, int]
    signals: dict[str, Signal] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    backend: str = "cpu"
    messages: tuple[str, ...] = ()

    @property
    def detected(self) -> bool:
        """Whether parity rejects the port."""
        return self.status == "failed"


@dataclass(frozen=True)
class _Ran:
    """A case's passes at one precision."""

    case: Case
    checked: CheckedSize
    prepared: Prepared
    candidate: Tensors


def judge(trial: Trial, kernels: Kernels) -> Verdict:
    """Run a trial; a port that raises is an ``error``."""
    try:
        with torch.random.fork_rng():
            torch.manual_seed(trial.seed)  # for a dropout that was left on
            return _judge(trial, kernels)
    except Exception as error:
        forget()
        return Verdict("error", math.nan, "", (), 0, 0, {}, reason=f"{type(error).__name__}: {error}")


def _judge(trial: Trial, kernels: Kernels) -> Verdict:
    precision = PRECISIONS[trial.precision]
    host = at_size(HOSTS[trial.host], trial.size)
    bug = BUGS[trial.bug] if trial.bug else None
    case = planted(bug, host) if bug else host
    (checked,) = check_case(case, kernels.te)
    # The search has no limit of real time here: what is found is the same on every machine.
    result = compare_at(case, checked, precision, trial.seed, kernels, _calibration())
    if result.status == "error":
        return Verdict("error", math.nan, "", (), 0, 0, {}, reason=result.reason)
    ran = _run(case, checked, precision, trial.seed, kernels)
    golden = passes.golden(ran.prepared)
    compared = rivals.Compared(
        ran.candidate,
        golden,
        passes.low_precision(ran.prepared, precision.dtype),
        precision,
        rivals.module_of(case.build(kernels.te, checked.size).candidate),
    )
    return Verdict(
        status=result.status,
        margin=result.margin,
        worst=result.worst.label if result.worst else "",
        findings=tuple(finding.title for finding in result.findings),
        tensors=len(golden),
        failed_tensors=sum(not tensor.passed for tensor in result.tensors),
        rejected={name: len(rivals.rejected(rule, compared)) for name, rule in rivals.RULES.items()},
        signals=_signals(bug, ran, host, precision, trial.seed, kernels) if bug else {},
        seconds=result.seconds,
        backend=kernels.backend,
        messages=tuple(finding.message for finding in result.findings),
    )


@functools.lru_cache(maxsize=1)
def _calibration() -> Table:
    return packaged()


def at_size(host: Case, size: str) -> Case:
    """Return a host with this size alone."""
    return dataclasses.replace(host, sizes=(host.sizes[SIZES.index(size)],))


def _run(case: Case, checked: CheckedSize, precision: Precision, seed: int, kernels: Kernels) -> _Ran:
    prepared = prepare(case, checked, precision.dtype, seed, kernels)
    return _Ran(case, checked, prepared, passes.candidate(case, checked, prepared, precision, seed, kernels))


def _signals(
    bug: Bug, mistaken: _Ran, host: Case, precision: Precision, seed: int, kernels: Kernels
) -> dict[str, Signal]:
    (checked,) = check_case(host, kernels.te)
    right = _run(host, checked, precision, seed, kernels)
    golden = passes.golden(right.prepared)
    noise = passes.difference(right.candidate, golden)
    if not bug.occurs_at("fp32"):
        error = passes.difference(mistaken.candidate, golden)
        return {name: signal.measure_added(error[name], noise[name]) for name in error.keys() & noise.keys()}
    effect = passes.difference(_in_fp32(mistaken, seed, kernels), _in_fp32(right, seed, kernels))
    return {name: signal.measure(effect[name], noise[name]) for name in effect.keys() & noise.keys()}


def _in_fp32(ran: _Ran, seed: int, kernels: Kernels) -> Tensors:
    """The candidate in FP32, without TF32, on the weights and inputs that were rounded to the precision."""
    inputs, probe = (cast(drawn, torch.float32) for drawn in (ran.prepared.inputs, ran.prepared.probe))
    prepared = dataclasses.replace(ran.prepared, inputs=inputs, probe=probe)
    with tf32.left_out():
        return passes.candidate(ran.case, ran.checked, prepared, PRECISIONS["fp32"], seed, kernels)


def to_json(verdict: Verdict) -> dict[str, Any]:
    """JSON types; numbers that JSON lacks become strings such as ``inf``."""
    record = dataclasses.asdict(verdict)
    record["margin"] = str(verdict.margin)
    record["signals"] = {
        name: [str(entry.norm_ratio), str(entry.coefficient)] for name, entry in verdict.signals.items()
    }
    return record


def from_json(record: dict[str, Any]) -> Verdict:
    """The inverse of ``to_json``."""
    signals = {name: Signal(*map(float, entry)) for name, entry in record["signals"].items()}
    texts = {name: tuple(record.get(name, ())) for name in ("findings", "messages")}
    return Verdict(**{**record, **texts, "margin": float(record["margin"]), "signals": signals})
