"""What numeric deviation does to training: how far the weights of two models drift apart that should be the same.

After the second half of Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803). The same small language model
trains again and again from the same weights on the same batches, with one thing changed: flash attention for baseline,
a narrower format for FP32, TE's modules for plain PyTorch. What that does to the weights is put next to what other
starting weights do, and to what a change of one unit in the last place does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity import te
from parity.precision import PRECISIONS
from parity.studies import provenance, record, resume
from parity.studies.device import kernels_on
from parity.studies.gpu import why_nowhere
from parity.studies.names import check_names
from parity.studies.stepwise.number_formats import full_fp32_products
from parity.studies.training import language_model
from parity.studies.training.language_model import ARCHITECTURES
from parity.studies.training.text import batches
from parity.studies.training_drift import weight_distance
from parity.studies.training_drift.trajectory import FORMATS, Run, Settings, initial, rounds_alike, size_of, trajectory
from parity.studies.training_drift.weight_distance import Distance, WeightDistance
from parity.te import Kernels
from parity.user_error import UserError

RECORD = "training_drift.jsonl"


FULL = Settings()
QUICK = Settings(
    formats=("fp32", "bf16"),
    te_precisions=("bf16",),
    steps=40,
    gpu_steps=40,
    every=10,
    seeds=1,
    control_seeds=2,
    layers=1,
)


@dataclass(frozen=True)
class Pair:
    """Two trainings whose weights are compared."""

    run: Run
    against: Run


@dataclass(frozen=True)
class Drift:
    """How two trainings part.

    Attributes:
        steps: at which the weights were compared.
        distances: then.
        loss: of the run at its last step, in nats a byte.
        loss_against: of the other.
    """

    steps: tuple[int, ...]
    distances: tuple[WeightDistance, ...]
    loss: float
    loss_against: float

    @property
    def last(self) -> WeightDistance:
        """The distance after the last step."""
        return self.distances[-1]


Drifts = Mapping[Pair, Drift]


def run(settings: Settings, folder: Path) -> Path:
    """Train what the folder's record lacks, then write ``training_drift.md`` and its plots there.

    Returns:
        The report's path.

    Raises:
        UserError: for a name that there is not, where FP32 is missing, or for a device that cannot be had.
    """
    from parity.studies.training_drift import report

    check(settings)
    kernels = kernels_on(settings.device)
    if kernels.backend == "gpu":
        settings = dataclasses.replace(settings, steps=settings.gpu_steps)
    train_missing(settings, folder, kernels)
    refused = {name: why_nowhere(PRECISIONS[name], kernels) for name in settings.te_precisions}
    missing = {name: reason for name, reason in refused.items() if reason is not None}
    return report.write(recorded(settings, folder, kernels), missing, settings, kernels, folder)


def train_missing(settings: Settings, folder: Path, kernels: Kernels) -> None:
    """Compare the pairs that the folder's record lacks, and append each when it is finished."""

    def train(pair: Pair) -> Any:
        with full_fp32_products():
            return _to_json(drift_of(pair, settings, kernels))

    resume.make_missing(
        folder / RECORD,
        pairs(settings, kernels),
        functools.partial(_identity, settings=settings, kernels=kernels),
        train,
        "training",
        provenance.of(__name__),
    )
    trajectory.cache_clear()


def recorded(settings: Settings, folder: Path, kernels: Kernels) -> Drifts:
    """Every pair's drift, from the folder's record."""
    finished = resume.recorded(
        folder / RECORD, pairs(settings, kernels), functools.partial(_identity, settings=settings, kernels=kernels)
    )
    return {pair: _from_json(result) for pair, result in finished.items()}


def drift_of(pair: Pair, settings: Settings, kernels: Kernels) -> Drift:
    """Train both, and compare their weights."""
    run, against = (trajectory(one, settings, kernels) for one in (pair.run, pair.against))
    return Drift(
        steps=tuple(run.weights),
        distances=tuple(weight_distance.between(run.weights[step], against.weights[step]) for step in run.weights),
        loss=run.losses[-1],
        loss_against=against.losses[-1],
    )


def pairs(settings: Settings, kernels: Kernels) -> Iterator[Pair]:
    """What is compared with what, those that share a training one after the other."""
    for seed in range(max(settings.seeds, settings.control_seeds)):
        plain = Run("baseline", "fp32", seed)
        yield Pair(Run("other start", "fp32", seed), plain)
        for name in low_formats(settings):
            baseline = Run("baseline", name, seed)
            yield Pair(baseline, plain)
            yield Pair(Run("flash", name, seed), baseline)
            yield Pair(Run("nudged", name, seed), baseline)
            if seed < settings.seeds:
                yield Pair(Run("flash everywhere", name, seed), baseline)
        if seed >= settings.seeds:
            continue
        yield Pair(Run("flash", "fp32", seed), plain)
        yield Pair(Run("nudged", "fp32", seed), plain)
        for name in available(settings, kernels):
            rounded = Run("rounded", rounds_alike(name), seed)
            yield from (Pair(Run("te", name, seed), other) for other in (plain, rounded))
        for name in dict.fromkeys(map(rounds_alike, available(settings, kernels))):
            yield Pair(Run("rounded", name, seed), plain)


def low_formats(settings: Settings) -> list[str]:
    """The formats below FP32."""
    return [name for name in settings.formats if name != "fp32"]


def available(settings: Settings, kernels: Kernels) -> list[str]:
    """The precisions that TE can compute in here."""
    return [name for name in settings.te_precisions if why_nowhere(PRECISIONS[name], kernels) is None]


def check(settings: Settings) -> None:
    """Whether all names are known, sizes fit, and FP32, which others are compared with, is there.

    Raises:
        UserError: if not.
    """
    check_names("model", (settings.model,), ARCHITECTURES)
    check_names("formats", settings.formats, FORMATS)
    check_names("te_precisions", settings.te_precisions, PRECISIONS)
    if "fp32" not in settings.formats:
        raise UserError("formats: fp32 must be among them, since the others are compared with it")
    language_model.check(size_of(settings), settings.batch, [PRECISIONS[name] for name in settings.te_precisions])


def _identity(pair: Pair, settings: Settings, kernels: Kernels) -> dict[str, Any]:
    """All that a drift depends on; not which other pairs there are."""
    selection = {"formats", "te_precisions", "seeds", "control_seeds", "gpu_steps", "device"}
    identity = {name: value for name, value in dataclasses.asdict(settings).items() if name not in selection}
    start = _fingerprint(pair.run, settings), _fingerprint(pair.against, settings)
    identity |= dataclasses.asdict(pair) | {"start": list(start), "device": kernels.backend}
    return identity | ({"te": te.version()} if pair.run.kind == "te" else {})


@functools.lru_cache(maxsize=256)
def _fingerprint(entry: Run, settings: Settings) -> int:
    """Of the weights and batches."""
    data = batches(entry.seed, settings.steps, settings.batch, settings.seq)
    return record.fingerprint([*initial(entry, settings).values(), *data])


def _to_json(drift: Drift) -> dict[str, Any]:
    def numbers(distance: Distance) -> list[float]:
        return [float(f"{value:.4g}") for value in (distance.maximum, distance.wasserstein)]

    return {
        "steps": list(drift.steps),
        "whole": [numbers(one.whole) for one in drift.distances],
        "tensors": {name: [numbers(one.tensors[name]) for one in drift.distances] for name in drift.last.tensors},
        "loss": drift.loss,
        "loss_against": drift.loss_against,
    }


def _from_json(found: Mapping[str, Any]) -> Drift:
    distances = tuple(
        WeightDistance(Distance(*whole), {name: Distance(*each[i]) for name, each in found["tensors"].items()})
        for i, whole in enumerate(found["whole"])
    )
    return Drift(tuple(found["steps"]), distances, found["loss"], found["loss_against"])
