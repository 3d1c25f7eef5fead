"""Draws the report of the study ``softmax_precision``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from parity.report.environment import cpu_model, gpu_name
from parity.report.numbers import short
from parity.studies import tables
from parity.studies.over_seeds import mean_digits
from parity.studies.softmax_precision import claims
from parity.studies.softmax_precision.claims import Measured
from parity.studies.softmax_precision.kernel_traffic import Traffic
from parity.studies.softmax_precision.study import (
    DTYPES,
    LAYOUTS,
    Errors,
    Outcome,
    Run,
    Settings,
    autocast_dtypes,
    error,
    frontier,
    of_seeds,
    scales_of,
    te_agrees,
    traffic,
)
from parity.studies.softmax_precision.ways import TE_WAYS, WAYS, Precision, ways
from parity.te import Kernels

_MEANS = {
    "plain": "`exp(x) / sum(exp(x))`, each operation in the dtype",
    "max subtracted": "ditto after subtracting each row's maximum",
    "PB-Relax": "CogView's: scores stored divided by alpha, less the head's maximum, times alpha; `torch.softmax`",
    "PB-Relax by rows": "ditto with each row's maximum (Hugging Face's LayoutLMv3)",
    "torch.softmax": "PyTorch's kernel for the dtype",
    "FP32": "`torch.softmax(x, dtype=torch.float32)`, rounded to the dtype; what autocast makes of it on a GPU",
    "FP32, layer scaling": "GLM-130B's: scores stored divided by the layer's number, multiplied back in FP32",
    "FP32 scores": "as `FP32` on scores that were never stored in the dtype, as in flash and fused attention",
    "TE": "the kernel of TE's unfused attention (`FusedScaleMaskSoftmax`)",
    "TE, not fused": "ditto with `NVTE_MASKED_SOFTMAX_FUSION=0`",
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
    """Write ``softmax_precision.md`` and ``.png`` into the folder; returns the report's path."""
    _plot(found, settings).savefig(folder / "softmax_precision.png", dpi=100)
    path = folder / "softmax_precision.md"
    path.write_text("\n\n".join(_sections(found, settings, kernels)) + "\n", encoding="utf-8")
    return path


def _sections(found: Mapping[Run, Outcome], settings: Settings, kernels: Kernels) -> Iterator[str]:
    yield "# Softmax in FP32"
    yield _INTRODUCTION.format(
        low=min(settings.scales), high=max(settings.scales), mixed=max(scales_of("mixed", settings))
    )
    yield (
        f"{tables.made_on(kernels)} {settings.rows} rows of {settings.keys} scores a scale, {settings.seeds} draws; "
        f"alpha {settings.alpha:g}, layer {settings.layer:g}. Golden is the FP64 softmax of the scores before storage. "
        "Figures are means over the draws, with the digits that other draws would reproduce; `~`: not even one."
    )
    yield tables.texts([[f"`{name}`", meaning] for name, meaning in _MEANS.items()], ["way", "what it does"])
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
        yield tables.claims(claims.claims(found, settings, measured(costs, settings, kernels)))
    else:
        yield "The claims are about FP16 in both layouts, which were not all run."
    yield "## What it means"
    yield _MEANING
    yield "Made by `parity study softmax_precision`."


def measured(costs: Mapping[str, Mapping[str, Traffic]], settings: Settings, kernels: Kernels) -> Measured:
    """FP16's figures for the claims, beside the record's.

    Args:
        costs: ``traffic`` by dtype, FP16 among them.
        settings: of the study.
        kernels: that TE runs on.
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
    table = tables.numbers(rows, ["way", *(dtype.upper() for dtype in settings.dtypes)])
    return f"The largest score that leaves no NaN in a row of which all other scores are 0.\n\n{table}"


def _by_scale(
    found: Mapping[Run, Outcome], settings: Settings, dtype: str, layout: str, measure: str, leave_out: str = ""
) -> str:
    scales = scales_of(layout, settings)
    rows = []
    for way in (name for name in (*WAYS, *TE_WAYS) if name != leave_out):
        costs = [of_seeds(found, dtype, layout, way, scale) for scale in scales]
        rows.append([f"`{way}`", *(_cell(of_scale, measure) for of_scale in costs)])
    return tables.numbers(rows, ["way", *(f"1e{scale}" for scale in scales)])


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
    return tables.numbers(rows, ["forward + backward, kept", *(dtype.upper() for dtype in costs)])


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
