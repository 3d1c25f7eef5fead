"""Measure how much longer a run takes than the bare forward and backward passes that it needs.

    python benchmarks/overhead.py [CASE...] [--out benchmarks/results/overhead.json]

The passes of a comparison are run here with modules and inputs that are ready, and with nothing around them, neither
rounding nor judging:

* golden, once per dtype: forward and backward in FP64, and forward on the probing inputs;
* the change that each subtle mistake would make, once per dtype: forward in FP64, as many times as there are mistakes;
* the rounding model, twice per way of rounding: forward and backward in FP32, and forward on the probing inputs;
* the candidate, as many times as the recipe needs: forward and backward, and forward on the probing inputs.

The benchmark also shows the ratio to the three passes without which no check is possible: golden, one model and the
candidate. It uses one seed, all precisions that run here, and the built-in cases whose names contain a given word.
"""

from __future__ import annotations

from collections import Counter

import torch
from measuring import Measure, machine, processor_seconds, report
from suite_cases import as_in_a_run, case_parser, cases, precisions

from parity import te
from parity.case.case import Case
from parity.case.validate import CheckedSize
from parity.judge.directions import directions
from parity.passes.one_pass import outputs_of, run
from parity.passes.prepare import Prepared, build, cast, forget, prepare
from parity.te import Kernels, Precision, state

NECESSARY = ("golden", "model", "candidate")


def bare_passes(case: Case, checked: CheckedSize, kernels: Kernels) -> Counter[str]:
    """Return the seconds that the passes take, by kind."""
    seconds: Counter[str] = Counter()
    dtypes, roundings = set(), set()
    for precision in precisions(case, kernels):
        prepared = prepare(case, checked, precision.dtype, 0, kernels)
        if precision.dtype not in dtypes:
            dtypes.add(precision.dtype)
            mistakes = len(directions(prepared))
            prepared.reference.double()
            both, forward, probing = _reference_passes(prepared, torch.float64)
            seconds += Counter({"golden": both, "golden, probing": probing, "mistakes": mistakes * forward})
        if precision.rounding not in roundings:
            roundings.add(precision.rounding)
            prepared.reference.float()
            both, _, probing = _reference_passes(prepared, torch.float32)
            seconds += Counter({"model": both, "second model": both, "models, probing": 2 * probing})
        both, probing = _candidate_passes(case, checked, prepared, precision, kernels)
        seconds += Counter({"candidate": both, "candidate, probing": probing})
    return seconds


def _reference_passes(prepared: Prepared, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the seconds of forward and backward, of forward alone, and of forward on the probing inputs."""
    inputs, module = cast(prepared.inputs, dtype), prepared.reference

    def cotangents(outputs):
        return {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()}

    def forward(of):
        with torch.no_grad():
            outputs_of(module, prepared.call, of)

    both = processor_seconds(lambda: run(module, prepared.call, inputs, prepared.input_names, cotangents))
    alone = processor_seconds(lambda: forward(inputs))
    if not prepared.probed:
        return both, alone, 0.0
    probe = cast(prepared.probe, dtype)
    return both, alone, processor_seconds(lambda: forward(probe))


@state.fresh_quantization()
def _candidate_passes(
    case: Case, checked: CheckedSize, prepared: Prepared, precision: Precision, kernels: Kernels
) -> tuple[float, float]:
    """Return the seconds of forward and backward, and of forward on the probing inputs, with warm-up passes."""
    pair = build(case, checked, 0, kernels)
    candidate = pair.candidate.to(precision.dtype)

    def cotangents(outputs):
        return {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()}

    def both():
        for _ in range(1 + precision.warmup_passes):
            context = precision.autocast(kernels)
            run(candidate, pair.call_candidate, prepared.inputs, prepared.input_names, cotangents, context)

    def forward():
        for _ in range(1 + precision.warmup_passes):
            with precision.autocast(kernels):
                outputs_of(candidate, pair.call_candidate, prepared.probe)

    return processor_seconds(both), processor_seconds(forward) if prepared.probed else 0.0


def main() -> None:
    arguments = case_parser(__doc__).parse_args()
    kernels = te.kernels()
    rows, totals = [], [0.0, 0.0, 0.0]
    kinds: Counter[str] = Counter()
    for case, checked in cases(arguments.cases, kernels):

        def whole(case=case, checked=checked) -> None:
            for precision in precisions(case, kernels):
                as_in_a_run(case, checked, precision, kernels)

        times, passes = [], []
        for _ in range(arguments.repeats):
            forget()
            times.append(processor_seconds(whole))
            passes.append(bare_passes(case, checked, kernels))
        best = min(passes, key=Counter.total)  # the fastest repeat as a whole, as for the run, not of each kind
        bare, necessary = best.total(), sum(best[kind] for kind in NECESSARY)
        kinds += best
        figures = (min(times), bare, necessary)
        totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
        rows.append(_row(case.name, checked.label, *figures))
    rows.append(_row("all", "", *totals))
    rows += [(f"of these passes: {kind}", "", "", f"{seconds:.2f}", "", "", "") for kind, seconds in kinds.items()]
    run_seconds, bare, necessary = totals
    report(
        __doc__,
        [
            Measure("whole run over the bare passes that it takes", run_seconds / bare, 1.25),
            Measure("whole run over golden, one model and the candidate alone", run_seconds / necessary),
        ],
        ("case", "size", "run (s)", "passes (s)", "ratio", "golden, model, candidate (s)", "ratio"),
        rows,
        arguments.out,
        machine(torch.get_num_threads(), kernels.backend),
    )


def _row(name: str, size: str, run: float, bare: float, necessary: float) -> tuple[str, ...]:
    return name, size, f"{run:.2f}", f"{bare:.2f}", f"{run / bare:.2f}", f"{necessary:.2f}", f"{run / necessary:.2f}"


if __name__ == "__main__":
    main()
