"""Draws the samples that laws are fitted to: how faithful ports compare with the rounding model.

Two kinds of faithful port are known to be right: the reference itself under the rounding model, with every freedom that
a kernel has drawn at random; and the TransformerEngine modules of the cases, which must be pairs of which nobody doubts
that they agree, such as those of the default suite.

On which side of a kink rounding puts a value is no small error, and no law foresees it: a comparison expects it at
second look, and here it is expected from the beginning.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from parity.case import Case
from parity.declaring.validate import CheckedSize
from parity.judging.directions import directions
from parity.judging.judge import observe
from parity.judging.second_look import kinks_moved
from parity.limits.law import Law, fit
from parity.limits.table import Key
from parity.passes import Tensors, golden_truths, model_tensors, run_candidate, run_model
from parity.precision import Precision
from parity.prepare import prepare
from parity.rounding.freedom import FUSED, UNFUSED, Freedom
from parity.te import Kernels


@dataclass(frozen=True)
class Sample:
    """One statistic of one tensor of one faithful port.

    Attributes:
        case: the case's name and size.
        precision: the precision's name.
        kind: of the tensor.
        tensor: its name.
        port: ``model`` or ``te``.
        seed: of weights and inputs.
        statistic: its name.
        value: as ``parity.judging.statistics`` defines it.
    """

    case: str
    precision: str
    kind: str
    tensor: str
    port: str
    seed: int
    statistic: str
    value: float


@dataclass(frozen=True)
class LeftOut:
    """A port that could not run.

    Attributes:
        case, precision: names.
        size: the size's label.
        seed: of weights and inputs.
        reason: what it raised, in a line.
    """

    case: str
    size: str
    precision: str
    seed: int
    reason: str

    def __str__(self) -> str:
        return f"{self.case} at {self.size} in {self.precision}, seed {self.seed}: {self.reason}"


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        samples: of all ports.
        left_out: the ports that could not run.
    """

    samples: list[Sample] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        self.samples.extend(other.samples)
        self.left_out.extend(other.left_out)


def draw(
    case: Case,
    checked: CheckedSize,
    precision: Precision,
    seed: int,
    kernels: Kernels,
    draws: int,
) -> Iterator[Sample]:
    """Samples of one case at one size, precision and seed.

    Args:
        case, checked, precision, seed, kernels: what is run.
        draws: how many kernels' freedoms are drawn.
    """
    prepared = prepare(case, checked, precision.dtype, seed, kernels)
    known = directions(prepared)
    golden = golden_truths(prepared)
    models = [model_tensors(prepared, precision.rounding, freedom) for freedom in (FUSED, UNFUSED)]
    models += [run_model(prepared, precision.rounding, UNFUSED, kinks) for kinks in kinks_moved(prepared)]
    rng = random.Random(f"{case.name} {checked.label} {precision.name} {seed}")
    ports: list[tuple[str, Tensors]] = [
        ("model", run_model(prepared, precision.rounding, Freedom.draw(rng))) for _ in range(draws)
    ]
    ports.append(("te", run_candidate(case, checked, prepared, precision, seed, kernels)[0]))
    for port, tensors in ports:
        for key in golden:
            for found in observe(key, golden, models, tensors, precision.dtype, known):
                yield Sample(f"{case.name} {checked.label}", precision.name, *key, port, seed, found.name, found.value)


def laws(samples: Iterable[Sample]) -> dict[Key, Law]:
    """The law of every precision, kind of tensor and statistic that was sampled."""
    grouped: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.precision, sample.kind, sample.statistic].append(sample)
    return {key: _law(key, group) for key, group in grouped.items()}


def _law(key: Key, group: Sequence[Sample]) -> Law:
    tensors = [f"{sample.case} {sample.tensor}" for sample in group]
    return fit([sample.value for sample in group], tensors, key[2])
