"""Draw the report of the study ``softmax_precision``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from lab.studies import reporting
from lab.studies.reporting import NO, YES, Claim, mean_digits, ratios, ratios_between
from lab.studies.softmax_precision.study import (
    DTYPES,
    LAYOUTS,
    TE_WAYS,
    WAYS,
    Errors,
    Outcome,
    Precision,
    Run,
    Settings,
    Traffic,
    autocast_dtypes,
    error,
    frontier,
    of_seeds,
    scales_of,
    te_agrees,
    traffic,
    ways,
)
from parity.report.environment import cpu_model, gpu_name
from parity.report.numbers import short
from parity.te import Kernels

# Published claims about softmax in FP16 and FP32, next to this study's results.


_GLM = "GLM-130B"
# FP32 counts as better than FP16 if its error is below this share of FP16's.
_NO_BETTER = 0.99


@dataclass(frozen=True)
class Measured:
    """Figures for FP16 that do not come from the record.

    Attributes:
        frontiers: the largest score for which each way's result is finite.
        traffic: the memory traffic of each way.
        scores: the number of scores that ``traffic`` is for.
        agreement: the share of probabilities that are bitwise equal in TE's softmax and ``FP32``.
        autocast: by device, the output dtypes of softmax and of the next product under autocast.
        device: the device that bytes were counted on.
    """

    frontiers: Mapping[str, float]
    traffic: Mapping[str, Traffic]
    scores: int
    agreement: float
    autocast: Mapping[str, tuple[torch.dtype, torch.dtype]]
    device: str

    def bytes_a_score(self, way: str) -> float:
        """Return the bytes read and written in the forward pass, for each score."""
        return self.traffic[way].forward / self.scores


def claims(found: Mapping[Run, Outcome], settings: Settings, measured: Measured) -> Iterator[Claim]:
    """Yield each claim, tested in FP16, which must have been run in both layouts."""
    yield _overflow(found, settings, measured)
    yield _relaxed_range(found, settings, measured)
    yield _relaxed_precision(found, settings)
    yield _fp32_arithmetic(found, settings, measured)
    yield _cost(measured)
    yield _autocast(measured)


def worst_scale(found: Mapping[Run, Outcome], settings: Settings) -> int:
    """Return the scale at which PB-Relax moves the most probability to wrong keys, in a mixed head in FP16."""
    return max(scales_of("mixed", settings), key=lambda scale: error(found, "fp16", "mixed", "PB-Relax", scale).moved)


def _overflow(found: Mapping[Run, Outcome], settings: Settings, measured: Measured) -> Claim:
    largest = max(scales_of("mixed", settings))
    plain, subtracted = (error(found, "fp16", "apart", way, largest).spoiled for way in ("plain", "max subtracted"))
    return Claim(
        f"{_GLM}, README, after CogView",
        "scores of 1e4 and 1e-3 in different heads lead to frequent overflows or underflows under FP16 in softmax",
        f"at a standard deviation of 1e{largest}, {short(100 * plain)} % of rows are spoiled in plain FP16, which ends "
        f"at a score of {short(measured.frontiers['plain'])}; with the maximum subtracted {short(100 * subtracted)} %, "
        f"up to {short(measured.frontiers['max subtracted'])}",
        NO if plain == 0 else "only if no maximum is subtracted" if subtracted == 0 else YES,
        "exp(11.1) is past FP16's 65504. PyTorch's and TE's softmax subtract the maximum, and work in FP32; then only "
        "scores that are stored as infinity spoil a row. What underflows were probabilities below 3e-8",
    )


def _relaxed_range(found: Mapping[Run, Outcome], settings: Settings, measured: Measured) -> Claim:
    largest = max(settings.scales)
    head, rows, usual = (
        error(found, "fp16", "apart", way, largest).spoiled for way in ("PB-Relax", "PB-Relax by rows", "torch.softmax")
    )
    return Claim(
        "CogView, arXiv 2105.13290, section 2.4",
        "PB-Relax keeps attention from overflowing",
        f"the largest score that survives in FP16: {short(measured.frontiers['PB-Relax'])}, without it "
        f"{short(measured.frontiers['torch.softmax'])}. At a standard deviation of 1e{largest} {short(100 * head)} % "
        f"of rows are spoiled, by rows {short(100 * rows)} %, without it {short(100 * usual)} %",
        {(True, True): "yes", (False, True): "with each row's own maximum"}.get((head == 0, rows == 0), "no"),
        f"scores are stored divided by alpha = {settings.alpha:g}. But a row whose largest score lies 65504 below the "
        "head's becomes minus infinity throughout when it is multiplied back, and softmax makes NaN of it",
    )


def _relaxed_precision(found: Mapping[Run, Outcome], settings: Settings) -> Claim:
    scale = worst_scale(found, settings)
    head, rows, usual = (
        _moved(found, "mixed", way, scale) for way in ("PB-Relax", "PB-Relax by rows", "torch.softmax")
    )
    harms = ratios_between(ratios(head, usual), 10.0, math.inf)
    return Claim(
        f"{_GLM}, arXiv 2210.02414, on training stability",
        "PB-Relax does not help avoid divergence",
        f"a head with rows of several scales, FP16, the rows of standard deviation 1e{scale}: PB-Relax puts "
        f"{_percent(head)} % of the probability on wrong keys, by rows {_percent(rows)} %, `torch.softmax` "
        f"{_percent(usual)} %",
        "consistent" if harms == YES else harms,
        "the maximum of the whole head moves every row far from 0, where FP16 has few bits left for it; multiplying "
        "back restores the size, not the bits. Heads of one scale, or each row's own maximum, do not suffer",
    )


def _fp32_arithmetic(found: Mapping[Run, Outcome], settings: Settings, measured: Measured) -> Claim:
    scale = min(settings.scales, key=lambda scale: abs(scale - 2))
    fp16, fp32, scores = (_moved(found, "apart", way, scale) for way in ("torch.softmax", "FP32", "FP32 scores"))
    smaller = ratios_between(ratios(fp32, fp16), 0.0, _NO_BETTER)
    return Claim(
        f"{_GLM}, README and figure 21",
        "FP32 in softmax significantly improves stability: success",
        f"standard deviation 1e{scale}: `torch.softmax` in FP16 moves {mean_digits(fp16)} of the probability, in FP32 "
        f"{mean_digits(fp32)}, with scores never stored {mean_digits(scores)}. Largest score in FP32 "
        f"{short(measured.frontiers['FP32'])}, with their layer scaling "
        f"{short(measured.frontiers['FP32, layer scaling'])}. TE's kernel has FP32's bits in "
        f"{100 * measured.agreement:.4g} % of probabilities",
        "not by its arithmetic" if smaller == NO else smaller,
        "PyTorch's and TE's kernels for FP16 compute in FP32 anyway. What GLM-130B's FP32 adds is that scores, stored "
        "divided by the layer's number, are multiplied back where they cannot overflow",
    )


def _moved(found: Mapping[Run, Outcome], layout: str, way: str, scale: int) -> list[float]:
    return [errors.moved for errors in of_seeds(found, "fp16", layout, way, scale)]


def _percent(shares: Sequence[float]) -> str:
    return mean_digits([100 * share for share in shares])


def _cost(measured: Measured) -> Claim:
    usual, cast, relaxed, of_te = (
        measured.bytes_a_score(way) for way in ("torch.softmax", "FP32", "PB-Relax by rows", "TE")
    )
    return Claim(
        f"{_GLM}, README and figure 21",
        "FP32 hardly brings any speed loss; PB-Relax slows down, as it manipulates whole score matrices",
        f"bytes read and written a score, forward: `torch.softmax` {usual:.3g}, PB-Relax {relaxed:.3g}, FP32 by casts "
        f"on {measured.device} {cast:.3g}, TE's kernel {of_te:.3g}",
        "yes, in a fused kernel" if relaxed > usual == of_te else "no",
        "a kernel that reads 16 bits, works in FP32 and writes 16 bits moves what one in FP16 would; casts of their "
        "own are passes over the matrix, as PB-Relax's are (PyTorch's GPU kernel fuses the first of the two)",
    )


def _autocast(measured: Measured) -> Claim:
    told = "; ".join(
        f"on {device.upper()} softmax returns {_name(softmax)}, and the product with the values takes {_name(product)}"
        for device, (softmax, product) in measured.autocast.items()
    )
    return Claim(
        "PyTorch, `torch.amp`, operations that autocast to float32 on CUDA",
        "softmax runs in float32 under autocast",
        f"PyTorch, asked for FP16: {told}",
        "yes" if measured.autocast["cuda"] == (torch.float32, torch.float16) else "no",
        "each device has its own list. On a GPU the numbers are those of `FP32`, since the cast back is the product's, "
        "and the result takes twice the memory until then",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_MEANS = {
    "plain": "`exp(x) / sum(exp(x))`, each operation in the dtype",
    "max subtracted": "as `plain`, after subtracting each row's maximum",
    "PB-Relax": "CogView's: scores stored divided by alpha, less the head's maximum, times alpha; `torch.softmax`",
    "PB-Relax by rows": "as `PB-Relax`, with each row's maximum (Hugging Face's LayoutLMv3)",
    "torch.softmax": "PyTorch's kernel for the dtype",
    "FP32": "`torch.softmax(x, dtype=torch.float32)`, rounded to the dtype; what autocast makes of it on a GPU",
    "FP32, layer scaling": "GLM-130B's: scores stored divided by the layer's number, multiplied back in FP32",
    "FP32 scores": "as `FP32` on scores that were never stored in the dtype, as in flash and fused attention",
    "TE": "the kernel of TE's unfused attention (`FusedScaleMaskSoftmax`)",
    "TE, not fused": "as `TE`, with `NVTE_MASKED_SOFTMAX_FUSION=0`",
}
_LINES: dict[str, dict[str, Any]] = {
    "plain": {"color": "tab:red", "marker": "s"},
    "max subtracted": {"color": "tab:pink", "marker": "v"},
    "PB-Relax": {"color": "tab:green", "marker": "^"},
    "PB-Relax by rows": {"color": "tab:olive", "marker": "<", "linestyle": "--"},
    "torch.softmax": {"color": "tab:blue", "marker": "o"},
    "FP32": {"color": "tab:cyan", "marker": "x", "linestyle": "--"},
    "FP32 scores": {"color": "tab:orange", "marker": "P"},
    "TE": {"color": "black", "marker": "+", "linestyle": ":"},
}
_LOWEST_SHOWN = 1e-8

_INTRODUCTION = """\
Softmax turns a row of attention scores into probabilities. Models train in FP16 or BF16, and many take softmax in FP32.
Is that necessary, and what does it do? Scores here are Gaussian with standard deviations from 1e{low} to 1e{high}:
GLM-130B's README reports 1e-3 to 1e4 in different heads. `apart`: each head has one scale. `mixed`: each head has rows
of all scales up to 1e{mixed}. The measure is the share of a row's probability that ends up on wrong keys: 0 is right,
1 is all of it."""

_ALONE = """\
The same against the softmax of the scores as they are stored: what the arithmetic costs when the storage is forgiven.
From a standard deviation of 10 on, nearly all of the error above was storage: FP16 has 11 bits for a score, BF16 8, and
a score's absolute error is what moves probabilities. No softmax, in whatever precision, brings those bits back. `–`:
scores are infinite when stored."""

_GRADIENT = """\
L2 error of the scores' gradient p (g - Σ p g) for a Gaussian g, relative to its first term p g."""

_COST = """\
Softmax does little arithmetic, so on a GPU its time is the bytes that it moves. Below are the bytes that PyTorch's
kernels read and write for each score, each tensor once a kernel, and those kept for the backward pass. They are
counted, not timed, from scores as the GEMM stored them. On a GPU `torch.softmax(dtype=torch.float32)` reads 16 bits in
one kernel; on a CPU it casts first."""

_MEANING = """\
- PyTorch's and TE's softmax kernels for FP16 and BF16 take 16-bit scores, subtract the maximum, compute in FP32 and
  round once. Asking for FP32 on top changes no probability; it keeps one more bit of the gradient, and costs memory.
- Softmax written out in FP16 operations is another matter: without the maximum it overflows at a score of 11.
- What limits accuracy is the storage of scores before softmax, and nothing after it can repair that. Fused and flash
  attention do not store them.
- What limits range is that storage, too. Divide scores before they are stored, and multiply back in FP32 (layer
  scaling) or below each row's maximum (PB-Relax by rows). The maximum of a whole head costs rows of smaller scores
  their bits."""


def write(found: Mapping[Run, Outcome], settings: Settings, kernels: Kernels, folder: Path) -> Path:
    """Write ``softmax_precision.md`` and ``.png`` into the folder, and return the report's path."""
    _plot(found, settings).savefig(folder / "softmax_precision.png", dpi=100)
    return reporting.written(folder / "softmax_precision.md", _sections(found, settings, kernels))


def _sections(found: Mapping[Run, Outcome], settings: Settings, kernels: Kernels) -> Iterator[str]:
    yield "# Softmax in FP32"
    yield _INTRODUCTION.format(
        low=min(settings.scales), high=max(settings.scales), mixed=max(scales_of("mixed", settings))
    )
    yield (
        f"{reporting.made_on(kernels)} {settings.rows} rows of {settings.keys} scores a scale, {settings.seeds} draws; "
        f"alpha {settings.alpha:g}, layer {settings.layer:g}. Golden is the FP64 softmax of the scores before storage. "
        "Figures are means over the draws, with the digits that other draws would reproduce; `~`: not even one."
    )
    yield reporting.texts([[f"`{name}`", meaning] for name, meaning in _MEANS.items()], ["way", "what it does"])
    yield "![Probability on wrong keys over the scores' scale](softmax_precision.png)"
    yield "## How large a score may be"
    yield _frontiers(settings, kernels)
    yield "## Probability on wrong keys"
    yield "`∞`: every row has a NaN. In brackets the share of rows that have one, where it is not 0."
    for dtype in settings.dtypes:
        for layout in settings.layouts:
            yield f"### {dtype.upper()}, {layout}"
            yield _by_scale(found, settings, dtype, layout, "moved")
    yield "## The arithmetic alone"
    yield _ALONE
    for dtype in (name for name in settings.dtypes if name != "fp32"):
        yield f"### {dtype.upper()}, {settings.layouts[0]}"
        yield _by_scale(found, settings, dtype, settings.layouts[0], "alone", leave_out="FP32 scores")
    yield "## The gradient"
    yield _GRADIENT
    for dtype in settings.dtypes:
        yield f"### {dtype.upper()}, {settings.layouts[-1]}"
        yield _by_scale(found, settings, dtype, settings.layouts[-1], "gradient")
    yield "## What it costs"
    yield _COST
    costs = {dtype: traffic(dtype, settings, kernels) for dtype in settings.dtypes}
    yield _costs(costs, settings)
    yield "## Claims"
    if "fp16" in settings.dtypes and set(settings.layouts) == set(LAYOUTS):
        yield reporting.claims(claims(found, settings, measured(costs, settings, kernels)))
    else:
        yield "The claims are about FP16 in both layouts, which were not all run."
    yield "## What it means"
    yield _MEANING


def measured(costs: Mapping[str, Mapping[str, Traffic]], settings: Settings, kernels: Kernels) -> Measured:
    """Measure the FP16 figures for the claims that are not in the record.

    Args:
        costs: ``traffic`` by dtype, which must include FP16.
        settings: the study's settings.
        kernels: the kernels that TE runs on.
    """
    return Measured(
        frontiers=_frontiers_of("fp16", settings, kernels),
        traffic=costs["fp16"],
        scores=_scores(settings),
        agreement=te_agrees("fp16", settings, kernels),
        autocast={name: autocast_dtypes(name, torch.float16) for name in ("cuda", "cpu")},
        device=gpu_name() if kernels.backend == "gpu" else f"a CPU ({cpu_model()})",
    )


def _frontiers_of(dtype: str, settings: Settings, kernels: Kernels) -> dict[str, float]:
    precision = Precision(DTYPES[dtype], settings.alpha, settings.layer)
    return {name: frontier(way, precision, kernels) for name, way in ways(kernels).items()}


def _frontiers(settings: Settings, kernels: Kernels) -> str:
    columns = [_frontiers_of(dtype, settings, kernels) for dtype in settings.dtypes]
    rows = [[f"`{way}`", *(short(column[way]) for column in columns)] for way in (*WAYS, *TE_WAYS)]
    table = reporting.numbers(rows, ["way", *(dtype.upper() for dtype in settings.dtypes)])
    return f"The largest score that leaves no NaN in a row of which all other scores are 0.\n\n{table}"


def _by_scale(
    found: Mapping[Run, Outcome], settings: Settings, dtype: str, layout: str, measure: str, leave_out: str = ""
) -> str:
    scales = scales_of(layout, settings)
    rows = []
    for way in (name for name in (*WAYS, *TE_WAYS) if name != leave_out):
        costs = [of_seeds(found, dtype, layout, way, scale) for scale in scales]
        rows.append([f"`{way}`", *(_cell(of_scale, measure) for of_scale in costs)])
    return reporting.numbers(rows, ["way", *(f"1e{scale}" for scale in scales)])


def _cell(costs: Sequence[Errors], measure: str) -> str:
    spoiled = [cost.spoiled for cost in costs]
    figure = mean_digits([getattr(cost, measure) for cost in costs])
    if figure == short(math.nan):
        return "∞" if min(spoiled) == 1 else figure
    return figure + (f" ({mean_digits([100 * share for share in spoiled])} %)" if any(spoiled) else "")


def _costs(costs: Mapping[str, Mapping[str, Traffic]], settings: Settings) -> str:
    count = _scores(settings)
    rows = []
    for way in (*WAYS, *TE_WAYS):
        rows.append([f"`{way}`", *(_traffic(by_way.get(way), count) for by_way in costs.values())])
    return reporting.numbers(rows, ["forward + backward, kept", *(dtype.upper() for dtype in costs)])


def _traffic(moved: Traffic | None, scores: int) -> str:
    if moved is None:
        return "–"
    return f"{moved.forward / scores:.3g} + {moved.backward / scores:.3g}, {moved.saved / scores:.3g}"


def _scores(settings: Settings) -> int:
    return 4 * settings.rows * settings.keys


def _plot(found: Mapping[Run, Outcome], settings: Settings) -> Figure:
    figure = Figure(figsize=(4.4 * len(settings.layouts) + 1.0, 3.2 * len(settings.dtypes) + 0.8), layout="constrained")
    axes = figure.subplots(len(settings.dtypes), len(settings.layouts), squeeze=False, sharey=True)
    for row, dtype in enumerate(settings.dtypes):
        for column, layout in enumerate(settings.layouts):
            scales = scales_of(layout, settings)
            for way, line in _LINES.items():
                values = [error(found, dtype, layout, way, scale).moved for scale in scales]
                axes[row][column].loglog([10.0**scale for scale in scales], values, label=way, markersize=5, **line)
            axes[row][column].set(title=f"{dtype.upper()}, {layout}", ylim=(_LOWEST_SHOWN, 1.5))
            axes[row][column].grid(True, alpha=0.3)
        axes[row][0].set_ylabel("probability on wrong keys")
    for axis in axes[-1]:
        axis.set_xlabel("standard deviation of the scores")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure
