"""Measure how much longer comparing a training takes than the passes that it needs, and whether memory stays constant.

    python benchmarks/training_cost.py [CASE...] [--steps 10] [--out benchmarks/results/training_cost.json]

The passes of a step are timed where the comparison makes them: the reference in FP64, the reference under the rounding
model for two kinds of kernels, each forward and backward, and the candidate's own step with its optimizer. The rest of
the time is parity's own: building, mapping weights, judging, replaying the optimizer. The benchmark uses one seed, the
built-in cases whose names contain a given word, the small Llama of ``examples/training``, and all precisions that run
here.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import Measure, machine, processor_seconds, report
from suite_cases import case_parser, cases, precisions

from parity import te
from parity.case import registry
from parity.case.case import Case
from parity.case.validate import CheckedSize, check_case
from parity.judge.limits import packaged
from parity.passes import all_passes
from parity.passes import prepare as preparing
from parity.passes.prepare import forget
from parity.te import Kernels, Precision
from parity.trainings import steps
from parity.trainings.training import train_at

LLAMA = Path(__file__).parents[1] / "examples" / "training" / "llama.py"
# The allocator needs some dozens of steps until it finds room for each tensor in memory that others have left.
_WARM = 4


@contextmanager
def passes_timed() -> Iterator[list[float]]:
    """Append the processor time of each pass of a training to the list, within the context."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.process_time() - began)

        return run

    step_on = steps.Trainee._step_on

    with (
        mock.patch.object(preparing, "run", timed(preparing.run)),
        mock.patch.object(all_passes, "run", timed(all_passes.run)),
        mock.patch.object(steps.Trainee, "_step_on", lambda *given: timed(step_on(*given))),
    ):
        yield seconds


def trained(names: Sequence[str], kernels: Kernels) -> Iterator[tuple[Case, CheckedSize]]:
    """Yield the cases that are trained, each at all of its sizes."""
    yield from cases(names, kernels)
    for case in registry.load_file(LLAMA):
        yield from ((case, checked) for checked in check_case(case, kernels.te))


def peak_in_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    made = case_parser(__doc__)
    made.set_defaults(cases=["transformer_layer_llama"])
    made.add_argument("--steps", type=int, default=10)
    arguments = made.parse_args()
    kernels = te.kernels()
    rows, worst, total, bare, growth = [], 0.0, 0.0, 0.0, 0.0
    for case, checked in trained(arguments.cases, kernels):
        for precision in precisions(case, kernels):

            def train(
                number: int, case: Case = case, checked: CheckedSize = checked, precision: Precision = precision
            ) -> None:
                result = train_at(case, checked, precision, 0, kernels, packaged(), number)
                if not result.passed:
                    raise SystemExit(f"{result.item}: {result.reason}")

            forget()
            train(_WARM * arguments.steps)
            times = []
            for _ in range(arguments.repeats):
                with passes_timed() as passes:
                    whole = processor_seconds(lambda train=train: train(arguments.steps))
                times.append((whole, sum(passes)))
            whole, own = min(times, key=lambda one: one[0] / one[1])
            before = peak_in_mib()
            train(2 * _WARM * arguments.steps)
            grown = peak_in_mib() - before
            worst, total, bare, growth = max(worst, whole / own), total + whole, bare + own, max(growth, grown)
            figures = (f"{whole:.2f}", f"{own:.2f}", f"{whole / own:.2f}", f"{grown:.1f}")
            rows.append((case.name, checked.label, precision.name, *figures))
    report(
        __doc__,
        [
            Measure("a training over the passes that it needs, all together", total / bare, 1.5),
            Measure("the same, at most", worst),
            Measure(
                f"peak memory of {2 * _WARM * arguments.steps} steps beyond that of {_WARM * arguments.steps}, at most",
                growth,
                unit="MiB",
            ),
        ],
        ("pair", "size", "precision", f"{arguments.steps} steps (s)", "passes (s)", "ratio", "growth (MiB)"),
        rows,
        arguments.out,
        machine(torch.get_num_threads(), kernels.backend),
    )


if __name__ == "__main__":
    main()
