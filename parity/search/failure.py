"""Describe a failed comparison, and the budget of a search for its cause."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from parity.judge.judge import NONE_DRAWN, gradients_of, judge
from parity.judge.request import Request, run_again, unchanged
from parity.numerics.errors import GoldenTensor, Tolerance, margin, measure
from parity.numerics.freedom import FUSED, UNFUSED, Freedom
from parity.passes.all_passes import Tensors, model_tensors, tensors_of
from parity.passes.nominal_clock import Clock
from parity.passes.prepare import Prepared, calls_of
from parity.result import PROBED, Kind, TensorResult
from parity.trace.trace import Trace

if TYPE_CHECKING:
    from parity.mistakes.hypothesis import Hypothesis
    from parity.te import Precision

# The budget of a part of a search: how much it may compute.


Tried = TypeVar("Tried")


@dataclass
class Budget:
    """Seconds of a nominal machine that may be spent, so that a search ends at the same place on every machine.

    Processor time would not do: if other processes use the GPU, this one waits for it, and waiting counts as work.

    Attributes:
        clock: the clock that counts them.
        seconds: how many may pass on it.
        began: the clock's seconds when the budget began.
        exceeded: whether it was found to be spent.
    """

    clock: Clock
    seconds: float
    began: float
    exceeded: bool = False

    @staticmethod
    def of(clock: Clock, seconds: float) -> Budget:
        """Return a budget of this many seconds from now on."""
        return Budget(clock, seconds, clock.seconds)

    def share(self, part: float) -> Budget:
        """Return a budget that ends when this part of this one is spent."""
        return Budget(self.clock, part * self.seconds, self.began)

    def more(self, part: float) -> Budget:
        """Return a budget of this part of the whole from now on, however much is spent already."""
        return Budget(self.clock, self.clock.seconds - self.began + part * self.seconds, self.began)

    def longer_by(self, seconds: float) -> Budget:
        """Return this budget extended by some seconds."""
        return replace(self, seconds=self.seconds + seconds)

    @property
    def passed(self) -> float:
        """Return how many seconds have passed since it began."""
        return self.clock.seconds - self.began

    @property
    def left(self) -> float:
        """Return how many seconds are left; negative if more have passed."""
        return self.seconds - self.passed

    def spent(self) -> bool:
        """Return whether it is spent or the search has reached its limit of real time; note that in ``exceeded``."""
        self.exceeded = self.exceeded or self.passed >= self.seconds or self.clock.is_over()
        return self.exceeded


def while_it_lasts(tried: Iterable[Tried], budget: Budget) -> Iterator[Tried]:
    """Yield the items to try, as long as the budget lasts."""
    left = iter(tried)
    while not budget.spent():
        try:
            one = next(left)
        except StopIteration:
            return
        yield one


# A failed comparison, as the search is given it.


_FEW = 32  # elements
# A comparison takes this many of the reference's forward passes: golden, the rounding models, the candidate, probing
# inputs, kernels' freedoms, each with gradients (57 to 426 were measured for decoder layers, most at FP8).
_PASSES_A_CHECK = 400
# A shorter check counts as this many seconds, since small modules have as many possible mistakes.
_SHORTEST_CHECK = 1.0


@dataclass(frozen=True)
class Failure:
    """A comparison that failed.

    Attributes:
        results: the verdicts on all compared tensors.
        candidate: the candidate's tensors, in the reference's layout.
        prepared: what was compared.
        request: what the comparison was asked for.
        run_on: what the candidate is run on; it differs from ``prepared`` if the failure is on the probing inputs.
        draws: whether the candidate drew random numbers; if False, it may have drawn some from generators of its own.
        on_probe: the same failure as the probing inputs show it; None if they show none.
        on_drawn: for a failure on probing inputs, the one on the inputs as they were drawn, which its cause must
            explain as well; None if there is none.
        among: titles and names of the mistakes that may be its cause; None for every known one.
        freedoms: the kernels that the candidate is judged by.
        own_recipes: the recipes that the candidate turns on by itself, with the lines where it does.
        by_average: whether no slice is expected to have a smaller error than its tensor's average under a mistake.
            False if the candidate fails only in such slices, since judged by the average it would pass under any
            mistake.
        outputs_passed: whether every output passed in the verdict that is recorded, which no copy of it changes: on all
            inputs, in all slices, and judged by the port's own choices. Only then gradients alone are wrong.
        effort: the share of a budget that a search may spend.
        broken: the exceptions that parts of the search have raised.
        against: says what the stages show against mistakes made at once, as the end of a sentence; empty if nothing.
    """

    results: Sequence[TensorResult]
    candidate: Tensors
    prepared: Prepared
    request: Request
    run_on: Prepared
    draws: bool = False
    on_probe: Failure | None = None
    on_drawn: Failure | None = None
    among: Container[tuple[str, str]] | None = None
    freedoms: Sequence[Freedom] = (FUSED, UNFUSED)
    own_recipes: Sequence[str] = ()
    by_average: bool = True
    outputs_passed: bool = False
    effort: float = 1.0
    broken: list[Exception] = field(default_factory=list)
    against: Callable[[Sequence[Hypothesis]], str] = lambda mistakes: ""

    @cached_property
    def trace(self) -> Trace:
        """The reference's trace in FP64."""
        return calls_of(self.prepared).trace

    def budget(self, checks: float) -> Budget:
        """Return a budget, from now on, as large as the cost of this many such comparisons on the nominal machine.

        If the cost were measured, a busy machine would search longer than a fast one, and find other mistakes.
        """
        clock = self.prepared.clock
        one = max(_PASSES_A_CHECK * clock.forward.seconds(), _SHORTEST_CHECK)
        return Budget.of(clock, self.effort * checks * one)

    @property
    def precision(self) -> Precision:
        """The precision of the comparison."""
        return self.request.precision

    @property
    def is_on_probes(self) -> bool:
        """Return whether ``prepared`` and ``candidate`` are those of the probing inputs, with outputs named as such."""
        return self.run_on is not self.prepared

    def judge(
        self,
        golden: Tensors,
        models: Sequence[Tensors],
        candidate: Tensors | None = None,
        biased_runs: Sequence[Tensors] = (),
    ) -> list[TensorResult]:
        """Judge the candidate, or another one, against another golden.

        Args:
            golden: the other golden.
            models: its rounding models.
            candidate: the other candidate.
            leaning: the first model's tensors with each kind of leaning kernel.
        """
        computed = self.candidate if candidate is None else candidate
        if self.is_on_probes:
            golden, computed = as_probed(golden), as_probed(computed)
            models, biased_runs = [as_probed(one) for one in models], [as_probed(one) for one in biased_runs]
        truths = {key: GoldenTensor(tensor) for key, tensor in golden.items()}
        given = truths, models, computed, self.precision, self.request.calibration, (), NONE_DRAWN, biased_runs
        judged = gradients_of(self.request.case, judge(*given, by_average=self.by_average))
        return as_outputs(judged) if self.is_on_probes else list(judged)

    def rerun(
        self, change: Callable[[nn.Module], None] = unchanged, cotangents: Mapping[str, Tensor] | None = None
    ) -> Tensors:
        """Run the candidate again, after a change to its newly built module, with other output gradients if any.

        Tensors that were computed elsewhere, as by several ranks, cannot be computed again here. They are returned as
        they are.

        Raises:
            OutOfTime: if the limit of real time is reached.
        """
        self.prepared.clock.check()
        if self.request.candidate_run is not None:
            return dict(self.candidate)
        tensors = run_again(self.request, self.run_on, change, cotangents)
        return of_probe(tensors) if self.is_on_probes else tensors

    @property
    def golden(self) -> Tensors:
        """The reference's tensors in FP64."""
        return tensors_of(self.prepared.golden)

    @property
    def models(self) -> list[Tensors]:
        """The reference's tensors with the precision's rounding, one for each way in which kernels compute."""
        self.prepared.clock.check()
        ran = [model_tensors(self.run_on, self.precision.rounding, one) for one in self.freedoms]
        return [of_probe(one) for one in ran] if self.is_on_probes else ran

    @property
    def outputs(self) -> list[TensorResult]:
        """The outputs' results."""
        return [result for result in self.results if result.kind == "output"]


def on_probes(failure: Failure) -> Failure:
    """Return the same failure as the probing inputs show it, with their outputs in the place of the others."""
    return replace(
        failure,
        results=as_outputs([tensor for tensor in failure.results if tensor.probed]),
        candidate=of_probe(failure.candidate),
        prepared=failure.prepared.on_probes(),
    )


def of_probe(tensors: Tensors) -> Tensors:
    """Return the outputs on the probing inputs as outputs."""
    return {("output", name): tensor for (kind, name), tensor in tensors.items() if kind == PROBED}


def as_outputs(probed: Sequence[TensorResult]) -> list[TensorResult]:
    """Return the verdicts on outputs of the probing inputs as verdicts on outputs."""
    return [replace(tensor, kind="output") for tensor in probed]


def as_probed(tensors: Tensors) -> Tensors:
    """Return outputs as those of the probing inputs."""
    return {(PROBED, name): tensor for (kind, name), tensor in tensors.items() if kind == "output"}


def few_outputs(failure: Failure) -> bool:
    """Return whether all outputs together, such as a loss, are so few numbers that many mistakes would explain them."""
    return sum(x.numel() for (kind, _), x in failure.golden.items() if kind == "output") < _FEW


def outputs_tell_little(failure: Failure) -> bool:
    """Return whether gradients failed while outputs are few numbers or all passed."""
    gradients = any(not one.passed and one.kind != "output" and one.finite for one in failure.results)
    return gradients and (few_outputs(failure) or all(result.passed for result in failure.outputs))


def tolerance_of(failure: Failure, key: tuple[Kind, str]) -> Tolerance:
    """Return the tolerance of a compared tensor."""
    result = next(result for result in failure.results if result.key == key)
    return Tolerance(result.tolerance_relative_l2, result.tolerance_max_abs)


# Are a candidate's tensors those of another golden, within tolerance?


def explains(failure: Failure, golden: Tensors | None) -> bool:
    """Return whether all of the candidate's tensors are within tolerance of the other golden's."""
    return golden is not None and all(agrees(failure, result, golden) for result in failure.results)


def agrees(failure: Failure, result: TensorResult, golden: Tensors) -> bool:
    """Return whether this tensor is within tolerance of the other golden's."""
    key = result.key
    errors = measure(failure.candidate[key], golden[key], failure.precision.dtype)
    return margin(errors, tolerance_of(failure, key)) <= 1.0
