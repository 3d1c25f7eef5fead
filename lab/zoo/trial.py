"""Judge bugs planted in hosts by parity and by its rivals, relative to rounding noise and on kernels that differ."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from packaging.version import Version
from pydantic import PlainSerializer
from torch import Tensor

from lab.corpus.catalogue import PLANTED, PORTS, RIGHT, choose_ports
from lab.corpus.port import Port, at_size
from lab.threads import one_thread
from lab.zoo import rivals
from lab.zoo.rivals import Tensors
from parity import te
from parity.case.case import Case
from parity.case.validate import CheckedSize, check_case
from parity.comparison import compare_at, judge_at
from parity.judge.limits import Table, packaged
from parity.machine.process import processes
from parity.measuring.hosts.host import SIZES
from parity.measuring.record import Campaign, write_sections
from parity.numerics.kernel_choices import CHOICES, KernelChoice
from parity.passes.prepare import Prepared, cast, forget, prepare
from parity.report.environment import cpu_model
from parity.report.numbers import markdown_table
from parity.settings import check_precisions
from parity.te import PRECISIONS, Kernels, Precision, emulation, why_unavailable
from parity.te.attention_backend import AttentionBackend
from parity.user_error import UserError
from te_on_cpu import tensor_cores
from te_on_cpu.kernel_choices import ATTENTION_16_BIT_SUMS, kernel_choices

# The strength of a bug relative to the rounding noise that hides it.
#
# The *noise* is the right candidate at the judged precision minus the golden value. A bug's *effect* on a tensor is the
# candidate with the bug minus the candidate without it, on the same weights and inputs, both in FP32. CPU kernels do
# not use TF32 for this. On a GPU, TE always uses TF32, so differences in its rounding count as effect.
#
# * ``norm_ratio``: the norm of the effect over that of the noise. A rule that compares norms needs about 1.
# * ``coefficient``: the noise regressed on the effect, ``<noise, effect> / <effect, effect>``. This is what a matched
#   filter reads without the bug; with the bug it reads 1 more. Its root mean square over seeds is the scatter of the
#   filter, and the inverse of that is the signal-to-noise ratio. The noise is not assumed to be white.
#
# A bug that FP32 cannot have, such as a stale FP8 scale, is itself a rounding, so it has no effect that a filter could
# know. Its ``norm_ratio`` is what it adds to the noise or takes away, in squares: the root of ``|(|error with it| /
# |noise|)^2 - 1|``.


# With fewer seeds the scatter of a filter cannot be estimated.
LEAST_SEEDS = 3


# A number that the record keeps as text, with all digits, since JSON has no infinity.
_Text = Annotated[float, PlainSerializer(str)]


class Signal(NamedTuple):
    """The signal of a bug in one tensor at one seed.

    Attributes:
        norm_ratio: ``|effect| / |noise|``; infinite without noise.
        coefficient: ``<noise, effect> / |effect|^2``; NaN without effect, and for a bug that FP32 cannot have.
    """

    norm_ratio: _Text
    coefficient: _Text


def measure(effect: Tensor, noise: Tensor) -> Signal:
    """Measure a bug's effect relative to the noise. Both have the same shape and are finite."""
    effect, noise = effect.double().flatten(), noise.double().flatten()
    effect_norm, noise_norm = (torch.linalg.vector_norm(x).item() for x in (effect, noise))
    if effect_norm == 0.0:
        return Signal(0.0, math.nan)
    ratio = effect_norm / noise_norm if noise_norm else math.inf
    return Signal(ratio, torch.dot(noise, effect).item() / effect_norm**2)


def measure_added(error: Tensor, noise: Tensor) -> Signal:
    """Measure a bug that FP32 cannot have.

    Args:
        error: the candidate with the bug minus the golden value, finite.
        noise: the candidate without the bug minus the golden value, of the same shape.
    """
    error_norm, noise_norm = (torch.linalg.vector_norm(x.double()).item() for x in (error, noise))
    if noise_norm == 0.0:
        return Signal(math.inf if error_norm else 0.0, math.nan)
    return Signal(math.sqrt(abs((error_norm / noise_norm) ** 2 - 1.0)), math.nan)


def filter_ratio(coefficients: Sequence[float]) -> float:
    """Return the matched filter's signal-to-noise ratio from its readings without the bug, or NaN for too few seeds."""
    finite = [coefficient for coefficient in coefficients if math.isfinite(coefficient)]
    if len(finite) < LEAST_SEEDS:
        return math.nan
    scatter = math.sqrt(sum(coefficient**2 for coefficient in finite) / len(finite))
    return 1.0 / scatter if scatter else math.inf


# One trial: a host with or without a bug, at one size, precision and seed, judged by parity and by every rival.


CLEAN = ""


@dataclass(frozen=True)
class Trial:
    """A port to judge.

    Attributes:
        bug: the wrong port's name in the corpus, or ``CLEAN`` for a right one.
        host: the host's name.
        size: ``small`` or ``large``.
        precision: a name in ``parity.te.PRECISIONS``.
        seed: the seed of weights, inputs and output gradients.
    """

    bug: str
    host: str
    size: str
    precision: str
    seed: int


@dataclass(frozen=True)
class Verdict:
    """The verdicts of all rules on a trial.

    Attributes:
        status: parity's verdict, ``passed``, ``failed`` or ``error``.
        margin: parity's largest margin; infinite if something is not finite.
        worst: the tensor that has the largest margin.
        findings: the titles of parity's findings, in their order.
        tensors: how many tensors were compared.
        failed_tensors: how many of them parity rejects.
        rejected: how many of them each rival rejects.
        signals: the bug's signal in each tensor; empty for a clean trial.
        reason: why there was an error.
        seconds: how long parity's comparison took.
        backend: ``cpu`` or ``gpu``.
        messages: the messages of the findings, in the same order.
    """

    status: str
    margin: _Text
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
        """Return whether parity rejects the port."""
        return self.status == "failed"


@dataclass(frozen=True)
class _Ran:
    """A case's passes at one precision."""

    case: Case
    checked: CheckedSize
    prepared: Prepared
    candidate: Tensors


def judge(trial: Trial, kernels: Kernels) -> Verdict:
    """Run a trial. The verdict on a port that raises is ``error``."""
    try:
        with torch.random.fork_rng():
            torch.manual_seed(trial.seed)  # for a dropout that was left on
            return _judge(trial, kernels)
    except Exception as error:
        forget()
        return Verdict("error", math.nan, "", (), 0, 0, {}, reason=f"{type(error).__name__}: {error}")


def _judge(trial: Trial, kernels: Kernels) -> Verdict:
    precision = PRECISIONS[trial.precision]
    right, case = at_size(RIGHT[trial.host], trial.size), case_of(trial)
    (checked,) = check_case(case, kernels.te)
    # The search has no time limit here, so that it finds the same on every machine.
    result = compare_at(case, checked, precision, trial.seed, kernels, _calibration())
    if result.status == "error":
        return Verdict("error", math.nan, "", (), 0, 0, {}, reason=result.reason)
    ran = _run(case, checked, precision, trial.seed, kernels)
    golden = rivals.golden(ran.prepared)
    compared = rivals.Compared(
        ran.candidate,
        golden,
        rivals.low_precision(ran.prepared, precision.dtype),
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
        signals=_signals(PORTS[trial.bug, trial.host], ran, right, precision, trial.seed, kernels) if trial.bug else {},
        seconds=result.seconds,
        backend=kernels.backend,
        messages=tuple(finding.message for finding in result.findings),
    )


@functools.lru_cache(maxsize=1)
def _calibration() -> Table:
    return packaged()


def case_of(trial: Trial) -> Case:
    """Return a trial's port at its size."""
    case = PORTS[trial.bug, trial.host].case if trial.bug else RIGHT[trial.host]
    return at_size(case, trial.size)


def _run(case: Case, checked: CheckedSize, precision: Precision, seed: int, kernels: Kernels) -> _Ran:
    prepared = prepare(case, checked, precision.dtype, seed, kernels)
    return _Ran(case, checked, prepared, rivals.candidate(case, checked, prepared, precision, seed, kernels))


def _signals(
    port: Port, mistaken: _Ran, host: Case, precision: Precision, seed: int, kernels: Kernels
) -> dict[str, Signal]:
    (checked,) = check_case(host, kernels.te)
    right = _run(host, checked, precision, seed, kernels)
    golden = rivals.golden(right.prepared)
    noise = rivals.difference(right.candidate, golden)
    if not port.occurs_at("fp32"):
        error = rivals.difference(mistaken.candidate, golden)
        return {name: measure_added(error[name], noise[name]) for name in error.keys() & noise.keys()}
    effect = rivals.difference(_in_fp32(mistaken, seed, kernels), _in_fp32(right, seed, kernels))
    return {name: measure(effect[name], noise[name]) for name in effect.keys() & noise.keys()}


def _in_fp32(ran: _Ran, seed: int, kernels: Kernels) -> Tensors:
    """Return the candidate in FP32, without TF32, on the weights and inputs that were rounded to the precision."""
    inputs, probe = (cast(drawn, torch.float32) for drawn in (ran.prepared.inputs, ran.prepared.probe))
    prepared = dataclasses.replace(ran.prepared, inputs=inputs, probe=probe)
    with tensor_cores.left_out():
        return rivals.candidate(ran.case, ran.checked, prepared, PRECISIONS["fp32"], seed, kernels)


# Many trials: all trials of a plan, in processes, each recorded as soon as it is judged.


@dataclass(frozen=True)
class Plan:
    """Say what a run judges.

    Attributes:
        ports: the wrong ports to judge; their hosts' right ports are judged as well.
        precisions: the precisions of all trials, as far as the mistake can occur there.
        seeds: for each size, ``small`` or ``large``, how many seeds of weights and inputs, from 0.
    """

    ports: tuple[Port, ...]
    precisions: tuple[str, ...]
    seeds: Mapping[str, int]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The ports' hosts, each once."""
        return tuple(dict.fromkeys(port.host for port in self.ports))

    def trials(self) -> list[Trial]:
        """Return all trials, right ports first."""
        places = [
            (size, precision, seed)
            for size, count in self.seeds.items()
            for seed in range(count)
            for precision in self.precisions
        ]
        clean = [Trial(CLEAN, host, *place) for place in places for host in self.hosts]
        mistaken = [Trial(port.name, port.host, *place) for place in places for port in self.ports]
        return [trial for trial in clean + mistaken if occurs(trial)]


def planned(
    pattern: str, precisions: Sequence[str], sizes: Sequence[str], seeds: Sequence[int]
) -> tuple[Plan, dict[str, str]]:
    """Return the plan that a user asks for, and the precisions that this machine cannot run, each with the reason.

    Args:
        pattern: a shell pattern of names of ports, hosts or groups of the corpus.
        precisions: their names; empty for all that this machine runs.
        sizes: names in ``SIZES``; empty for both.
        seeds: how many seeds, from 0: one number for each size, or one for all.

    Raises:
        UserError: if no port has such a name, a precision or size is unknown, seeds and sizes do not match, or this
            machine runs none of the precisions.
    """
    check_precisions(precisions, "--precision")
    unknown = [name for name in sizes if name not in SIZES]
    if unknown:
        raise UserError(f"there is no size {unknown[0]!r}; there are {', '.join(SIZES)}")
    asked = tuple(precisions) or tuple(PRECISIONS)
    left_out = unavailable(asked)
    available = tuple(name for name in asked if name not in left_out)
    if not available:
        raise UserError(f"this machine runs none of {', '.join(asked)}: {left_out[asked[0]]}")
    ports = tuple(port for port in choose_ports(pattern) if port.titles)
    of_sizes = tuple(sizes) or SIZES
    if len(seeds) not in (1, len(of_sizes)) or min(seeds) < 1:
        raise UserError(f"--seeds must be a count for all sizes or one for each of {', '.join(of_sizes)}, at least 1")
    counts = dict(zip(of_sizes, [*seeds] * len(of_sizes) if len(seeds) == 1 else seeds, strict=True))
    return Plan(ports, available, counts), left_out


def run(plan: Plan, path: Path, workers: int) -> dict[Trial, Verdict]:
    """Judge the trials that the record lacks, and return all of the plan's verdicts.

    A record belongs to one version of parity and TE. Start another one after a change.

    Args:
        plan: what to judge.
        path: the record, JSON lines.
        workers: how many processes to use, each with one thread; a single worker is this process.
    """
    campaign: Campaign[Trial, Verdict] = Campaign(path, Verdict)
    with one_thread():
        return campaign.complete(plan.trials(), _judge_here, "judging", workers if workers > 1 else None)


def unavailable(precisions: Sequence[str]) -> dict[str, str]:
    """Return the precisions that this machine cannot run, each with the reason."""
    kernels = te.kernels()
    reasons = {name: why_unavailable(PRECISIONS[name], kernels) for name in precisions}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _judge_here(trial: Trial) -> Verdict:
    return judge(trial, te.kernels())


def occurs(trial: Trial) -> bool:
    """Return whether a trial's host has its size and runs at its precision, and its mistake can occur there."""
    if SIZES.index(trial.size) >= len(RIGHT[trial.host].sizes):
        return False
    if trial.bug == CLEAN:
        return RIGHT[trial.host].runs_at(trial.precision)
    return PORTS[trial.bug, trial.host].occurs_at(trial.precision)


# The cost of allowing for choices that other faithful kernels may make: right ports rejected, and bugs detected.
#
# Each choice of ``parity.numerics.kernel_choices`` is switched on in the CPU kernels. Right ports must pass on them.
# Bugs are judged with and without the allowance, on kernels that make the choice and on those that do not.


_NO_CHOICE = ""  # the default kernels


@dataclass(frozen=True)
class Asked:
    """A trial of the zoo on certain kernels.

    Attributes:
        trial: a port, right or with a bug.
        kernels: the name of a choice that is switched on, or ``_NO_CHOICE``.
        granted: whether parity allows for the choices of other kernels.
    """

    trial: Trial
    kernels: str
    granted: bool


def is_rejected(asked: Asked) -> bool | None:
    """Judge a trial without searching for the cause, and return None if it could not be compared."""
    trial, kernels = asked.trial, te.kernels("cpu")
    case = case_of(trial)
    (checked,) = check_case(case, kernels.te)
    attention: AttentionBackend | None = "unfused" if asked.kernels == ATTENTION_16_BIT_SUMS else None
    with kernel_choices(*([asked.kernels] if asked.kernels else [])):
        judged = judge_at(
            *(case, checked, PRECISIONS[trial.precision], trial.seed, kernels, packaged(), attention),
            other_kernels=asked.granted,
        )
    return None if judged.result.status in ("error", "skipped") else judged.result.status == "failed"


def shown(choice: KernelChoice) -> str | None:
    """Return the precision to try a choice in: the first in which it can show on this machine, or None."""
    if choice.before and Version(te.version()) >= Version(choice.before):
        return None
    kernels = te.kernels("cpu")
    names = (name for name in choice.precisions if why_unavailable(PRECISIONS[name], kernels) is None)
    return next(names, None)


def asked_of(seeds: int) -> list[Asked]:
    """List everything to judge, at the zoo's small size."""
    tried = {choice.name: precision for choice in CHOICES if (precision := shown(choice)) is not None}
    precisions = tuple(dict.fromkeys(tried.values()))
    ports = tuple(port for ports in PLANTED.values() for port in ports)
    trials = Plan(ports, precisions, {"small": seeds}).trials()
    places = [(_NO_CHOICE, precision) for precision in precisions] + list(tried.items())
    return [
        Asked(trial, kernels, granted)
        for (kernels, precision), trial, granted in itertools.product(places, trials, (False, True))
        if trial.precision == precision
    ]


def run_on_choices(seeds: int, workers: int, path: Path) -> Path:
    """Judge everything and write the page.

    Args:
        seeds: how many seeds, from 0.
        workers: how many processes to use.
        path: the page's path.
    """
    asked = asked_of(seeds)
    with processes(workers) as pool:
        rejected = dict(zip(asked, pool.map(is_rejected, asked, chunksize=8), strict=True))
    return write_sections(path, _sections(rejected, seeds), "python -m lab kernel-freedoms")


def _sections(rejected: Mapping[Asked, bool | None], seeds: int) -> Iterable[str]:
    yield "# Choices that faithful kernels may make, and the cost of granting them"
    yield (
        f"Emulated: TransformerEngine {te.version()}'s own Python on parity's CPU kernels, as an "
        f"{emulation.gpu_name()} on {cpu_model()}. Each choice is "
        f"switched on in the CPU kernels (`PARITY_KERNEL_CHOICES`) for the bug zoo at small size with {seeds} seeds. "
        "A choice whose effect leans (is systematic) is granted along that effect, one that is noise by a further run "
        "of the rounding model, both only if a port fails without them ([statistics](../docs/statistics.md))."
    )
    yield "## The choices"
    rows = [
        [f"`{one.name}`", ", ".join(one.gpus), one.does, "leans" if one.leans else "noise", one.source, one.measured]
        for one in CHOICES
    ]
    headers = ["choice", "GPUs", "what kernels do", "its effect", "source", "on a GPU"]
    yield markdown_table(rows, headers, left=6)
    yield "## Right ports that are rejected, and bugs that are detected"
    kinds = dict.fromkeys((asked.kernels, asked.trial.precision) for asked in rejected)
    headers = ["kernels", "precision", "right ports", "rejected, nothing granted", "rejected"]
    headers += ["bugs", "detected, nothing granted", "detected"]
    yield markdown_table([_row(rejected, *kind) for kind in kinds], headers, left=2)
    yield (
        "A bug is detected if the port with it is rejected. Where nothing is granted and right ports are rejected, "
        "detection says little."
    )
    lost = [asked for asked, verdict in rejected.items() if asked.granted and verdict is False and asked.trial.bug]
    lost = [one for one in lost if one.kernels == _NO_CHOICE and rejected[Asked(one.trial, _NO_CHOICE, False)]]
    yield "## Bugs that are missed on the default kernels because of what is granted"
    told = [f"- `{one.trial.bug}` in `{one.trial.host}`, {one.trial.precision}, seed {one.trial.seed}" for one in lost]
    yield "\n".join(told) or "None."
    without = [choice.name for choice in CHOICES if shown(choice) is None]
    if without:
        yield f"Not tried, since they show in no precision here, or not with this TE: {', '.join(without)}."


def _row(rejected: Mapping[Asked, bool | None], kernels: str, precision: str) -> Sequence[str]:
    def count(bug: bool, granted: bool) -> tuple[int, int]:
        verdicts = [
            verdict
            for asked, verdict in rejected.items()
            if (asked.kernels, asked.trial.precision, asked.granted) == (kernels, precision, granted)
            and (asked.trial.bug != CLEAN) == bug
            and verdict is not None
        ]
        return sum(verdicts), len(verdicts)

    (alarms, ports), (alarms_granted, _) = count(False, False), count(False, True)
    (hits, bugs), (hits_granted, _) = count(True, False), count(True, True)
    name = f"`{kernels}`" if kernels else "default"
    return [name, f"`{precision}`", *map(str, (ports, alarms, alarms_granted, bugs, hits, hits_granted))]
