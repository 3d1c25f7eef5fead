"""Judge ports stage by stage: no stage of a right port may be flagged, and a wrong port's where its mistake is.

A stage is a part of the reference between values that both sides compute (``parity.stages``). Right ports are the gate:
a flagged stage of theirs is a wrong match, or a limit that is too narrow. Wrong ports show the power.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from torch import nn

from lab.corpus.catalogue import MODELS, RIGHT, SMALL
from lab.corpus.placed import Placed
from lab.corpus.placed_ports import BY_FAMILY
from lab.corpus.port import Port, at_size
from lab.studies.settings import check_names, gpu_with, why_nowhere
from lab.studies.stages.places import Place, is_held, places_of
from lab.threads import one_thread
from parity import shown, te
from parity.case import registry
from parity.case.case import Case
from parity.case.validate import check_case
from parity.comparison import judge_at, observe_port
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.measuring import record, right_ports
from parity.measuring.hosts import HOSTS
from parity.measuring.hosts.host import SIZES
from parity.measuring.record import Campaign, FourDigits
from parity.mistakes.catalogue import hypotheses
from parity.passes.modes import usual_modes
from parity.passes.prepare import Prepared, prepare
from parity.stages.judge import Judged, Stage
from parity.stages.locate import judge_stages
from parity.te import PRECISIONS
from parity.trace.calls import Misfit
from parity.trace.trace import ordinal
from parity.user_error import UserError

RECORD = "stages.jsonl"
_ROOT = Path(__file__).parents[3]


# The ports, by group and name: right ones by where they come from, wrong ones by their table.


@dataclass(frozen=True)
class Subject:
    """A port to judge.

    Attributes:
        case: the port and its reference.
        find_places: returns the places of its mistake in the reference; None if the port is right.
    """

    case: Case
    find_places: Callable[[nn.Module], tuple[Place, ...]] | None = None


def _list_small_ports() -> Iterable[tuple[str, Subject]]:
    """Yield the ports that are declared right, then the unchanged ports of the other hosts, a few of which are not."""
    every = [port for ports in SMALL.values() for port in ports]
    right = {
        _name_port(port): dataclasses.replace(port.case, precisions=port.precisions or port.case.precisions)
        for port in every
        if not port.titles
    }
    right |= {port.host: port.right for port in every if f"{port.host}: right" not in right}
    return ((name, Subject(case)) for name, case in right.items())


def _list_files(pattern: str) -> Iterable[tuple[str, Subject]]:
    for path in sorted(_ROOT.glob(pattern)):
        for case in registry.load_file(path):
            yield case.name, Subject(case)


def _list_wrong_ports(table: str) -> Iterable[tuple[str, Subject]]:
    for port in MODELS[table]:
        yield _name_port(port), Subject(port.case, partial(places_of, port.change))


def _list_placed_ports() -> Iterable[tuple[str, Subject]]:
    for row in (row for rows in BY_FAMILY.values() for row in rows):
        yield _name_port(row.port), Subject(row.port.case, partial(_find_place, row))


def _find_place(row: Placed, reference: nn.Module) -> tuple[Place, ...]:
    return (Place(row.module, row.calls, row.backward),)


def _name_port(port: Port) -> str:
    return f"{port.host}: {port.name}"


RIGHT_GROUPS: Mapping[str, Callable[[], Iterable[tuple[str, Subject]]]] = {
    "drawn": lambda: ((name, Subject(case)) for name, case in right_ports.MODELS.items()),
    "packaged": lambda: (
        (f"{name} {size}", Subject(at_size(case, size))) for name, case in HOSTS.items() for size in SIZES
    ),
    "models": lambda: ((name, Subject(case)) for name, case in RIGHT.items() if name.startswith("models.")),
    "small": _list_small_ports,
    "placed_hosts": lambda: ((row.port.host, Subject(row.port.right)) for rows in BY_FAMILY.values() for row in rows),
    "hugging_face": lambda: _list_files("examples/hugging_face/*.py"),
    "cases": lambda: _list_files("cases/[!_]*.py"),
}
"""Right ports, by where they come from."""
WRONG_GROUPS: Mapping[str, Callable[[], Iterable[tuple[str, Subject]]]] = {
    **{table: partial(_list_wrong_ports, table) for table in MODELS},
    "placed": _list_placed_ports,
}
"""Wrong ports whose places are known, by table; no rule of stages was made for those of ``placed``."""
GROUPS = {**RIGHT_GROUPS, **WRONG_GROUPS}


@functools.cache
def subjects(group: str) -> Mapping[str, Subject]:
    """Return the ports of a group by name.

    Raises:
        UserError: if they come from a file that cannot be imported, as without transformers.
    """
    return dict(GROUPS[group]())


# The measurement: a verdict without a search, then the stages.


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        groups: where the ports come from: keys of ``RIGHT_GROUPS`` and ``WRONG_GROUPS``.
        ports: shell patterns, one of which must match a port's name.
        precisions: the precisions at which every port is judged that runs there.
        seeds: number of seeds of each port.
        workers: how many processes judge in parallel; 0 to judge in this process.
    """

    groups: tuple[str, ...] = tuple(GROUPS)
    ports: tuple[str, ...] = ("*",)
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
    seeds: int = 1
    workers: int = 0


FULL = Settings()
QUICK = Settings(
    ("drawn", "packaged", "models", "kinds"),
    ("model_00[01]", "linear small", "models.attention", "models.norm_mlp", "models.norm_mlp: no norm"),
    ("bf16",),
)


@dataclass(frozen=True)
class Trial:
    """A port at a precision and seed.

    Attributes:
        group: a key of ``GROUPS``.
        port: the port's name in its group.
        precision: a name in ``PRECISIONS``.
        seed: the seed of weights and inputs.
    """

    group: str
    port: str
    precision: str
    seed: int


@dataclass(frozen=True)
class Direction:
    """Hold what the stages of one direction show.

    Attributes:
        stages: how many there are.
        evidence: how many ends were matched by each kind of evidence.
        ratios: the ratios of the stages that compute.
        gains: their gains.
    """

    stages: int = 0
    evidence: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ratios: tuple[FourDigits, ...] = ()
    gains: tuple[FourDigits, ...] = ()

    @classmethod
    def of(cls, judged: Iterable[Judged]) -> Direction:
        """Return what these stages show."""
        judged = list(judged)
        computing = [one for one in judged if one.stage.computes]
        return cls(
            len(judged),
            Counter(one.stage.evidence for one in judged),
            tuple(one.ratio for one in computing),
            tuple(one.gain for one in computing),
        )


@dataclass(frozen=True)
class Flagged:
    """A stage beyond the limits.

    Attributes:
        end: the call whose value, or its gradient, ends the stage, or the parameter whose gradient does, in words.
        backward: whether it ends in a gradient.
        ratio: its ratio.
        gain: its gain.
        evidence: why its end is the candidate's value.
        watched: the candidate's function that returned this value.
        calls: module and function of each of its calls.
        holds: whether one of them is a call that the port's mistake is about; False for right ports.
        probed: whether the port ran on its probing inputs.
    """

    end: str
    backward: bool
    ratio: FourDigits
    gain: FourDigits
    evidence: str
    watched: str
    calls: tuple[str, ...]
    holds: bool
    probed: bool = False


@dataclass(frozen=True)
class Seen:
    """Hold what the stages of a port show, next to the verdict.

    Attributes:
        status: the verdict on the whole port; nothing else is measured if there is none.
        margin: its margin.
        reason: why there is no verdict, or why the stages cannot be judged; empty if both were reached.
        verdict_seconds: processor time of the verdict, without a search.
        stage_seconds: processor time of observing the port and judging its stages on its own inputs.
        forward: the stages that end in values.
        backward: the stages that end in gradients.
        unmatched: how many values of the candidate fitted nothing.
        flagged: the stages beyond the limits; if there are none, the forward ones on probing inputs.
        hypotheses: of a wrong port with flagged stages, how many mistakes the catalogue knows of.
        touching: how many of these edit a call of a flagged stage.
    """

    status: str
    margin: FourDigits
    reason: str
    verdict_seconds: FourDigits
    stage_seconds: FourDigits = 0.0
    forward: Direction = dataclasses.field(default_factory=Direction)
    backward: Direction = dataclasses.field(default_factory=Direction)
    unmatched: int = 0
    flagged: tuple[Flagged, ...] = ()
    hypotheses: int = 0
    touching: int = 0


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Trial, Seen], Settings]:
    """Judge what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a group or precision is unknown, or as for ``subjects``.
    """
    check_names("groups", settings.groups, GROUPS)
    check_names("precisions", settings.precisions, PRECISIONS)
    campaign: Campaign[Trial, Seen] = Campaign(folder / RECORD, Seen, code=record.code_of(__name__))
    with one_thread():
        return campaign.complete(trials(settings), seen, "judging", settings.workers or None), settings


def trials(settings: Settings) -> list[Trial]:
    """Return all trials, by precision and group."""
    kernels = te.kernels("cpu")
    return [
        Trial(group, name, precision, seed)
        for precision in settings.precisions
        if not why_nowhere(PRECISIONS[precision], kernels)
        for group in settings.groups
        for name, subject in subjects(group).items()
        if any(fnmatch(name, pattern) for pattern in settings.ports) and subject.case.runs_at(precision)
        for seed in range(settings.seeds)
    ]


def seen(trial: Trial) -> Seen:
    """Judge a port as a whole, at its first size, and then its stages."""
    kernels, precision = te.kernels("cpu"), PRECISIONS[trial.precision]
    subject = subjects(trial.group)[trial.port]
    with gpu_with(precision, kernels):
        try:
            checked = check_case(subject.case, kernels.te)[0]
        except UserError as error:
            return Seen("error", math.nan, shown.raised(error), 0.0)
        began = time.process_time()
        result = judge_at(subject.case, checked, precision, trial.seed, kernels, packaged()).result
        verdict = Seen(result.status, result.margin, result.reason, time.process_time() - began)
        if result.status not in ("passed", "failed"):
            return verdict
        request = Request(subject.case, checked, precision, trial.seed, kernels, packaged())
        with usual_modes():
            prepared = prepare(subject.case, checked, precision.dtype, trial.seed, kernels)
            try:
                return _look_at_stages(verdict, subject, request, prepared)
            except Misfit as error:
                return dataclasses.replace(verdict, reason=shown.raised(error.__cause__ or error))


def _look_at_stages(verdict: Seen, subject: Subject, request: Request, prepared: Prepared) -> Seen:
    began = time.process_time()
    port = observe_port(request, prepared)
    prepared = dataclasses.replace(prepared, made=port.choices)
    stages = judge_stages(request, prepared, port.freedoms)
    found = dataclasses.replace(
        verdict,
        stage_seconds=time.process_time() - began,
        forward=Direction.of(one for one in stages.all if not one.stage.backward),
        backward=Direction.of(one for one in stages.all if one.stage.backward),
        unmatched=len(stages.unmatched),
    )
    is_probed = not stages.flagged and bool(prepared.probed) and not prepared.lookups  # as in the search
    if is_probed:
        prepared = prepared.on_probes()
        stages = judge_stages(request, prepared, port.freedoms)
    places = subject.find_places(prepared.reference) if subject.find_places else ()
    trace = stages.graph.trace
    # On probing inputs, the verdict compares outputs alone.
    beyond = [one for one in stages.flagged if not (is_probed and one.stage.backward)]
    found = dataclasses.replace(
        found, flagged=tuple(_describe_flagged(one, is_held(places, one.stage, trace), is_probed) for one in beyond)
    )
    if not beyond or not places:
        return found
    sites = {call.site for one in beyond for call in one.stage.calls}
    known = list(hypotheses(prepared, trace, broken=[]))
    touching = sum(any(edit.site in sites for edit in one.edits) for one in known)
    return dataclasses.replace(found, hypotheses=len(known), touching=touching)


def _describe_flagged(judged: Judged, holds: bool, is_probed: bool) -> Flagged:
    stage = judged.stage
    return Flagged(
        _describe_end(stage),
        stage.backward,
        judged.ratio,
        judged.gain,
        stage.evidence,
        stage.watched,
        tuple(f"{call.module} {call.name}" for call in stage.calls),
        holds,
        is_probed,
    )


def _describe_end(stage: Stage) -> str:
    if stage.parameter:
        return f"gradient of {stage.parameter}"
    module, invocation, function, count = stage.end
    again = f", {ordinal(invocation + 1)} call" if invocation else ""
    end = f"{ordinal(count + 1)} {function} of {module or 'the module'}{again}"
    return f"gradient at the {end}" if stage.backward else end
