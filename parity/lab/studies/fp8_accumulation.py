"""Measure what the short sums of a Hopper's FP8 tensor cores cost, over the length of the sum.

Two matrices are cast to E4M3 under current scaling and multiplied as ``parity.cpu.tensor_cores`` adds: without
``use_split_accumulator`` (as TE does forward), with it (as TE does backward), and in plain FP32. Golden is the FP64
product of the same FP8 numbers, so what is measured is the sum alone; the error of the cast to FP8 stands beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Rng
from parity.cpu import float8, tensor_cores
from parity.cpu.tensor_cores import HOPPER, Factor
from parity.lab import record
from parity.lab.campaign import Campaign
from parity.lab.studies.settings import Draw, check_names, normal, outliers
from parity.numerics.errors import measure
from parity.user_error import UserError

RECORD = "fp8_accumulation.jsonl"
E4M3 = torch.float8_e4m3fn
# Whose sums cancel, whose sums grow, and mostly small numbers beside a few large ones.
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": normal,
    "positive": lambda rng, *shape: rng.uniform(*shape),
    "outliers": outliers,
}
WHOLE = 0  # as an interval: never promoted
_SIDES = ("left", "right")  # the streams of the two matrices


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        distributions: names of ``DISTRIBUTIONS``.
        lengths: of the sums, K.
        interval_length: the K at which promotion intervals are compared.
        intervals: products between promotions, multiples of 32.
        rows: of both matrices; ``rows**2`` sums are measured.
        seeds: how many, from 0.
    """

    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    interval_length: int = 4096
    intervals: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    rows: int = 64
    seeds: int = 4


FULL = Settings()
QUICK = Settings(lengths=(128, 512, 2048), interval_length=2048, intervals=(32, 128, 512), rows=32, seeds=2)


@dataclass(frozen=True)
class Cost:
    """The error of sums of FP8 products.

    Attributes:
        relative_l2: ``|error| / |golden|`` over all sums.
        max_over_rms: the largest error over the root mean square of golden.
        max_relative: the largest error of a sum over that sum; says little where sums cancel.
    """

    relative_l2: float
    max_over_rms: float
    max_relative: float


@dataclass(frozen=True)
class Run:
    """One pair of matrices.

    Attributes:
        distribution: of their elements.
        length: of the sums, K.
        seed: of the elements.
    """

    distribution: str
    length: int
    seed: int


# The costs of a run by how it adds: the products between promotions, or "fp32"; and "cast", that of the cast to FP8.
Costs = Mapping[str, Cost]


def measured(settings: Settings, folder: Path) -> tuple[Mapping[Run, Costs], Settings]:
    """Measure what the folder's record lacks.

    Returns:
        What ``report.write`` is given, but for the folder.

    Raises:
        UserError: for a distribution that there is not, or an interval that is no multiple of 32.
    """
    _check(settings)
    campaign: Campaign[Run, Costs] = Campaign(
        folder / RECORD, Costs, functools.partial(_identity, settings=settings), record.code_of(__name__)
    )
    return campaign.complete(runs(settings), lambda entry: costs_of(entry, settings), "adding"), settings


def costs_of(entry: Run, settings: Settings) -> Costs:
    """Multiply one pair of matrices in each way of adding, and measure."""
    draw = DISTRIBUTIONS[entry.distribution]
    exact = [draw(Rng(entry.seed, purpose), settings.rows, entry.length) for purpose in _SIDES]
    scales = [float8.scale_from_amax(float8.amax_of(values), torch.finfo(E4M3).max) for values in exact]
    a, b = (_e4m3(values, scale) for values, scale in zip(exact, scales, strict=True))
    golden = b.double() @ a.double().t()

    def added(interval: int) -> Tensor:
        core = dataclasses.replace(HOPPER, promote_every=interval or HOPPER.promote_every)
        return tensor_cores.product(core, Factor(a, E4M3), Factor(b, E4M3), split=interval != WHOLE)

    unscaled = golden / (scales[0] * scales[1]).double()
    costs = {
        "fp32": _cost(b @ a.t(), golden),
        "cast": _cost(unscaled, exact[1].double() @ exact[0].double().t()),
    }
    return costs | {str(interval): _cost(added(interval), golden) for interval in _intervals(entry, settings)}


def mean(found: Mapping[Run, Costs], distribution: str, length: int, way: str) -> Cost:
    """Return the costs over all seeds: errors in the mean square, maxima as they are."""
    costs = [each[way] for entry, each in found.items() if (entry.distribution, entry.length) == (distribution, length)]
    return Cost(
        relative_l2=math.sqrt(sum(cost.relative_l2**2 for cost in costs) / len(costs)),
        max_over_rms=max(cost.max_over_rms for cost in costs),
        max_relative=max(cost.max_relative for cost in costs),
    )


def runs(settings: Settings) -> Iterator[Run]:
    """Yield all pairs of matrices, each length once."""
    for distribution in settings.distributions:
        for length in dict.fromkeys((*settings.lengths, settings.interval_length)):
            yield from (Run(distribution, length, seed) for seed in range(settings.seeds))


def _intervals(entry: Run, settings: Settings) -> tuple[int, ...]:
    always = (WHOLE, HOPPER.promote_every)
    return tuple(dict.fromkeys(always + (settings.intervals if entry.length == settings.interval_length else ())))


def _e4m3(values: Tensor, scale: Tensor) -> Tensor:
    return float8.decode(float8.encode(values, scale, E4M3).data, E4M3)


def _cost(result: Tensor, golden: Tensor) -> Cost:
    errors = measure(result, golden, torch.float32)
    relative = ((result.double() - golden) / golden).abs()
    return Cost(
        relative_l2=errors.relative_l2,
        max_over_rms=errors.max_abs / errors.golden_rms,
        max_relative=relative[golden != 0].max().item(),
    )


def _identity(entry: Run, settings: Settings) -> dict[str, Any]:
    start = record.fingerprint(DISTRIBUTIONS[entry.distribution](Rng(entry.seed, side), 1, 16) for side in _SIDES)
    chosen = {"rows": settings.rows, "intervals": list(_intervals(entry, settings)), "start": start}
    return dataclasses.asdict(entry) | chosen


def _check(settings: Settings) -> None:
    check_names("distributions", settings.distributions, DISTRIBUTIONS)
    for interval in settings.intervals:
        if interval < 1 or interval % HOPPER.products:
            raise UserError(f"intervals: {interval} is no multiple of the {HOPPER.products} products of an instruction")
