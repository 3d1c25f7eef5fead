"""Draw the report of the study ``query_key_scale``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from parity.lab.studies.query_key_scale import Outcome, Run, Settings, error, frontier, nearest_to_one, ways
from parity.lab.studies.reports import shared as reporting
from parity.lab.studies.reports.shared import Claim
from parity.report.numbers import ratio, short
from parity.te import Kernels

# What the sources say about scaling queries and keys, next to what the study ``query_key_scale`` found.


_PULL_REQUEST = "Megatron-DeepSpeed (BigScience), pull request 118"
_SAME = 1.05  # draws differ by as much
# Frontiers are found to a sixteenth of an octave, so two that are equal may differ by that.
_RESOLUTION = 2.0 ** (1 / 16)


def claims(found: Mapping[Run, Outcome], settings: Settings, head_dim: int) -> Iterator[Claim]:
    """Yield each claim with figures for the first distribution that was run.

    Args:
        found: outcomes of the study.
        settings: of the study.
        head_dim: the width of a head at which frontiers are compared.
    """
    distribution = settings.distributions[0]
    at = f"{distribution}, d = {head_dim}"
    if "fp16" in settings.dtypes:
        edge = {
            way: frontier(found, "fp16", distribution, head_dim, way)
            for way in (
                "inputs",
                "after, FP32",
                "after, stored",
                "after, half",
                "both, FP32",
                "layer, FP32",
                "TE unfused",
            )
        }
        yield _alpha_overflows(edge, at)
        yield _the_fix_changed_nothing(edge, at)
        yield _layer_scaling(edge, settings.layer, at)
        yield _same_on_paper(found, settings, distribution)
        if "bf16" in settings.dtypes:
            yield _fp16_overflows_and_bf16_does_not(found, settings, edge, head_dim)


def _alpha_overflows(edge: Mapping[str, float], at: str) -> Claim:
    in_fp32 = edge["both, FP32"] / edge["after, FP32"] > _RESOLUTION
    stored = edge["both, FP32"] / edge["after, stored"] > _RESOLUTION
    return Claim(
        _PULL_REQUEST,
        "cuBLAS multiplies alpha after the product, so scores can blow up where scaled operands would not",
        f"FP16, {at}: largest RMS {short(edge['after, FP32'])} with alpha in FP32, {short(edge['after, stored'])} with "
        f"the product stored in FP16, {short(edge['after, half'])} with sums in FP16, {short(edge['both, FP32'])} with "
        f"both scaled by the root, {short(edge['TE unfused'])} in TE's unfused attention",
        {(False, True): "only if the product is kept in FP16", (True, True): "yes"}.get((in_fp32, stored), "no"),
        "unless cuBLAS is told to compute in FP16, it keeps product and alpha in FP32, and rounds afterwards",
    )


def _the_fix_changed_nothing(edge: Mapping[str, float], at: str) -> Claim:
    gain = edge["both, FP32"] / edge["after, FP32"]
    return Claim(
        "BigScience's chronicle of the 104B model, experiment 3",
        "with both scaled by the root, training failed as it had before",
        f"FP16, {at}: the root gains a factor {short(gain)} in range over alpha in FP32",
        "consistent" if gain < _RESOLUTION else "no",
        "what they replaced, `baddbmm`, computes alpha in FP32; by experiment 6 the MLP's width had proved wrong",
    )


def _layer_scaling(edge: Mapping[str, float], layer: int, at: str) -> Claim:
    gain = edge["layer, FP32"] / edge["after, FP32"]
    return Claim(
        "Megatron-LM, `--apply-query-key-layer-scaling`",
        "scale Q Kᵀ by 1 / layer number: useful for FP16 training",
        f"FP16, {at}, layer {layer}: range {short(gain)} times as large",
        "yes" if gain > _RESOLUTION else "no",
        f"stored scores are {layer} times smaller, and they grow with the square of the RMS: √{layer} = "
        f"{short(layer**0.5)}. TE does it in its unfused backend, in FP16 alone",
    )


def _same_on_paper(found: Mapping[Run, Outcome], settings: Settings, distribution: str) -> Claim:
    ratios = {}
    for head_dim in settings.head_dims:
        both, after = (
            error(found, "fp16", distribution, head_dim, way, nearest_to_one(settings)).scores
            for way in ("both, FP32", "after, FP32")
        )
        ratios[head_dim] = both / after if after else math.nan
    return Claim(
        _PULL_REQUEST,
        "n (A · B) is (√n A) · (√n B)",
        f"FP16, {distribution}, relative error of the scores, the root's over alpha's: "
        + ", ".join(f"{short(each)} at d = {head_dim}" for head_dim, each in ratios.items()),
        "yes" if max(ratios.values()) < _SAME else "on paper",
        "both operands are rounded once more, unless the root of the scale is a power of two (d = 16, 256)",
    )


def _fp16_overflows_and_bf16_does_not(
    found: Mapping[Run, Outcome], settings: Settings, edge: Mapping[str, float], head_dim: int
) -> Claim:
    distribution = settings.distributions[0]
    bf16 = frontier(found, "bf16", distribution, head_dim, "after, stored")
    coarse, fine = (
        error(found, dtype, distribution, head_dim, "after, FP32", nearest_to_one(settings)).scores
        for dtype in ("bf16", "fp16")
    )
    return Claim(
        "GLM-130B, arXiv 2210.02414, on training stability",
        "attention scores exceed FP16's range as models grow; BLOOM used BF16 for its range",
        f"{distribution}, d = {head_dim}: with a stored product FP16 overflows at an RMS of "
        f"{short(edge['after, stored'])}, its inputs at {short(edge['inputs'])}; BF16 at {short(bf16)}",
        "yes" if edge["after, stored"] * 10 < edge["inputs"] < bf16 else "no",
        "a score is a sum of d products of two inputs, so it leaves the range with their square. The price of BF16: "
        f"scores {ratio(coarse, fine)} times as coarse",
    )


_MEANS = {
    "after, FP32": "the product is scaled in FP32, then rounded (`baddbmm`'s alpha in cuBLAS, PyTorch's default)",
    "after, stored": "the product is rounded and stored, then another kernel scales it (`q @ k.T / sqrt(d)`)",
    "after, half": "the product is added up in FP16 and scaled in FP16 (cuBLAS's 16F compute type)",
    "query, FP32": "queries are scaled and rounded before the product",
    "query, half": "queries are scaled and rounded before the product, which is added up in FP16",
    "both, FP32": "queries and keys are scaled by the root and rounded before the product",
    "both, half": "queries and keys are scaled by the root and rounded before the product, which is added up in FP16",
    "layer, FP32": "as `after, FP32`, the scale divided by the layer's number, which softmax multiplies back in FP32",
    "layer, stored": "as `after, stored`, with the layer's number as in `layer, FP32`",
    "TE unfused": "`DotProductAttention` with `NVTE_UNFUSED_ATTN`: GEMM, softmax, GEMM",
    "TE unfused, layer": "as `TE unfused`, with `NVTE_APPLY_QK_LAYER_SCALING=1`, which TE obeys in FP16",
    "TE fused": "`DotProductAttention` with `NVTE_FUSED_ATTN`: scores stay in FP32 and are never stored",
}
_LOWEST_SHOWN = 1e-5
_LINES: dict[str, dict[str, Any]] = {
    "after, FP32": {"color": "tab:blue", "marker": "o"},
    "after, stored": {"color": "tab:red", "marker": "s"},
    "after, half": {"color": "tab:red", "marker": "x", "linestyle": ":"},
    "query, FP32": {"color": "tab:cyan", "marker": "v", "linestyle": "--"},
    "both, FP32": {"color": "tab:green", "marker": "^", "linestyle": "-."},
    "layer, FP32": {"color": "tab:purple", "marker": "D"},
    "TE unfused": {"color": "black", "marker": "+", "linestyle": ":"},
    "TE fused": {"color": "tab:orange", "marker": "P"},
}

_INTRODUCTION = """\
Attention multiplies each query with each key, and scales the product by 1/√d, d being the width of a head, before
softmax. On paper it does not matter where the scale goes. In a computer it can: FP16 ends at 65504, and a product that
overflows on its way is infinite whatever it is scaled by afterwards; softmax makes NaN of it. This study asks how large
queries and keys may be, and what each way costs in accuracy. Queries and keys have a root mean square (RMS) that is
varied: `normal` ones are independent, as in a young model, and a score grows as √d; `aligned` ones share a direction in
each head, as heads learn to, and a score grows as d."""

_ROUNDING = """\
Scores in FP16 have 11 significant bits, in BF16 8. What moves a probability is the absolute error of its score: at a
score of 1000, half a unit in the last place is 0.25 in FP16, a factor of 1.3, and 2 in BF16, a factor of 7. So the
error of attention grows with the magnitude of queries and keys in every way that stores scores, until softmax picks one
key; then what is left are the queries for which it picks a wrong one, and chance decides between the ways. TE's fused
backend keeps scores in FP32. Below, the relative L2 error of attention's output at d = {head_dim}; `∞`: softmax gave
NaN."""

_SCALE = """\
The scale itself costs a rounding where it is not a power of two: 1/√d is one at d = 64 and 256, its root at d = 16 and
256. At tiny magnitudes FP16 has another end: scores below 6e-5 lose bits, and layer scaling makes them {layer} times
smaller. That is harmless: probabilities of such scores are all the same."""


_MEANING = """\
- What decides is what the product is kept in when the scale reaches it. In FP32, as PyTorch's `baddbmm` and TE's GEMMs
  keep it, scaling after the product overflows no sooner than scaling before, and rounds once less.
- Written as `q @ k.transpose(-1, -2) / math.sqrt(d)`, the product is stored in FP16 first. There, scale queries before.
  Scaling both by the root buys no more range, and rounds twice.
- Layer scaling moves the frontier by the root of the layer's number, at no cost in accuracy where that number is a
  power of two. It works only together with a product in FP32.
- BF16 does not overflow, but its scores are eight times as coarse. Where scores are in the hundreds, both 16-bit
  formats move attention visibly; a backend that keeps scores in FP32 (TE's fused and flash attention) does not."""


def write(found: Mapping[Run, Outcome], settings: Settings, kernels: Kernels, folder: Path) -> Path:
    """Write ``query_key_scale.md`` and ``.png`` into the folder; returns the report's path."""
    _plot(found, settings).savefig(folder / "query_key_scale.png", dpi=100)
    path = folder / "query_key_scale.md"
    path.write_text("\n\n".join(_sections(found, settings, kernels)) + "\n", encoding="utf-8")
    return path


def typical_head_dim(settings: Settings) -> int:
    """Return the head's width at which the report compares: 128 if it was run, else the largest."""
    return 128 if 128 in settings.head_dims else max(settings.head_dims)


def _sections(found: Mapping[Run, Outcome], settings: Settings, kernels: Kernels) -> Iterator[str]:
    head_dim = typical_head_dim(settings)
    yield "# Where to scale queries and keys"
    yield _INTRODUCTION
    yield (
        f"{reporting.made_on(kernels)} {settings.heads} heads, {settings.seq} queries and keys, no mask; layer "
        f"{settings.layer} in layer scaling; {settings.seeds} draws. Golden is FP64 attention of the same rounded "
        "inputs. TE's unfused backend multiplies by PyTorch's own `baddbmm`, on the CPU by the CPU's. A GPU may split "
        "a long sum and store its parts in FP16 (`allow_fp16_reduced_precision_reduction`); that is not modelled, and "
        "no head here is that wide."
    )
    yield reporting.texts([[f"`{name}`", meaning] for name, meaning in _MEANS.items()], ["way", "what it does"])
    yield "![Overflow frontiers and errors](query_key_scale.png)"
    yield "## How large queries and keys may be"
    yield (
        "The largest RMS of queries and keys at which softmax gets no infinity; `inputs` is where they overflow "
        "themselves."
    )
    for dtype in settings.dtypes:
        yield f"### {dtype.upper()}"
        yield _frontiers(found, settings, dtype)
    yield "## What each way costs"
    yield _ROUNDING.format(head_dim=head_dim)
    for dtype in settings.dtypes:
        for distribution in settings.distributions:
            yield f"### {dtype.upper()}, {distribution}"
            yield _errors(found, settings, dtype, distribution, head_dim)
    yield "## Relative error of the scores"
    yield _SCALE.format(layer=settings.layer)
    yield _score_errors(found, settings)
    yield "## Claims"
    yield reporting.claims(claims(found, settings, head_dim))
    yield "## What it means"
    yield _MEANING
    yield "Made by `parity study query_key_scale`."


def _frontiers(found: Mapping[Run, Outcome], settings: Settings, dtype: str) -> str:
    columns = [(distribution, head_dim) for distribution in settings.distributions for head_dim in settings.head_dims]
    rows = [
        [f"`{way}`", *(short(frontier(found, dtype, *column, way)) for column in columns)]
        for way in (*ways(dtype), "inputs")
    ]
    return reporting.numbers(rows, ["way", *(f"{distribution}, d = {head_dim}" for distribution, head_dim in columns)])


def _errors(found: Mapping[Run, Outcome], settings: Settings, dtype: str, distribution: str, head_dim: int) -> str:
    shown = [exponent for exponent in settings.magnitudes if exponent % 2 == 0 and exponent >= -4]
    shown = shown or list(settings.magnitudes)
    rows = [
        [f"`{way}`", *(_or_infinite(error(found, dtype, distribution, head_dim, way, each).output) for each in shown)]
        for way in ways(dtype)
    ]
    return reporting.numbers(rows, ["way", *(f"RMS {2.0**exponent:g}" for exponent in shown)])


def _score_errors(found: Mapping[Run, Outcome], settings: Settings) -> str:
    distribution, at = settings.distributions[0], nearest_to_one(settings)
    rows = []
    for dtype in settings.dtypes:
        base = "after, FP32"
        for way in (way for way in ways(dtype) if not way.startswith("TE")):
            cells = [dtype.upper(), f"`{way}`"]
            for head_dim in settings.head_dims:
                of_way, of_base = (error(found, dtype, distribution, head_dim, name, at).scores for name in (way, base))
                cells.append(f"{short(of_way)} ({ratio(of_way, of_base)})")
            rows.append(cells)
    headers = ["dtype", "way", *(f"d = {head_dim}" for head_dim in settings.head_dims)]
    table = reporting.numbers(rows, headers)
    return (
        f"Relative L2, {distribution} at an RMS of {2.0**at:g}; in brackets as a multiple of `after, FP32`.\n\n{table}"
    )


def _or_infinite(value: float) -> str:
    return "∞" if math.isnan(value) else short(value)


def _plot(found: Mapping[Run, Outcome], settings: Settings) -> Figure:
    dtypes, distributions = settings.dtypes, settings.distributions
    figure = Figure(figsize=(4.4 * len(distributions) + 1.5, 3.4 * (1 + len(dtypes))), layout="constrained")
    axes = figure.subplots(1 + len(dtypes), len(distributions), squeeze=False)
    for column, distribution in enumerate(distributions):
        top = axes[0][column]
        for way in (way for way in _LINES if way in ways(dtypes[0])):
            values = [frontier(found, dtypes[0], distribution, each, way) for each in settings.head_dims]
            top.loglog(settings.head_dims, values, label=way, **_LINES[way])
        top.set(title=f"{dtypes[0].upper()}, {distribution}", xlabel="width of a head", ylabel="largest RMS that fits")
        top.set_xticks(settings.head_dims, labels=map(str, settings.head_dims), minor=False)
        top.set_xticks([], minor=True)
        for row, dtype in enumerate(dtypes, start=1):
            _plot_errors(axes[row][column], found, settings, dtype, distribution)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _plot_errors(axis: Any, found: Mapping[Run, Outcome], settings: Settings, dtype: str, distribution: str) -> None:
    head_dim = typical_head_dim(settings)
    magnitudes = [2.0**exponent for exponent in settings.magnitudes]
    for way in (way for way in _LINES if way in ways(dtype)):
        values = [error(found, dtype, distribution, head_dim, way, each).output for each in settings.magnitudes]
        axis.loglog(magnitudes, values, label=way, markersize=4, **_LINES[way])
    axis.set(
        title=f"{dtype.upper()}, {distribution}, d = {head_dim}",
        xlabel="RMS of queries and keys",
        ylabel="relative L2 error of the output",
    )
    axis.set_ylim(bottom=_LOWEST_SHOWN)
    axis.grid(True, alpha=0.3)
