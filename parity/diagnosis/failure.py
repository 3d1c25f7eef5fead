"""A failed comparison, as a diagnosis is given it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from parity.diagnosis.budget import Budget
from parity.passes import Tensors, tensors_of
from parity.precision import Precision
from parity.prepare import Prepared
from parity.result import Kind, TensorResult
from parity.rounding.freedom import FUSED, UNFUSED, Freedom
from parity.tolerance import Tolerance

_FEW = 32  # elements
# Seconds, which a shorter check counts for: what it takes is half chance, and small modules have as many mistakes.
_SHORTEST_CHECK = 1.0


class Judge(Protocol):
    """Judges tensors, the failed candidate's where no other ones are given, against a golden and rounding models.

    ``leaning`` are the first model's tensors with what kernels may do that leans.
    """

    def __call__(
        self,
        golden: Tensors,
        models: Sequence[Tensors],
        candidate: Tensors | None = None,
        leaning: Sequence[Tensors] = (),
        /,
    ) -> Sequence[TensorResult]: ...


class Rerun(Protocol):
    """Runs the candidate again, after a change to its newly built module, with other output gradients if any."""

    def __call__(
        self, change: Callable[[nn.Module], None], cotangents: Mapping[str, Tensor] | None = None, /
    ) -> Tensors: ...


@dataclass(frozen=True)
class Failure:
    """A comparison that failed.

    Attributes:
        results: of all compared tensors.
        candidate: its tensors, in the reference's layout.
        prepared: what was compared.
        precision: at which.
        seconds: of processor time that the comparison took.
        judge: judges the candidate, or another, against another golden, whose rounding models are given with it.
        rerun: runs the candidate again; None where that cannot be done.
        draws: whether the candidate drew random numbers; from generators of its own it may have, though this is False.
        on_probe: the same failure as the probing inputs show it; None where they show none.
        on_drawn: of a failure on probing inputs, the one on inputs as they were drawn, which its cause must explain
            too; None where there is none.
        among: titles and names of the mistakes that may be its cause; None for every known one.
        freedoms: of the kernels that the candidate is judged by.
        own_recipes: that the candidate turns on by itself, with the lines where it does.
    """

    results: Sequence[TensorResult]
    candidate: Tensors
    prepared: Prepared
    precision: Precision
    seconds: float
    judge: Judge
    rerun: Rerun | None = None
    draws: bool = False
    on_probe: Failure | None = None
    on_drawn: Failure | None = None
    among: Container[tuple[str, str]] | None = None
    freedoms: Sequence[Freedom] = (FUSED, UNFUSED)
    own_recipes: Sequence[str] = ()

    def budget(self, checks: float) -> Budget:
        """What so many comparisons like this one take, from now on."""
        return Budget.of(self.prepared.clock, checks * max(self.seconds, _SHORTEST_CHECK))

    @property
    def golden(self) -> Tensors:
        """The reference's tensors in FP64."""
        return tensors_of(self.prepared.golden)

    @property
    def outputs(self) -> list[TensorResult]:
        """The outputs' results."""
        return [result for result in self.results if result.kind == "output"]


def few_outputs(failure: Failure) -> bool:
    """Whether all outputs together, such as a loss, are so few numbers that many a mistake would explain them."""
    return sum(x.numel() for (kind, _), x in failure.golden.items() if kind == "output") < _FEW


def tolerance_of(failure: Failure, key: tuple[Kind, str]) -> Tolerance:
    """The tolerance of a compared tensor."""
    result = next(result for result in failure.results if (result.kind, result.name) == key)
    return Tolerance(result.tolerance_relative_l2, result.tolerance_max_abs)
