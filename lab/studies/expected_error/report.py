"""Draw the report of the study ``expected_error``."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.studies import reporting
from lab.studies.expected_error.study import (
    AFTER_REPAIR,
    ALONE,
    FIGURE,
    ISSUE_407,
    ISSUE_407_SHAPE,
    KINDS,
    LINEARS,
    MODEL,
    NOTHING_LEFT,
    PER_TENSOR,
    SHORT_SUMS,
    SUMS,
    TE,
    Drawn,
    Measured,
    Results,
    Run,
    Settings,
    base,
    held_out,
    sweep,
)
from lab.studies.reporting import (
    CANNOT_TELL,
    NO,
    YES,
    Claim,
    Law,
    Sizes,
    digits,
    fit,
    mean_digits,
    placed,
    ratios_between,
)
from lab.studies.te_modules import MODULES, Shape
from parity.report.numbers import short
from parity.te import Kernels

# Means over seeds, and the laws of an error's growth.


def mean(found: Results, name: str, shape: Shape, precision: str, way: str, kind: str = "output") -> float:
    """Return the root mean square of the relative error over all seeds; NaN if it was not measured."""
    errors = [
        each.relative_l2[kind] for each in seeds_of(found, name, shape, precision, way) if kind in each.relative_l2
    ]
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else math.nan


def seeds_of(found: Results, name: str, shape: Shape, precision: str, way: str) -> list[Measured]:
    """Return the measurements of one kind of run, one for each seed."""
    runs_by_seed = (found.get(Run(name, shape, precision, way, seed)) for seed in itertools.count())
    return list(itertools.takewhile(lambda measured: measured is not None, runs_by_seed))  # type: ignore[arg-type]


def law(
    found: Results, settings: Settings, name: str, precision: str, way: str = TE, kind: str = "output"
) -> Law | None:
    """Fit the growth of a module's error over its sweep, below ``NOTHING_LEFT``; None if there is no error."""
    points = [(sizes_of(shape), mean(found, name, shape, precision, way, kind)) for shape in sweep(name, settings)]
    growing = [(sizes, error) for sizes, error in points if error < NOTHING_LEFT]
    return fit(growing, sizes_of(base(settings)), perhaps_exponential=["depth"])


def sizes_of(shape: Shape) -> Sizes:
    """Return a shape in the form that a law takes."""
    return dataclasses.asdict(shape)


# Plots of the study ``expected_error``.


PART_TITLES = {
    "weights": "weights",
    "inputs": "GEMM inputs",
    "storage": "stored results",
    "attention": "attention",
    SUMS: "FP32 sums",
}
# Rounded gradients are left out: they occur only in the backward pass and cannot affect an output.
PARTS_OF_OUTPUTS = tuple(part for part in PART_TITLES if part in ALONE)
_AXES = {"hidden": "hidden size", "seq": "sequence length", "depth": "modules in a row"}
_MARKERS = "osv^D<>pP*X"


def growth(found: Results, settings: Settings) -> Figure:
    """Draw the output's error over each size, with a column for each precision. Markers are TE, lines are the law."""
    columns = settings.precisions
    figure = Figure(figsize=(2.7 * len(columns), 8.4), layout="constrained")
    axes = figure.subplots(len(_AXES), len(columns), squeeze=False, sharex="row", sharey="col")
    for row, size in zip(axes, _AXES, strict=True):
        for axis, precision in zip(row, columns, strict=True):
            for index, name in enumerate(settings.modules):
                _growth_line(axis, found, settings, name, precision, size, index)
            axis.grid(True, which="major", alpha=0.3)
            axis.set_xlabel(_AXES[size])
    for axis, precision in zip(axes[0], columns, strict=True):
        axis.set_title(precision)
    for row in axes:
        row[0].set_ylabel("relative L2 error of the output")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize="small")
    return figure


def parts(found: Results, settings: Settings) -> Figure:
    """Draw each rounding's share of the output's squared error, with a column for each precision."""
    columns = settings.precisions
    names = settings.modules
    figure = Figure(figsize=(2.1 * len(columns) + 3, 0.36 * len(names) + 1.8), layout="constrained")
    axes = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axis, precision in zip(axes, columns, strict=True):
        shares = np.array([shares_of(found, settings, name, precision) for name in names])
        left = np.zeros(len(names))
        for part, share in zip(PARTS_OF_OUTPUTS, shares.T, strict=True):
            axis.barh(range(len(names)), share, left=left, label=PART_TITLES[part])
            left += share
        axis.set(title=precision, xlim=(0, 1), yticks=range(len(names)), xticks=[0, 0.5, 1])
        axis.set_yticklabels([MODULES[name].title for name in names])
        axis.set_xlabel("share of squared error", fontsize="small")
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    return figure


def shares_of(found: Results, settings: Settings, name: str, precision: str) -> Sequence[float]:
    """Return the share of each of ``PARTS_OF_OUTPUTS`` in the sum of their squared errors."""
    squares = [mean(found, name, base(settings), precision, part) ** 2 for part in PARTS_OF_OUTPUTS]
    sums = squares[PARTS_OF_OUTPUTS.index(SUMS)]
    # Each rounding is measured on top of FP32 sums, so their share is subtracted.
    own = [
        square if part == SUMS else max(0.0, square - sums)
        for part, square in zip(PARTS_OF_OUTPUTS, squares, strict=True)
    ]
    return [square / sum(own) for square in own]


def explained_share(found: Results, settings: Settings, name: str, precision: str) -> float:
    """Return the parts' errors, added as if independent, divided by the error of all roundings together."""
    squares = [mean(found, name, base(settings), precision, part) ** 2 for part in PARTS_OF_OUTPUTS]
    sums = squares[PARTS_OF_OUTPUTS.index(SUMS)]
    return ((sum(squares) - (len(squares) - 1) * sums) ** 0.5) / mean(found, name, base(settings), precision, MODEL)


def _growth_line(
    axis: Axes, found: Results, settings: Settings, name: str, precision: str, size: str, index: int
) -> None:
    middle = base(settings)
    others = {other for other in _AXES if other != size}
    shapes = sorted(
        (shape for shape in sweep(name, settings) if all(_same(shape, middle, other) for other in others)),
        key=lambda shape: getattr(shape, size),
    )
    values = [getattr(shape, size) for shape in shapes]
    if len(values) < 2:
        return
    color = colormaps["tab20"](index % 20)
    axis.loglog(
        values,
        [mean(found, name, shape, precision, TE) for shape in shapes],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=4,
        linestyle="",
        color=color,
        label=MODULES[name].title,
    )
    fitted = law(found, settings, name, precision)
    if fitted is not None:
        on_law = [fitted.at(sizes_of(shape)) for shape in shapes]
        drawn = [error if error < NOTHING_LEFT else math.nan for error in on_law]
        axis.loglog(values, drawn, color=color, linewidth=0.8)
    axis.set_xticks(values, labels=map(str, values), fontsize="x-small")
    axis.minorticks_off()


def _same(shape: object, other: object, size: str) -> bool:
    return bool(getattr(shape, size) == getattr(other, size))


# The report.


# Published claims about the errors of TE's modules, next to this study's results.


# A figure belongs to one distribution and not to another if it is this many times likelier in the first.
_CLEARLY = 20.0
# It does not belong to a distribution in which a draw is as far out, or as small, with less than this probability.
_HARDLY_EVER = 0.01
_AS_THEORY = 1.15

# Significand bits, including the leading one, of the coarser rounding: that of both operands, or that of the result.
_OPERAND_BITS = {"fp32": 11, "fp8_delayed": 4, "fp8_current": 4, "fp8_block": 4, "mxfp8": 4}
_RESULT_BITS = {"bf16": 8, "fp16": 11}
# atol of tests/pytorch/test_numerics.py, TE 2.20.
_TE_TOLERANCES = (
    ("layernorm_mlp_swiglu", "LayerNormMLP", {"fp32": 2e-2, "bf16": 5e-2}),
    ("transformer_layer_gpt", "TransformerLayer", {"fp32": 5e-3, "bf16": 1e-1}),
)


def claims(found: Results, drawn: Sequence[Drawn], settings: Settings) -> Iterator[Claim]:
    """Yield the claims that these settings can test."""
    if "fp32" in settings.precisions:
        yield from _issue_407(drawn)
    if "linear" in settings.modules:
        yield from _quantization_noise(found, settings)
    yield from _tolerances(found, settings)


def _issue_407(drawn: Sequence[Drawn]) -> Iterator[Claim]:
    right, swapped = [each.faithful for each in drawn], [each.swapped for each in drawn]
    yield Claim(
        source="TransformerEngine issue 407: SwiGLU MLP and LayerNormMLP in FP32",
        claimed=f"their outputs' sums differ by {FIGURE}; by rounding, this project says",
        found=_found(FIGURE, right, swapped, "the right port", "with gate and up exchanged"),
        agrees=explained(FIGURE, right, swapped),
        why=f"TE computes FP32 GEMMs in TF32, which moves the sum by {_spread(right)} (mean and standard deviation of "
        f"{len(drawn)} draws of weights and input)",
    )
    yield Claim(
        source="ibid.: after an attempt at a repair",
        claimed=f"{AFTER_REPAIR}; by gate and up exchanged, this project says",
        found=_found(AFTER_REPAIR, swapped, right, "the exchanged port", "of the right one"),
        agrees=explained(AFTER_REPAIR, swapped, right),
        why=f"exchanging the two moves it by {_spread(swapped)}, and in {_as_near_as_the_repair(swapped)} of draws "
        "by no more than this; another mistake may do so as well",
    )
    for name in LINEARS:
        share = sum(each.allclose[name] for each in drawn) / len(drawn)
        yield Claim(
            source=f"ibid.: {name}",
            claimed="Linear is precisely accurate: `torch.allclose` is True",
            found=f"True in {100 * share:.0f} % of {len(drawn)} draws",
            agrees=NO if share < 0.05 else YES if share > 0.5 else CANNOT_TELL,
            why="TF32 keeps 11 bits, and `allclose` wants 17. For FP32 cuBLAS may, and need not, take TF32 "
            "(`CUBLAS_COMPUTE_32F_FAST_TF32`, cublaslt_gemm.cu of TE 2.20): whether it does for so few outputs as the "
            "reporter's, only a GPU shows",
        )


def explained(figure: float, by: Sequence[float], other: Sequence[float]) -> str:
    """Say whether a figure comes from the distribution of ``by`` and not from that of ``other``, given draws of both.

    Returns:
        Yes if it is ``_CLEARLY`` times likelier under ``by``. No if it is as much likelier under ``other``, or if a
        draw of ``by`` is hardly ever as far out or as small. Otherwise, that the draws cannot tell.
    """
    if min(len(by), len(other)) < 2:
        return CANNOT_TELL
    one, against = placed(figure, by), placed(figure, other)
    if min(one.chance, one.as_small) < _HARDLY_EVER or one.density * _CLEARLY < against.density:
        return NO
    return YES if one.density > _CLEARLY * against.density else CANNOT_TELL


def _found(figure: float, by: Sequence[float], other: Sequence[float], first: str, second: str) -> str:
    if min(len(by), len(other)) < 2:
        return "too few draws"
    one, against = placed(figure, by), placed(figure, other)
    likelier = one.density / against.density if against.density > 0 else math.inf
    return (
        f"{first}: {one.deviations:+.2g} standard deviations from the mean, {100 * one.below:.0f} % of draws below; "
        f"{second}: {against.deviations:+.2g} from the mean. {'Over a million' if likelier > 1e6 else short(likelier)} "
        "times as likely as the other"
    )


def _spread(draws: Sequence[float]) -> str:
    if len(draws) < 2:
        return short(draws[0])
    return f"{short(statistics.fmean(draws))} ± {short(statistics.stdev(draws))}"


def _as_near_as_the_repair(draws: Sequence[float]) -> str:
    return f"{100 * sum(abs(each) <= abs(AFTER_REPAIR) for each in draws) / len(draws):.0f} %"


def _quantization_noise(found: Results, settings: Settings) -> Iterator[Claim]:
    """Test that the noise of rounding to p significand bits has 0.180 * 2^-2p of the signal's power."""
    for precision in settings.precisions:
        roundings, bits = (
            (2, _OPERAND_BITS[precision]) if precision in _OPERAND_BITS else (1, _RESULT_BITS.get(precision))
        )
        if bits is None:
            continue
        theory = math.sqrt(roundings * 0.180) * 2.0**-bits
        errors = [each.relative_l2["output"] for each in seeds_of(found, "linear", base(settings), precision, TE)]
        rounded = "both operands are" if roundings == 2 else "the result is"
        yield Claim(
            source=f"Widrow and Kollár, Quantization Noise, 2008: Linear in `{precision}`",
            claimed=f"sqrt({roundings} x 0.180) x 2^-{bits} = {short(theory)}",
            found=mean_digits(errors),
            agrees=ratios_between([error / theory for error in errors], 1 / _AS_THEORY, _AS_THEORY),
            why=f"{rounded} rounded to {bits} significand bits; within 15 % counts as agreement",
        )


def _tolerances(found: Results, settings: Settings) -> Iterator[Claim]:
    for name, title, tolerances in _TE_TOLERANCES:
        for precision, atol in tolerances.items():
            if name not in settings.modules or precision not in settings.precisions:
                continue
            measured = seeds_of(found, name, base(settings), precision, TE)
            largest = max(each.max_abs for each in measured)
            yield Claim(
                source=f"TE 2.20's own tests (test_numerics.py): {title} in {precision}",
                claimed=f"outputs agree within {atol:g}",
                found=f"largest error {short(largest)}",
                agrees="yes" if largest <= atol else "no",
                why=f"a mistake up to {short(atol / largest)} times as large as rounding's largest error passes, too",
            )


GROWTH_PICTURE, PARTS_PICTURE = "expected_error_growth.png", "expected_error_parts.png"

_INTRODUCTION = """\
You replaced a PyTorch module by TransformerEngine's (TE) and the numbers differ. This report shows how much they
differ if nothing is wrong. The error is relative: the Euclidean norm of the difference from the same module in FP64, on
the same weights and inputs (both already rounded to the precision's dtype), over the norm of the FP64 value. 0.01 is
1 %.

{made_on} Inputs and output gradients are N(0, 1), weights are PyTorch's initial ones, the batch is 1; MLPs are 4
(gated: 3) times as wide inside, heads have 64 channels. At the size of the tables, the root mean square over seeds 0 to
{last_seed}; seed 0 elsewhere. {gpus}"""

_HOW_TO = """\
Find your module and your precision: that is the error at hidden size {hidden}, {seq} tokens, one module. At another
size multiply it by (hidden / {hidden})^a (tokens / {seq})^b (modules in a row)^c with the exponents from the table
below. {example} Seeds differ by {spread}, so several times the figure is a bug, or inputs unlike these: see "What it
does not say"; `parity run` finds out which."""

_EXPONENTS = """\
Exponents `a, b, c` of hidden size, tokens and modules in a row (– for modules that are not stacked). In the place of
`c`, `g^(n - 1)` says that the error grows by the factor g with each of n modules. All of it holds up to an error of
{nothing:g}; above, little of the value is left."""

_MODEL = """\
The prediction: the same table from the rounding model (`parity/rounding/`), which is plain PyTorch with roundings
put in and has never seen TE. {agreement}"""

_PARTS = """\
Each rounding was made alone in the rounding model, one module at hidden size {hidden} and {seq} tokens: that of the
weights to the GEMM's format, that of what enters a GEMM as its input, that of results as they are stored between
kernels, those of attention's operands and scores, and none, which leaves FP32 sums. The bars are shares of the output's
squared error. Weights cost nothing in BF16 and FP16, because the FP64 module holds the same rounded weights: what
rounding a checkpoint to BF16 costs is no error of a port. Errors of parts add as squares (independent errors do): the
last column is the root of their sum over the error of all roundings together. It is above 1 where one part stores a
value that another rounds to the same format when it reads it: together they round once, and apart each does."""

_SHORT_SUMS = """\
The tables above add in FP32. A Hopper adds per-tensor FP8 products in sums of 14 bits (study `fp8_accumulation`).
With TE's kernels adding so (`te_on_cpu.tensor_cores`), the same modules lose the following; what short sums
add grows with the length of the sums, here up to {longest}."""

_ISSUE = """\
RMSNorm and a SwiGLU MLP, hidden size 512, ffn 1536, input `rand(2, 1024, 512)`, weights N(0, 0.023)."""

_SUMS = """\
The issue compares the sums of all outputs, once. Here is how the sum's error scatters over {count} draws of weights and
input: its mean, standard deviation and quantiles. The last columns place the issue's two figures among the draws: the
share of draws below, and in brackets the distance from the mean in standard deviations. One sum says little of a port's
size of error: it tells rounding from this mistake because the mistake moves it a thousand times as far."""

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

_LIMITS = """\
- **Other inputs.** A relative error hardly depends on the inputs' scale, but it may on their shape: outliers cost NVFP4
  more (study `fp8_recipes`), sums of one sign cost short sums more (`fp8_accumulation`), and an output in which large
  terms cancel has a larger relative error from the same absolute one. `parity run` computes the expected error on your
  module, weights and inputs.
- **Layers hide errors.** In a TransformerLayer the residual stream passes most of the output unrounded but for
  storage: its output's error is small because the stream is large. Its weight gradients show the error of the branches.
- **FP8 attention is off.** TE computes attention in BF16 under every recipe unless `fp8_dpa` is set.
- **Real kernels.** {real}"""

_REAL = {
    "cpu": "These are TE's own modules on parity's CPU kernels, which sum in another order than a GPU's. The same "
    "command on a GPU measures the real ones.",
    "gpu": "These are TE's compiled kernels on the GPU named above.",
}


def write(
    found: Results,
    drawn: Sequence[Drawn],
    missing: Mapping[str, str | None],
    settings: Settings,
    kernels: Kernels,
    folder: Path,
) -> Path:
    """Write ``expected_error.md`` and its plots into the folder, and return the report's path.

    Args:
        found: the results of all runs.
        drawn: the draws of issue 407.
        missing: precisions that no GPU here runs, each with the reason.
        settings: the study's settings, without those precisions.
        kernels: the kernels that TE ran on.
        folder: an existing folder.
    """
    growth(found, settings).savefig(folder / GROWTH_PICTURE, dpi=80)
    if settings.parts:
        parts(found, settings).savefig(folder / PARTS_PICTURE, dpi=90)
    return reporting.written(folder / "expected_error.md", _sections(found, drawn, missing, settings, kernels))


def _sections(
    found: Results,
    drawn: Sequence[Drawn],
    missing: Mapping[str, str | None],
    settings: Settings,
    kernels: Kernels,
) -> Iterator[str]:
    yield "# Which error is normal?"
    yield _INTRODUCTION.format(
        made_on=reporting.made_on(kernels),
        last_seed=settings.seeds - 1,
        gpus=_gpus(found, settings),
    )
    yield from (f"- `{name}` was not measured: {reason}" for name, reason in missing.items())
    yield "## My module, my precision: expect this"
    yield _HOW_TO.format(
        hidden=settings.hidden,
        seq=settings.seq,
        example=_example(found, settings),
        spread=_spread_table(found, settings),
    )
    yield "Error of the **output**, measured:"
    yield _lookup(found, settings, TE, "output")
    yield _EXPONENTS.format(nothing=NOTHING_LEFT)
    yield _by_module(settings, lambda name, precision: _exponents(found, settings, name, precision))
    for kind in KINDS[1:]:
        yield f"Error of the **{kind}{'s' if kind.startswith('weight') else ''}**, measured:"
        yield _lookup(found, settings, TE, kind)
    yield _MODEL.format(agreement=_agreement(found, settings))
    yield _lookup(found, settings, MODEL, "output")
    yield "## How it grows"
    yield _growth_text(found, settings)
    yield f"![Error over sizes]({GROWTH_PICTURE})"
    if settings.parts:
        yield "## Where it comes from"
        yield _PARTS.format(hidden=settings.hidden, seq=settings.seq)
        yield f"![Shares of the parts]({PARTS_PICTURE})"
        yield _parts_table(found, settings)
        if kernels.backend == "cpu" and set(PER_TENSOR) & set(settings.precisions):
            yield _SHORT_SUMS.format(longest=4 * settings.hidden)
            yield _short_sums(found, settings)
    yield "## The module of TransformerEngine issue 407"
    yield _issue(found, drawn, settings)
    yield "## Claims"
    yield reporting.claims(claims(found, drawn, settings))
    yield "## What it does not say"
    yield _LIMITS.format(real=_REAL[kernels.backend])


def _gpus(found: Results, settings: Settings) -> str:
    by_gpu: dict[str, list[str]] = {}
    for precision in settings.precisions:
        gpu = next(measured.gpu for run, measured in found.items() if (run.precision, run.way) == (precision, TE))
        by_gpu.setdefault(gpu, []).append(f"`{precision}`")
    return " ".join(f"On an {gpu}: {', '.join(names)}." for gpu, names in by_gpu.items())


def _spread_table(found: Results, settings: Settings) -> str:
    """Return the largest relative difference between two seeds' output errors at the base size, in percent."""
    factors = []
    for name in settings.modules:
        for precision in settings.precisions:
            errors = [
                measured.relative_l2["output"] for measured in seeds_of(found, name, base(settings), precision, TE)
            ]
            factors.append(max(errors) / min(errors))
    return f"{100 * (max(factors) - 1):.0f} %"


def _example(found: Results, settings: Settings) -> str:
    """Return a sentence that compares the law with the measurement at the held-out shape."""
    name, precision = settings.modules[-1], settings.precisions[min(4, len(settings.precisions) - 1)]
    fitted, shape = law(found, settings, name, precision), held_out(name, settings)
    if fitted is None:
        return ""
    measured = mean(found, name, shape, precision, TE)
    return (
        f"For example, {shape.depth} x {MODULES[name].title} of hidden size {shape.hidden} on {shape.seq} tokens in "
        f"`{precision}`: the law gives {short(fitted.at(sizes_of(shape)))}; measured: {short(measured)}."
    )


def _by_module(settings: Settings, cell: Callable[[str, str], str]) -> str:
    rows = [[MODULES[name].title, *(cell(name, each) for each in settings.precisions)] for name in settings.modules]
    return reporting.numbers(rows, ["module", *settings.precisions])


def _lookup(found: Results, settings: Settings, way: str, kind: str) -> str:
    middle = base(settings)
    return _by_module(settings, lambda name, precision: _cell(found, name, middle, precision, way, kind))


def _cell(found: Results, name: str, shape: Shape, precision: str, way: str, kind: str) -> str:
    """Return the mean error over seeds, written with the digits that seeds reproduce."""
    errors = [
        each.relative_l2[kind] for each in seeds_of(found, name, shape, precision, way) if kind in each.relative_l2
    ]
    return digits(mean(found, name, shape, precision, way, kind), errors)


def _exponents(found: Results, settings: Settings, name: str, precision: str) -> str:
    fitted = law(found, settings, name, precision)
    if fitted is None:
        return "–"
    return ", ".join(
        f"{fitted.rates[size]:.2f}^(n - 1)"
        if size in fitted.rates
        else f"{round(fitted.exponents[size], 2) + 0.0:.2f}"
        if size in fitted.exponents
        else "–"
        for size in _SIZE_TITLES
    )


def _agreement(found: Results, settings: Settings) -> str:
    ratios = {
        (name, shape, precision): mean(found, name, shape, precision, TE) / mean(found, name, shape, precision, MODEL)
        for name in settings.modules
        for shape in (*sweep(name, settings), held_out(name, settings))
        for precision in settings.precisions
    }
    furthest = max(ratios, key=lambda key: abs(math.log(ratios[key])))
    name, shape, precision = furthest
    return (
        f"Over all {len(ratios)} modules, sizes and precisions of this report, measured over predicted is "
        f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}, median {statistics.median(ratios.values()):.2f}; "
        f"furthest off: {MODULES[name].title} in `{precision}`, hidden {shape.hidden}, {shape.seq} tokens, "
        f"{shape.depth} in a row."
    )


def _growth_text(found: Results, settings: Settings) -> str:
    fits = {
        (name, precision): fitted
        for name in settings.modules
        for precision in settings.precisions
        if (fitted := law(found, settings, name, precision)) is not None
    }
    worst_name, worst_precision = max(fits, key=lambda key: fits[key].worst_factor)
    misses = [fitted.worst_factor for fitted in fits.values()]
    held = [
        mean(found, name, held_out(name, settings), precision, TE) / fitted.at(sizes_of(held_out(name, settings)))
        for (name, precision), fitted in fits.items()
    ]
    lines = [
        f"The law is error = e (hidden / {settings.hidden})^a (tokens / {settings.seq})^b (modules)^c, fitted by least "
        "squares of logarithms.",
        "",
        *(_exponents_in_words(title, size, list(fits.values())) for size, title in _SIZE_TITLES.items()),
        *_amplified(fits),
        f"- The law misses the points that it was fitted to by at most a factor of {max(misses):.2f} "
        f"({MODULES[worst_name].title}, `{worst_precision}`), in the median by {statistics.median(misses):.2f}.",
        f"- At sizes that it was not fitted to (hidden {settings.held_out_hidden}, {settings.held_out_seq} tokens, "
        f"{settings.held_out_depth} in a row where stacked), measured over law is {min(held):.2f} to {max(held):.2f}.",
    ]
    return "\n".join(line for line in lines if line is not None)


def _amplified(fits: Mapping[tuple[str, str], Law]) -> Iterator[str]:
    """Yield a line for each module whose error grows by a constant factor with depth."""
    for module in dict.fromkeys(name for (name, _), fitted in fits.items() if fitted.rates):
        rates = [fitted.rates["depth"] for (name, _), fitted in fits.items() if name == module and fitted.rates]
        yield (
            f"- {MODULES[module].title}, each on the result of the one before without a residual stream: the error "
            f"grows by a factor of {min(rates):.2f} to {max(rates):.2f} with each, whatever the precision. Such a "
            "chain amplifies differences; a residual stream (TransformerLayer) does not."
        )


_SIZE_TITLES = {"hidden": "hidden size", "seq": "tokens", "depth": "modules in a row"}


def _exponents_in_words(title: str, size: str, fits: Sequence[Law]) -> str | None:
    values = [fitted.exponents[size] for fitted in fits if size in fitted.exponents]
    if not values:
        return None
    return f"- {title}: exponents {min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}."


def _parts_table(found: Results, settings: Settings) -> str:
    titles = [PART_TITLES[part] for part in PARTS_OF_OUTPUTS]
    rows = []
    for name in settings.modules:
        for precision in settings.precisions:
            errors = [mean(found, name, base(settings), precision, way) for way in (MODEL, *PARTS_OF_OUTPUTS)]
            whole = explained_share(found, settings, name, precision)
            rows.append([MODULES[name].title, precision, *map(short, errors), f"{whole:.2f}"])
    headers = ["module", "precision", "all", *(f"{title} alone" for title in titles), "parts / all"]
    return "<details><summary>Each rounding alone: error of the output</summary>\n\n" + (
        reporting.numbers(rows, headers) + "\n\n</details>"
    )


def _short_sums(found: Results, settings: Settings) -> str:
    precision = next(name for name in reversed(PER_TENSOR) if name in settings.precisions)
    middle = base(settings)
    rows = []
    for name in settings.modules:
        cells = []
        for kind in KINDS:
            plain, summed = (mean(found, name, middle, precision, way, kind) for way in (TE, SHORT_SUMS))
            cells.append("–" if math.isnan(plain) else f"{short(summed)} ({100 * (summed / plain - 1):+.1f} %)")
        rows.append([MODULES[name].title, *cells])
    return reporting.numbers(rows, [f"`{precision}`, short sums (against FP32 sums)", *KINDS])


def _issue(found: Results, drawn: Sequence[Drawn], settings: Settings) -> str:
    rows = []
    for precision in settings.precisions:
        errors = [_cell(found, ISSUE_407, ISSUE_407_SHAPE, precision, TE, kind) for kind in KINDS]
        rows.append([precision, *errors, _cell(found, ISSUE_407, ISSUE_407_SHAPE, precision, MODEL, "output")])
    relative = reporting.numbers(rows, ["relative error", *KINDS, "output, predicted"])
    return "\n\n".join([_ISSUE, relative, *_sums(drawn)])


def _sums(drawn: Sequence[Drawn]) -> Iterator[str]:
    if len(drawn) < 2:
        return
    yield _SUMS.format(count=len(drawn))
    rows = []
    for title, draws in (
        ("TF32, gate over up", [each.faithful for each in drawn]),
        ("exchanged: up over gate", [each.swapped for each in drawn]),
    ):
        places = [placed(figure, draws) for figure in (FIGURE, AFTER_REPAIR)]
        quantiles = [short(float(np.quantile(draws, share))) for share in _QUANTILES]
        where = [f"{100 * place.below:.0f} % ({place.deviations:+.2g})" for place in places]
        rows.append([title, mean_digits(draws), short(statistics.stdev(draws)), *quantiles, *where])
    headers = ["port in FP32", "mean", "standard deviation", *(f"{100 * share:g} %" for share in _QUANTILES)]
    yield reporting.numbers(rows, [*headers, f"below {FIGURE}", f"below {AFTER_REPAIR}"])
