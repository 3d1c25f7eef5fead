"""Draw the samples that laws are fitted to: how faithful ports compare with the rounding model."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from parity.case.case import Case
from parity.case.validate import CheckedSize, check_case
from parity.judge.directions import directions
from parity.judge.judge import observe
from parity.judge.limits import FEWEST_TENSORS, Key, Law, fit, too_few
from parity.judge.second_look import kinks_moved
from parity.lab.calibration.right_ports import drawn
from parity.numerics.freedom import FUSED, UNFUSED, Freedom
from parity.passes.all_passes import Tensors, golden_truths, model_tensors, run_candidate, run_model
from parity.passes.prepare import prepare
from parity.result import Kind
from parity.te import Kernels, Precision
from parity.user_error import UserError

# Whether cases have enough tensors for a law, as far as that is known before anything runs.


def check_enough(cases: Sequence[Case], precisions: Iterable[Precision], seeds: Sequence[int], te: ModuleType) -> None:
    """Make sure that laws can be fitted to the gradients; how many outputs modules have, only running them tells.

    Args:
        cases: that are measured.
        precisions: at which.
        seeds: for each of which a size is drawn, besides the case's own.
        te: the module ``transformer_engine.pytorch``.

    Raises:
        UserError: if too few different inputs or weights get gradients; or as ``check_case``.
    """
    for precision in precisions:
        found: Counter[Kind] = Counter()
        for case in cases:
            if found and min(found.values()) >= FEWEST_TENSORS:
                break
            if case.runs_at(precision.name):
                found += _gradients(case, precision, seeds, te)
        for kind, count in found.items():
            if count < FEWEST_TENSORS:
                raise UserError(f"{kind}s in {precision.name}: {too_few(count)}")


def _gradients(case: Case, precision: Precision, seeds: Sequence[int], te: ModuleType) -> Counter[Kind]:
    """Count different gradients over all sizes; two of one size are one."""
    sized = dataclasses.replace(case, sizes=(*case.sizes, *(drawn(case, precision, seed) for seed in seeds)))
    by_label = {checked.label: checked for checked in check_case(sized, te)}.values()
    found: Counter[Kind] = Counter()
    found["input gradient"] = sum(checked.inputs for checked in by_label)
    found["weight gradient"] = sum(checked.trained for checked in by_label)
    return +found


# Draws the samples that laws are fitted to: how faithful ports compare with the rounding model.
#
# Two kinds of faithful port are known to be right: the reference itself under the rounding model, with every freedom
# that a kernel has drawn at random; and the TransformerEngine modules of the cases, which must be pairs of which nobody
# doubts that they agree, such as those of the default suite.
#
# On which side of a kink rounding puts a value is no small error, and no law foresees it: a comparison expects it at
# second look, and here it is expected from the beginning.


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
        value: as ``parity.judge.statistics`` defines it.
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
    """Hold what was measured.

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
    """Yield samples of one case at one size, precision and seed.

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
    """Return the law of every precision, kind of tensor and statistic that was sampled."""
    grouped: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.precision, sample.kind, sample.statistic].append(sample)
    return {key: _law(key, group) for key, group in grouped.items()}


def _law(key: Key, group: Sequence[Sample]) -> Law:
    tensors = [f"{sample.case} {sample.tensor}" for sample in group]
    return fit([sample.value for sample in group], tensors, key[2])
