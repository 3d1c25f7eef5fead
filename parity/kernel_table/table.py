"""Draws the table: for each result of each call, how far the CPU kernels are from the real ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from parity.kernel_table.call import KernelCall
from parity.kernel_table.distance import Distance, measure
from parity.kernel_table.left_out import NOT_CALLED
from parity.kernel_table.measure import Outcome
from parity.report.environment import Environment
from parity.report.numbers import short
from parity.report.tables import markdown_table

_HEADERS = ("kernel", "variant", "shapes", "result", "equal to the bit", "max ulps", "relative", "GPU µs")
_TRIAL = "**A trial without a GPU: both sides are the CPU kernels, in two processes. It says nothing about real ones.**"


@dataclass(frozen=True)
class Comparison:
    """One call on both kinds of kernels.

    Attributes:
        distances: by the name of a buffer, how far the two are apart, or why that cannot be said.
        why_none: why there are no distances at all, or None.
        seconds: of the GPU for the call, or None.
    """

    call: KernelCall
    distances: dict[str, Distance | str]
    why_none: str | None = None
    seconds: float | None = None


def compare(call: KernelCall, real: Outcome, emulated: Outcome) -> Comparison:
    """The distances of two outcomes of one call."""
    for side, outcome in (("GPU", real), ("CPU", emulated)):
        if outcome.error is not None:
            return Comparison(call, {}, f"{side}: {outcome.error}")
    names = list(dict.fromkeys([*real.buffers, *emulated.buffers]))
    return Comparison(call, {name: _distance(name, real, emulated) for name in names}, seconds=real.seconds)


def _distance(name: str, real: Outcome, emulated: Outcome) -> Distance | str:
    if name not in emulated.buffers:
        return "on the GPU only"
    if name not in real.buffers:
        return "on the CPU only"
    try:
        return measure(real.buffers[name], emulated.buffers[name])
    except ValueError as error:
        return str(error)


def draw(comparisons: Iterable[Comparison], environment: Environment, emulated_gpu: str) -> str:
    """The report, markdown.

    Args:
        environment: of the process with the real kernels.
        emulated_gpu: the GPU that the CPU kernels emulated.
    """
    made = list(comparisons)
    facts = {**environment.facts, "emulated GPU": emulated_gpu}
    parts = [
        "# CPU kernels against TransformerEngine's",
        *(() if environment.backend == "gpu" else (_TRIAL,)),
        "Made by `parity kernels`: the same inputs for the compiled kernels on the GPU and for the CPU kernels. "
        "*Equal to the bit* is the fraction of elements; *max ulps* counts the numbers of the result's own format from "
        "one result to the other; *relative* is the difference in the Euclidean norm. The time is the GPU's for the "
        "whole call as the table makes it, a forward pass before its backward one and the casts of quantized operands "
        "included. Sums differ in the order of their terms, so GEMMs, norms and bias gradients need not "
        "be equal; casts, scales and amaxes of equal inputs are.",
        markdown_table(facts.items(), ("environment", "")),
    ]
    for family, group in itertools.groupby(made, lambda comparison: comparison.call.family):
        parts += [f"## {family}", markdown_table([row for comparison in group for row in _rows(comparison)], _HEADERS)]
    missing = [(c.call.kernel, c.call.variant, c.why_none) for c in made if c.why_none is not None]
    parts += ["## Not compared", markdown_table(missing, ("kernel", "variant", "why")) if missing else "None."]
    parts += ["## CPU kernels that the table leaves out", markdown_table(NOT_CALLED.items(), ("kernel", "why"))]
    return "\n\n".join(parts) + "\n"


def _rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    call = comparison.call
    for name, distance in comparison.distances.items():
        if isinstance(distance, str):
            yield call.kernel, call.variant, call.shapes, name, distance, "-", "-", "-"
            continue
        figures = fraction(distance), ulps(distance), short(distance.relative)
        time = "-" if comparison.seconds is None else f"{1e6 * comparison.seconds:.1f}"
        yield call.kernel, call.variant, call.shapes, name, *figures, time


def fraction(distance: Distance) -> str:
    """The fraction of equal elements, in percent; only what is wholly equal shows as 100."""
    if distance.different == 0:
        return "100 %"
    percent = 100 * (1 - distance.different / distance.elements)
    return f"{math.floor(1000 * percent) / 1000:.3f} %"


def ulps(distance: Distance) -> str:
    return "NaN on one side" if math.isinf(distance.max_ulps) else f"{distance.max_ulps:.0f}"
