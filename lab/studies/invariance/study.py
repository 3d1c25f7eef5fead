"""Try all axes of invariance on right and wrong ports, and on TE's modules, a Llama and a mixture at all precisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lab.corpus.catalogue import RIGHT as OF_CORPUS
from lab.corpus.port import at_size
from lab.studies import reporting
from lab.studies.invariance.ports import MIXTURE, RIGHT, WRONG
from lab.studies.settings import gpu_with
from lab.threads import one_thread
from parity import te
from parity.api import compare
from parity.case.case import Case
from parity.case.validate import check_case
from parity.cli.axes import describe_cell
from parity.invariance import Outcome, try_axes
from parity.judge.limits import packaged
from parity.judge.request import Request
from parity.measuring import record
from parity.measuring.hosts import HOSTS
from parity.measuring.record import Campaign, FourDigits
from parity.settings import AXES, PRECISION_NAMES
from parity.te import Backend, precision_named
from parity.user_error import UserError

RECORD = "invariance.jsonl"
MODULES: Mapping[str, Case] = {
    "`Linear`": OF_CORPUS["linear"],
    "`LayerNormLinear`": OF_CORPUS["norm_linear"],
    "`RMSNorm`": OF_CORPUS["rmsnorm"],
    "`LayerNormMLP`, SwiGLU": OF_CORPUS["swiglu_mlp"],
    "`DotProductAttention`, causal": OF_CORPUS["causal_attention"],
    "`DotProductAttention`, padding": OF_CORPUS["padded_attention"],
    "`MultiheadAttention`, RoPE": OF_CORPUS["attention"],
    "`TransformerLayer`, GPT": OF_CORPUS["gpt_layer"],
    "`TransformerLayer`, Llama": OF_CORPUS["llama_layer"],
    "Llama of `te.Linear` and `te.RMSNorm`, with attention": OF_CORPUS["models.llama"],
    "mixture of four `te.Linear`": MIXTURE.case(),
}
_OTHERS = {f"corpus: {name}": case for name, case in HOSTS.items()}


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        precisions: those of the modules.
        of_ports: those of right and wrong ports.
        most: of how many right ones, of wrong ones and of modules at most.
        backend: ``cpu``, or ``gpu`` for TE's compiled kernels.
        workers: how many processes run in parallel; 0 for this process.
    """

    precisions: tuple[str, ...] = PRECISION_NAMES
    of_ports: tuple[str, ...] = ("fp32", "bf16", "fp8_current")
    most: int = 100
    backend: Backend = "cpu"
    workers: int = 0


FULL = Settings()
QUICK = Settings(precisions=("bf16",), of_ports=("bf16",), most=2)


@dataclass(frozen=True)
class Trial:
    """A port at one precision; ``kind`` is ``right``, ``wrong`` or ``module``."""

    kind: str
    name: str
    precision: str
    backend: Backend = "cpu"


@dataclass(frozen=True)
class Said:
    """What became of it.

    Attributes:
        status: that of an ordinary comparison; ``refused`` if the pair does not run.
        cells: what the command shows for each axis.
        told: what it says of those that depend.
        change: the largest change of any tensor along any axis.
    """

    status: str
    cells: dict[str, str]
    told: dict[str, str]
    change: FourDigits


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Trial, Said], Settings]:
    """Try what is missing from the folder's record, and return the arguments of ``write``, except the folder."""
    campaign: Campaign[Trial, Said] = Campaign(folder / RECORD, Said, code=record.code_of(__name__))
    with one_thread():
        return campaign.complete(_list_trials(settings), _try_port, "trying", settings.workers or None), settings


def _list_trials(settings: Settings) -> list[Trial]:
    kinds = {"right": settings.of_ports, "wrong": settings.of_ports, "module": settings.precisions}
    return [
        Trial(kind, name, precision, settings.backend)
        for kind, precisions in kinds.items()
        for name in list(_cases_of(kind))[: settings.most]
        for precision in precisions
    ]


def _cases_of(kind: str) -> Mapping[str, Case]:
    wrong = {one.name: one.case for one in WRONG}
    return {"right": {**RIGHT, **_OTHERS}, "wrong": wrong, "module": MODULES}[kind]


def _try_port(one: Trial) -> Said:
    kernels, precision = te.kernels(one.backend), precision_named(one.precision)
    case = _cases_of(one.kind)[one.name]
    case = replace(at_size(case, "small") if len(case.sizes) > 1 else case, precisions=None)
    with gpu_with(precision, kernels):
        try:
            (result,) = compare(case, [precision], backend=one.backend, diagnose=False)
            outcomes: Sequence[Outcome] = ()
            if result.status in ("passed", "failed"):
                (checked,) = check_case(case, kernels.te)
                outcomes = try_axes(Request(case, checked, precision, 0, kernels, packaged()))
        except UserError:
            return Said("refused", {}, {}, 0.0)
    return Said(
        result.status if outcomes else "refused",
        {outcome.axis: describe_cell(outcome) for outcome in outcomes},
        {outcome.axis: outcome.told for outcome in outcomes if outcome.verdict == "depends"},
        max((outcome.change for outcome in outcomes), default=0.0),
    )


def write(found: Mapping[Trial, Said], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "invariance.md", _sections(found, settings))


def _sections(found: Mapping[Trial, Said], settings: Settings) -> Iterator[str]:
    yield "# Invariance"
    yield (
        "Whether results depend on how the same tokens were batched, padded, packed, cut, decoded or recomputed "
        "([what a pass proves](../../docs/what-a-pass-proves.md#invariance)). MXFP8 and NVFP4 run on an emulated "
        "Blackwell, the rest on an emulated Hopper. " + reporting.made_on(te.kernels(settings.backend))
    )
    yield "## Right and wrong ports"
    yield (
        "Wrong ports compute something that depends on its neighbours, and agree with their reference on the usual "
        "inputs: one sequence, no padding, one or two documents, the whole sequence as a prompt. *Passes* counts ports "
        "that pass an ordinary comparison; *found* counts those whose axis is `DEPENDS`."
    )
    rows = []
    for kind in ("right", "wrong"):
        for precision in settings.of_ports:
            said = [one for trial, one in found.items() if (trial.kind, trial.precision) == (kind, precision)]
            ran = [one for one in said if one.status != "refused"]
            counts = len(ran), sum(one.status == "passed" for one in ran), sum(bool(one.told) for one in ran)
            rows.append([kind, precision, *map(str, (*counts, len(said) - len(ran)))])
    yield reporting.texts(rows, ["ports", "precision", "run", "passes", "found", "refused by TE's kernels"])
    yield (
        "A right port that is found has TE's attention with a padding mask, whose flash and fused kernels take the "
        "mask for lengths: with padding on the left, they attend to other keys. That is a property of TE. "
        "Wrong ports that are not found at FP8 change results by less than current scaling does."
    )
    yield "### What was found"
    shown: dict[tuple[str, str], dict[str, list[str]]] = {}
    for trial, one in found.items():
        for axis in one.told if trial.kind != "module" else ():
            shown.setdefault((trial.kind, trial.name), {}).setdefault(axis, []).append(trial.precision)
    yield reporting.texts(
        [
            [kind, name, "; ".join(f"{axis} ({', '.join(precisions)})" for axis, precisions in by.items())]
            for (kind, name), by in shown.items()
        ],
        ["", "port", "axes that show it"],
    )
    missing = {trial.name for trial in found if trial.kind == "wrong" and (trial.kind, trial.name) not in shown}
    yield f"Wrong ports that no axis shows at any precision: {', '.join(sorted(missing)) or 'none'}."
    yield "## By module"
    yield (
        "A number is the largest relative change of a tensor. `-` is an axis that does not apply; a precision is left "
        "out if TE's kernels refuse the module's shapes there, or TE has no such recipe for it."
    )
    for name in MODULES:
        columns = {t.precision: one for t, one in found.items() if (t.kind, t.name) == ("module", name) and one.cells}
        if columns:
            yield f"### {name}"
            axes = [axis for axis in AXES if any(one.cells[axis] != "-" for one in columns.values())]
            yield reporting.texts(
                [[axis, *(one.cells[axis] for one in columns.values())] for axis in axes], ["axis", *columns]
            )
    yield "## One layer and one batch"
    yield f"32 rows of `te.Linear(64, 256)`, alone and among 512: {_compare_rows(settings)}."


def _compare_rows(settings: Settings) -> str:
    """Say how many of the 8,192 results of 32 rows differ if they are among 512."""
    kernels, counts = te.kernels(settings.backend), []
    torch.manual_seed(0)
    rows = torch.randn(512, 64, dtype=torch.bfloat16, device=kernels.device)
    for name in settings.precisions:
        precision = precision_named(name)
        if precision.dtype is not torch.bfloat16 or precision.warmup_passes:
            continue
        with gpu_with(precision, kernels), torch.no_grad():
            layer = kernels.te.Linear(64, 256, params_dtype=torch.bfloat16, device=kernels.device)
            with precision.autocast(kernels):
                alone, among = layer(rows[:32]), layer(rows)[:32]
        counts.append(f"{int((alone != among).sum())} of {alone.numel()} differ at `{name}`")
    return ", ".join(counts)
