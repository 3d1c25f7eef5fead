"""Measure how much longer our check of a pair takes than one by hand with ``torch.testing.assert_close``.

    python benchmarks/against_assert_close.py [CASE...] [--out benchmarks/results/against_assert_close.json]

The check by hand does this at each precision: it builds both modules, casts them, copies the weights, runs both forward
and backward in the precision's dtype (TE under its recipe, as many times as the recipe needs), and compares outputs and
all gradients. Our check is a whole comparison, including golden and the expected error, at all precisions that run
here. Precisions of the same dtype share golden.
"""

from __future__ import annotations

import contextlib

import torch
from measuring import Measure, machine, processor_seconds, report
from suite_cases import as_in_a_run, case_parser, cases, precisions

from parity import te
from parity.case import transfer
from parity.case.case import Case, Rng, draw_inputs
from parity.case.validate import CheckedSize
from parity.passes.all_passes import tensors_of
from parity.passes.one_pass import positional_names, run
from parity.passes.prepare import build, cast, forget
from parity.te import Kernels, Precision


def by_hand(case: Case, checked: CheckedSize, precision: Precision, kernels: Kernels) -> None:
    """Run each module forward and backward, and compare the results, without checking whether they agree."""
    pair = build(case, checked, 0, kernels)
    reference, candidate = pair.reference.to(precision.dtype), pair.candidate.to(precision.dtype)
    parameters = dict(candidate.named_parameters())
    mapped = transfer.to_candidate(
        pair.weights, dict(reference.named_parameters()), transfer.parameter_shapes(candidate)
    )
    with torch.no_grad():
        for name, tensor in mapped.items():
            parameters[name].copy_(tensor)
    inputs = cast(draw_inputs(pair, checked.size, Rng(0)), precision.dtype)
    names = positional_names(reference, pair.call_reference, inputs)

    def cotangents(outputs):
        return {name: torch.ones_like(output) for name, output in outputs.items()}

    expected = run(reference, pair.call_reference, inputs, names, cotangents)
    for _ in range(1 + precision.warmup_passes):
        actual = run(candidate, pair.call_candidate, inputs, names, cotangents, precision.autocast(kernels))
    there = tensors_of(expected)
    for (kind, name), tensor in tensors_of(actual).items():
        if (kind, name) in there:
            _compare(tensor, there[kind, name])
    shapes = transfer.parameter_shapes(reference)
    theirs = transfer.gradients_to_reference(pair.weights, actual.weight_gradients, shapes)
    for name, tensor in theirs.items():
        _compare(tensor, expected.weight_gradients[name])


def _compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # The default tolerances reject right ports at most precisions, but only the time counts here.
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(actual, expected, check_dtype=False)


def main() -> None:
    arguments = case_parser(__doc__).parse_args()
    kernels = te.kernels()
    rows, totals = [], [0.0, 0.0]
    for case, checked in cases(arguments.cases, kernels):
        best = []
        for check in (as_in_a_run, by_hand):

            def all_precisions(check=check, case=case, checked=checked) -> None:
                for precision in precisions(case, kernels):
                    check(case, checked, precision, kernels)

            times = []
            for _ in range(arguments.repeats):
                forget()
                times.append(processor_seconds(all_precisions))
            best.append(min(times))
        totals = [total + seconds for total, seconds in zip(totals, best, strict=True)]
        rows.append((case.name, checked.label, *(f"{seconds:.2f}" for seconds in best), f"{best[0] / best[1]:.2f}"))
    rows.append(("all", "", *(f"{seconds:.2f}" for seconds in totals), f"{totals[0] / totals[1]:.2f}"))
    report(
        __doc__,
        [Measure("our check over the one by hand, all precisions of a case", totals[0] / totals[1], 2.5)],
        ("case", "size", "ours (s)", "by hand (s)", "ratio"),
        rows,
        arguments.out,
        machine(torch.get_num_threads(), kernels.backend),
    )


if __name__ == "__main__":
    main()
