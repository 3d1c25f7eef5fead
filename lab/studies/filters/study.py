"""Measure whether any linear filter could detect the mistakes of the study ``names`` that parity misses.

A matched filter projects a tensor's error onto the change that a mistake would make. Nobody knows which roundings a
port shares with the model, so the filter's noise is the size of that projection when each rounding is drawn anew. The
signal to noise ratio tells whether there is anything to detect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from scipy import special
from torch import Tensor, nn

from lab.corpus import models
from lab.corpus.catalogue import MODELS
from lab.corpus.judging import Judgement, said_of
from lab.studies import reporting
from lab.studies.settings import check_names
from lab.threads import one_thread
from parity import te
from parity.case.validate import check_case
from parity.judge.limits import FALSE_ALARMS_A_RUN, STATISTICS_A_RUN
from parity.judge.second_look import drawn_runs
from parity.measuring import record
from parity.measuring.record import Campaign, FourDigits
from parity.passes.all_passes import Tensors, golden_tensors, tensors_of
from parity.passes.modes import usual_modes
from parity.passes.one_pass import outputs_of, run
from parity.passes.prepare import Prepared, prepare
from parity.passes.prepare import cast as in_dtype
from parity.result import PROBED
from parity.te import PRECISIONS

RECORD = "filters.jsonl"
# The port's own steps compute in FP32. A change below this share of golden is their rounding, not an effect.
_IN_FP32 = 1e-6
# The weight of an estimate from few runs: of an element's own error against the tensor's average, and of the measured
# correlation of two tensors' errors against no correlation.
_TRUSTED = 0.8


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        precisions: the precisions at which every wrong port is judged.
        seed: the seed of weights and inputs.
        runs: how many runs of the rounding model to make, each with its roundings drawn anew.
        rows: names of ports in ``lab/corpus/model_ports.py``; empty for all.
    """

    precisions: tuple[str, ...] = ("bf16", "fp8_current")
    seed: int = 0
    runs: int = 64
    rows: tuple[str, ...] = ("",)


FULL = Settings()
QUICK = Settings(precisions=("bf16",), runs=16, rows=("plain GELU for tanh-GELU",))


@dataclass(frozen=True)
class Wrong:
    """A wrong port at a precision.

    Attributes:
        row: a port's name.
        precision: a name in ``PRECISIONS``.
        seed: the seed of weights and inputs.
        runs: as in ``Settings``.
    """

    row: str
    precision: str
    seed: int
    runs: int


@dataclass(frozen=True)
class Seen:
    """Hold how visible a wrong port's mistake is to filters.

    Attributes:
        status: parity's verdict; the rest is measured only if the port passed.
        margin: parity's margin.
        best: the tensor in which the mistake is most visible; empty if no tensor changes.
        norm_ratio: the norm of the mistake's change over the norm of rounding, in that tensor.
        ratio: the signal to noise ratio of the matched filter in that tensor.
        joined: the ratio of all elements of all tensors together, weighted by their errors in the runs.
    """

    status: str
    margin: FourDigits
    best: str = ""
    norm_ratio: FourDigits = 0.0
    ratio: FourDigits = 0.0
    joined: FourDigits = 0.0


_ROWS = {port.name: port for ports in MODELS.values() for port in ports}


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Wrong, Seen], Settings]:
    """Measure what is missing from the folder's record, in this process.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a precision is unknown.
    """
    check_names("precisions", settings.precisions, PRECISIONS)
    rows = [name for name in settings.rows if name] or list(_ROWS)
    jobs = [Wrong(row, name, settings.seed, settings.runs) for name in settings.precisions for row in rows]
    campaign: Campaign[Wrong, Seen] = Campaign(folder / RECORD, Seen, code=record.code_of(__name__))
    with one_thread():
        return campaign.complete(jobs, seen, "measuring"), settings


def seen(one: Wrong) -> Seen:
    """Judge a wrong port and, if it passes, measure how visible its mistake is."""
    row = _ROWS[one.row]
    said = said_of(Judgement(one.row, row.host, one.precision, one.seed, searched=False))
    if said.status != "passed":
        return Seen(said.status, said.margin)
    kernels, precision = te.kernels("cpu"), PRECISIONS[one.precision]
    case = row.right
    (checked,) = check_case(case, kernels.te)
    with usual_modes():
        prepared = prepare(case, checked, precision.dtype, one.seed, kernels)
        golden = {key: x.double() for key, x in golden_tensors(prepared).items()}
        changes = _changes(row.host.removeprefix("models."), row.change, prepared)
        drawn = drawn_runs(prepared, precision.rounding, one.runs)
    told = [key for key, change in changes.items() if change.norm() > _IN_FP32 * golden[key].norm()]
    if not told:
        return Seen(said.status, said.margin)
    errors = {key: torch.stack([run[key].double() - golden[key] for run in drawn]) for key in told}
    # The projection of each run's error onto each tensor's change: 0 on average, and larger by 1 with the mistake.
    contained = torch.stack(
        [(errors[key] * changes[key]).flatten(1).sum(1) / changes[key].square().sum() for key in told], dim=1
    )
    ratios = contained.square().mean(0).rsqrt()
    best = int(ratios.argmax())
    norm_ratio = changes[told[best]].norm() / errors[told[best]].flatten(1).square().sum(1).mean().sqrt()
    halves = slice(0, None, 2), slice(1, None, 2)
    joined = math.sqrt(sum(_joined(errors, changes, *each) ** 2 for each in (halves, halves[::-1])) / 2)
    return Seen(
        said.status,
        said.margin,
        " ".join(told[best]),
        norm_ratio.item(),
        ratios[best].item(),
        max(joined, ratios[best].item()),
    )


def _joined(errors: Tensors, changes: Tensors, some: slice, others: slice) -> float:
    """Return the signal to noise ratio of all tensors' filters combined.

    One half of the runs estimates the error of each element and the noise of each tensor's filter, which set the
    weights. The other half measures the ratio.

    Args:
        errors: the errors of each tensor, with runs as the first dimension.
        changes: the mistake's change of each tensor.
        some: the runs that set the weights.
        others: the runs that measure the ratio.
    """
    filters = []
    for key, error in errors.items():
        own, average = error[some].square().mean(0), error[some].square().mean()
        weighted = changes[key] / (_TRUSTED * own + (1 - _TRUSTED) * average)
        filters.append((error * weighted).flatten(1).sum(1) / (changes[key] * weighted).sum())
    contained = torch.stack(filters, dim=1)
    deviations = contained[some].square().mean(0).sqrt()
    scaled = contained[some] / deviations
    related = _TRUSTED * scaled.T @ scaled / len(scaled) + (1 - _TRUSTED) * torch.eye(len(deviations)).to(scaled)
    weights = torch.linalg.solve(related, 1.0 / deviations) / deviations
    return float(weights.sum() / (contained[others] @ weights).square().mean().sqrt())


# The mistake's change: the port's own code in FP64, with plain PyTorch in place of TE, with and without the mistake.


class _Attention(nn.Module):
    """Stand in for TE's ``DotProductAttention``."""

    def __init__(self, heads: int, head_dim: int, **given: Any) -> None:
        super().__init__()
        self.repeats, self.given = heads // given["num_gqa_groups"], given

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with ``[batch, seq, heads, head_dim]`` inputs, and return ``[batch, seq, heads * head_dim]``."""
        key, value = (x.repeat_interleave(self.repeats, dim=2) for x in (key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * self.given["softmax_scale"]
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        visible = visible.tril() if self.given["attn_mask_type"] == "causal" else visible
        before, _ = self.given["window_size"]
        visible = visible.triu(-before) if before >= 0 else visible
        shares = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", shares, value).flatten(2)


_PLAIN = SimpleNamespace(Linear=nn.Linear, RMSNorm=nn.RMSNorm, LayerNorm=nn.LayerNorm, DotProductAttention=_Attention)


def _changes(host: str, mistake: models.Mistake, prepared: Prepared) -> Tensors:
    right, wrong = (_in_fp64(host, one, prepared) for one in (None, mistake))
    return {key: wrong[key] - x for key, x in right.items()}


def _in_fp64(host: str, mistake: models.Mistake | None, prepared: Prepared) -> Tensors:
    candidate = models.modules(cast(Any, _PLAIN), host, mistake)[1].double()
    weights = dict(prepared.reference.double().named_parameters())
    theirs = models.names_in_port(list(weights), candidate)
    with torch.no_grad():
        for name, weight in candidate.named_parameters():
            weight.copy_(weights[theirs[name]])
    ran = run(
        candidate,
        None,
        in_dtype(prepared.inputs, torch.float64),
        prepared.input_names,
        lambda outputs: {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()},
    )
    tensors = {(kind, theirs.get(name, name)): x.detach().double() for (kind, name), x in tensors_of(ran).items()}
    if prepared.probed:
        with torch.no_grad():
            probed = outputs_of(candidate, prepared.probe_call, in_dtype(prepared.probe, torch.float64))
        tensors |= {(PROBED, name): output.double() for name, output in probed.items()}
    return tensors


# The report: which mistakes no filter could detect at these sizes.


# The lowest possible limit: that of a signed statistic whose standard deviation is known exactly.
LIMIT = -float(special.ndtri(FALSE_ALARMS_A_RUN / STATISTICS_A_RUN / 2))


def write(found: Mapping[Wrong, Seen], settings: Settings, folder: Path) -> Path:
    """Write the report, and return its path."""
    return reporting.written(folder / "filters.md", _sections(found, settings))


def _sections(found: Mapping[Wrong, Seen], settings: Settings) -> Iterator[str]:
    yield "# What a filter could see of the mistakes that pass"
    yield (
        "Some wrong ports of [the study of names](names.md) pass. Is that because parity does not look, or because "
        "there is nothing to see? For each of them, the mistake's change of golden (the port's own code in FP64, with "
        "the mistake and without) is the signal, and a matched filter for it the best that looks at one tensor. Its "
        f"noise is what {settings.runs} runs of the rounding model have along the change, if each rounding is drawn "
        f"anew. {reporting.made_on(te.kernels('cpu'))} Seed {settings.seed}."
    )
    yield (
        f"A right port may exceed a limit once in {STATISTICS_A_RUN / FALSE_ALARMS_A_RUN:,.0f} times, so a mistake "
        f"needs a ratio of {LIMIT:.2g} to be detected every other time, and of {LIMIT + 2:.2g} nearly always. *In one "
        "tensor* is the best of outputs, outputs on probing inputs and gradients. *In all* weighs each element by its "
        "own error and joins the tensors by how their errors are correlated; both are estimated from one half of the "
        "runs and tried on the other. A port that rounds most numbers just as the model does shows more than this, "
        "since what both share cancels."
    )
    for precision in settings.precisions:
        passed = {one: seen for one, seen in found.items() if one.precision == precision and seen.status == "passed"}
        judged = sum(one.precision == precision for one in found)
        yield f"## `{precision}`"
        yield f"Of {judged} wrong ports, {len(passed)} pass."
        if passed:
            yield reporting.texts(
                [_row(one, seen) for one, seen in sorted(passed.items(), key=lambda both: -both[1].joined)],
                [
                    "mistake",
                    "host",
                    "margin",
                    "best tensor",
                    "norm ratio",
                    "in one tensor",
                    "in all",
                    "is there enough",
                ],
            )


def _row(one: Wrong, seen: Seen) -> list[str]:
    enough = "yes" if seen.joined > LIMIT + 2 else "hardly" if seen.joined > LIMIT else "no"
    numbers = (f"{number:.2g}" for number in (seen.norm_ratio, seen.ratio, seen.joined))
    return [one.row, _ROWS[one.row].host, f"{seen.margin:.2g}", seen.best, *numbers, enough]
