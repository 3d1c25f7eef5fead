"""Measure what it costs to grant what other faithful kernels may do: right ports rejected, and bugs detected.

Each choice of ``parity.numerics.kernel_choices`` is switched on in the CPU kernels. The zoo's right ports must pass on
them; the zoo's bugs are judged with and without what is granted, on kernels that do nothing of the kind and on those
that do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parity import te
from parity.case.validate import check_case
from parity.comparison import judge_at
from parity.cpu.kernel_choices import ATTENTION_16_BIT_SUMS, kernel_choices
from parity.judge.limits import packaged
from parity.lab.zoo.catalogue import BUGS, HOSTS
from parity.lab.zoo.planting import planted
from parity.lab.zoo.trial import CLEAN, Plan, Trial, at_size, hosts_of
from parity.machine.process import processes
from parity.numerics.kernel_choices import CHOICES, KernelChoice
from parity.report.environment import cpu_model, emulated_gpu_name
from parity.report.numbers import markdown_table
from parity.te import PRECISIONS, why_unavailable
from parity.te.attention_backend import AttentionBackend

_NONE = ""  # kernels as they are by default


@dataclass(frozen=True)
class Asked:
    """A trial of the zoo on certain kernels.

    Attributes:
        trial: a port, right or with a bug.
        kernels: the name of a choice that is switched on, or ``_NONE``.
        granted: whether what other kernels may do is granted.
    """

    trial: Trial
    kernels: str
    granted: bool


def is_rejected(asked: Asked) -> bool | None:
    """Judge a trial, without a search for the cause; None for one that could not be compared."""
    trial, kernels = asked.trial, te.kernels("cpu")
    host = at_size(HOSTS[trial.host], trial.size)
    case = planted(BUGS[trial.bug], host) if trial.bug else host
    (checked,) = check_case(case, kernels.te)
    attention: AttentionBackend | None = "unfused" if asked.kernels == ATTENTION_16_BIT_SUMS else None
    with kernel_choices(*([asked.kernels] if asked.kernels else [])):
        judged = judge_at(
            *(case, checked, PRECISIONS[trial.precision], trial.seed, kernels, packaged(), attention),
            other_kernels=asked.granted,
        )
    return None if judged.result.status in ("error", "skipped") else judged.result.status == "failed"


def shown(choice: KernelChoice) -> str | None:
    """Return the precision in which a choice is tried, the first in which it can show here; None where it cannot."""
    kernels = te.kernels("cpu")
    names = (name for name in choice.precisions if why_unavailable(PRECISIONS[name], kernels) is None)
    return next(names, None)


def plan(seeds: int) -> list[Asked]:
    """List what is to be judged, at the zoo's small size."""
    tried = {choice.name: precision for choice in CHOICES if (precision := shown(choice)) is not None}
    precisions = tuple(dict.fromkeys(tried.values()))
    bugs = tuple(BUGS.values())
    trials = Plan(bugs, hosts_of(bugs), precisions, {"small": seeds}).trials()
    places = [(_NONE, precision) for precision in precisions] + list(tried.items())
    return [
        Asked(trial, kernels, granted)
        for (kernels, precision), trial, granted in itertools.product(places, trials, (False, True))
        if trial.precision == precision
    ]


def run(seeds: int, workers: int, path: Path) -> Path:
    """Judge everything and write the page.

    Args:
        seeds: how many, from 0.
        workers: processes.
        path: of the page.
    """
    asked = plan(seeds)
    with processes(workers) as pool:
        rejected = dict(zip(asked, pool.map(is_rejected, asked, chunksize=8), strict=True))
    path.write_text("\n\n".join(_sections(rejected, seeds)) + "\n", encoding="utf-8")
    return path


def _sections(rejected: Mapping[Asked, bool | None], seeds: int) -> Iterable[str]:
    yield "# What faithful kernels may do, and what it costs to grant it"
    yield (
        f"Emulated: TransformerEngine {te.version()}'s own Python on parity's CPU kernels, as an "
        f"{emulated_gpu_name()} on {cpu_model()}. Each choice is "
        f"switched on in the CPU kernels (`PARITY_KERNEL_CHOICES`) for the bug zoo at small size with {seeds} seeds. "
        "What leans is granted along the change that it makes, what is noise by a further run of the rounding model, "
        "both only where a port fails without ([statistics](../docs/statistics.md))."
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
    lost = [one for one in lost if one.kernels == _NONE and rejected[Asked(one.trial, _NONE, False)]]
    yield "## Bugs that are missed on the default kernels because of what is granted"
    told = [f"- `{one.trial.bug}` in `{one.trial.host}`, {one.trial.precision}, seed {one.trial.seed}" for one in lost]
    yield "\n".join(told) or "None."
    without = [choice.name for choice in CHOICES if shown(choice) is None]
    if without:
        yield f"Not tried, since no precision in which they show runs on this GPU: {', '.join(without)}."


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
