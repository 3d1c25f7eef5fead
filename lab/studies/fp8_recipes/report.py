"""Draw the report of the study ``fp8_recipes``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.studies import reporting
from lab.studies.fp8_recipes.study import (
    AS_GOOD_DB,
    BLOCKS,
    BODY,
    CHANGES,
    DELAYED,
    JUDGED,
    PLAIN,
    ROLES,
    ROTATED,
    ROTATED_BLOCKS,
    SETTLED_STEPS,
    SIDES,
    STEPS_BEFORE,
    WAYS,
    AttentionLoss,
    AttentionRun,
    ModuleLoss,
    ModuleRun,
    Results,
    Settings,
    Steps,
    TensorLoss,
    TensorRun,
    steps_run,
)
from lab.studies.reporting import Claim
from lab.studies.te_modules import MODULES
from parity.report.numbers import plural, short
from parity.te import Kernels

# Figures that the report takes from the runs: means over seeds, and the steps around a change.


def tensor_mean(
    found: Results, distribution: str, role: str, recipe: str, of: Literal["te", "model", "te_body"] = "te"
) -> float:
    """Return a tensor's mean SQNR in decibels."""
    return mean_db(
        getattr(loss, of)
        for run, loss in found.items()
        if isinstance(run, TensorRun)
        and isinstance(loss, TensorLoss)
        and (run.distribution, run.role, run.recipe) == (distribution, role, recipe)
    )


def module_mean(found: Results, module: str, distribution: str, recipe: str, kind: str) -> float:
    """Return the mean SQNR of TE's module in decibels, for one kind of tensor."""
    return mean_db(
        loss.te[kind]
        for run, loss in found.items()
        if isinstance(run, ModuleRun)
        and isinstance(loss, ModuleLoss)
        and (run.module, run.distribution, run.recipe) == (module, distribution, recipe)
    )


def attention_rmse(found: Results, distribution: str, way: str) -> float:
    """Return the root mean square error of attention's output over all seeds."""
    squares = [
        loss.rmse[way] ** 2
        for run, loss in found.items()
        if isinstance(run, AttentionRun) and isinstance(loss, AttentionLoss) and run.distribution == distribution
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def mean_db(ratios: Iterable[float]) -> float:
    """Return the SQNR that corresponds to the mean noise power; NaN if there are no ratios."""
    powers = [10 ** (-ratio / 10) for ratio in ratios]
    return -10 * math.log10(sum(powers) / len(powers)) if powers else math.nan


def delayed_steps(found: Results, settings: Settings, history: int, change: str, factor: float) -> Steps:
    """Return the steps of delayed scaling around a change of the input."""
    steps = found[steps_run(settings, DELAYED, history, "input", change, factor)]
    assert isinstance(steps, Steps)
    return steps


# Plots of the study ``fp8_recipes``.


FLOOR_DB = -2.0  # where results that are worse, or not finite, are drawn
CHANGE_TITLES = {"up": "grows for good", "down": "shrinks for good", "spike": "grows in one step alone"}


def by_distribution(found: Results, settings: Settings) -> Figure:
    """Draw the SQNR of tensors by role, and of modules' outputs, with a bar for each recipe."""
    panels = [*ROLES, *settings.modules]
    figure = Figure(figsize=(3.4 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    places, width = np.arange(len(settings.distributions)), 0.8 / max(1, len(settings.recipes))
    for axis, panel in zip(axes, panels, strict=True):
        for index, recipe in enumerate(settings.recipes):
            values = [
                tensor_mean(found, distribution, panel, recipe)
                if panel in ROLES
                else module_mean(found, panel, distribution, recipe, "output")
                for distribution in settings.distributions
            ]
            axis.bar(places + (index - (len(settings.recipes) - 1) / 2) * width, values, width, label=recipe)
        title = f"{panel}, quantized" if panel in ROLES else f"output of\n{MODULES[panel].title}"
        axis.set_title(title, fontsize="medium")
        axis.set_xticks(places)
        axis.set_xticklabels(settings.distributions)
        axis.grid(True, axis="y", alpha=0.3)
    axes[0].set_ylabel("SQNR, dB (higher is better)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def around_changes(found: Results, settings: Settings) -> Figure:
    """Draw the SQNR over steps around a change by the largest factor, with a panel for each change and side."""
    figure = Figure(figsize=(4.6 * len(CHANGES), 3.1 * len(SIDES)), layout="constrained")
    axes = figure.subplots(len(SIDES), len(CHANGES), squeeze=False, sharey=True)
    ticks = sorted({-STEPS_BEFORE // 2, 0, STEPS_BEFORE // 2, *(each for each in settings.histories if each > 9)})
    for row, side in zip(axes, SIDES, strict=True):
        for axis, change in zip(row, CHANGES, strict=True):
            for recipe in settings.recipes:
                for history in settings.histories if recipe == DELAYED else (0,):
                    steps = found[steps_run(settings, recipe, history, side, change, max(settings.factors))]
                    assert isinstance(steps, Steps)
                    _line(axis, steps, f"{recipe}, {history} remembered" if history else recipe)
            axis.set_title(f"{side} {CHANGE_TITLES[change]}")
            axis.axvline(0, color="black", linewidth=0.5)
            axis.grid(True, alpha=0.3)
            axis.set_xscale("symlog", linthresh=STEPS_BEFORE / 2)
            axis.set_xticks(ticks, labels=map(str, ticks))
            axis.minorticks_off()
            axis.set_xlabel("steps from the change on")
        row[0].set_ylabel("SQNR, dB")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _line(axis: Axes, steps: Steps, label: str) -> None:
    first = STEPS_BEFORE // 2
    numbers = range(first - STEPS_BEFORE, len(steps.sqnr_db) - STEPS_BEFORE)
    axis.plot(numbers, [max(FLOOR_DB, sqnr) for sqnr in steps.sqnr_db[first:]], label=label, linewidth=1.2)


# Published claims about FP8 recipes, next to this study's results.


# Format, significand bits including the leading one, a tensor's role, and the recipes that use the format for it.
_SIGNIFICANDS = (
    ("E4M3", 4, "inputs", ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8")),
    ("E5M2", 3, "gradients", ("fp8_delayed", "fp8_current")),
)


def claims(found: Results, settings: Settings) -> Iterator[Claim]:
    """Yield the claims that these settings can test."""
    if "normal" in settings.distributions:
        yield from _quantization_noise(found, settings)
    if "outliers" in settings.distributions:
        yield from _attention(found)
    if DELAYED in settings.recipes:
        yield _delay(found, settings)
    if {"mxfp8", "fp8_block"} <= set(settings.recipes):
        yield _finer_blocks(found, settings)


def _quantization_noise(found: Results, settings: Settings) -> Iterator[Claim]:
    for title, bits, role, recipes in _SIGNIFICANDS:
        measured = [tensor_mean(found, "normal", role, name) for name in recipes if name in settings.recipes]
        if not measured:
            continue
        theory = -10 * math.log10(0.180 * 2.0 ** (-2 * bits))
        yield Claim(
            source=f"Widrow and Kollár, Quantization Noise, 2008: {title}, {bits} significand bits",
            claimed=f"noise of 0.180 x 2^-{2 * bits} of the power: {theory:.1f} dB",
            found=" to ".join(dict.fromkeys(f"{each:.1f}" for each in (min(measured), max(measured)))) + " dB",
            agrees="yes" if all(abs(ratio - theory) < 0.5 for ratio in measured) else "no",
            why="whatever shares a scale: far from the format's limits the mantissa alone counts",
        )


def _attention(found: Results) -> Iterator[Claim]:
    plain, block, rotated, both = (
        attention_rmse(found, "outliers", way) for way in (PLAIN, BLOCKS, ROTATED, ROTATED_BLOCKS)
    )
    yield Claim(
        source="FlashAttention-3 (arXiv 2407.08608), abstract and section 4.3, with outliers",
        claimed="block scales and rotation: 2.6 times lower error (2.4e-2 to 9.1e-3)",
        found=f"{plain / both:.1f} times ({short(plain)} to {short(both)})",
        agrees="yes" if 2.0 <= plain / both <= 3.3 else "in direction" if plain > both else "no",
        why="the sizes of their test are not stated; the factor grows with head dim, the errors with length",
    )
    yield Claim(
        source="ibid.: which of the two does it",
        claimed="the rotation (2.4e-2 without it, 9.3e-3 without block scales)",
        found=f"block scales alone {short(block)}, the rotation alone {short(rotated)}",
        agrees="yes" if plain / rotated - 1 > 2 * (plain / block - 1) else "no",
        why="E4M3 errs in proportion to each element, so a finer scale changes little. Where a query and a key both "
        "have an outlier in a channel, its product is most of a large score, and so is its error; a rotation spreads "
        "both over all channels. Values and probabilities gain nothing",
    )


def _delay(found: Results, settings: Settings) -> Claim:
    recovered = {
        delayed_steps(found, settings, history, "up", factor).recovered_after(STEPS_BEFORE)
        for history in settings.histories
        for factor in settings.factors
    }
    return Claim(
        source="TE's documentation of DelayedScaling: scales come from the amaxes of earlier iterations",
        claimed="a tensor that has grown is scaled too large for one step",
        found=f"as good as before after {', '.join(sorted(map(str, recovered)))} step(s)",
        agrees="yes" if recovered <= {1} else "mostly" if recovered <= {1, 2, 3, 4} else "no",
        why="it is one step, but for a history so short that one draw with a smaller amax clips the next",
    )


def _finer_blocks(found: Results, settings: Settings) -> Claim:
    fine, coarse = (
        mean_db(tensor_mean(found, each, "inputs", recipe) for each in settings.distributions)
        for recipe in ("mxfp8", "fp8_block")
    )
    return Claim(
        source="OCP Microscaling Formats v1.0: a scale for each 32 elements",
        claimed="outliers spoil fewer neighbours",
        found=f"MXFP8 against blocks of 128: {fine - coarse:+.1f} dB",
        agrees="yes" if fine - coarse > 1 else "no",
        why="not in FP8 on these tensors: outliers of 40 times the rest are well within E4M3's exponents",
    )


DISTRIBUTION_PICTURE, STEPS_PICTURE = "fp8_recipes_sqnr.png", "fp8_recipes_steps.png"

_INTRODUCTION = """\
A recipe says how numbers become 8 or 4 bits before a matrix product: in which format, how many of them share a scale,
and where the scale comes from.

| recipe | format | who shares a scale | scale from |
| --- | --- | --- | --- |
| `fp8_delayed` | E4M3, gradients E5M2 | the tensor | the largest amax of the last steps (1024 by default) |
| `fp8_current` | E4M3, gradients E5M2 | the tensor | its own amax |
| `fp8_block` | E4M3 | 128 in a row; weights 128 x 128; a power of two | their own amax |
| `mxfp8` | E4M3 | 32 in a row; a power of two | their own amax |
| `nvfp4` | E2M1 (4 bits) | 16 in a row; weights 16 x 16; in E4M3, times one for the tensor | their own amax |

Losses are signal to quantization noise ratios (SQNR) in decibels: 20 dB is a relative error of 0.1, 40 dB of 0.01, and
6 dB more halve the error. `normal` is N(0, 1), `heavy_tailed` is Student's t with 3 degrees of freedom, `outliers` is
N(0, 1) plus N(0, 100) in one element of a thousand.

{made_on} {gpus} Seeds 0 to {last_seed}."""

_TENSORS = """\
`[{size}, {size}]`, quantized by TE's own quantizers in a linear layer. Delayed scaling has its scale from {earlier}
earlier draws (of weights, which change slowly, from these). In brackets: the SQNR of the {body:g} % smallest elements
alone, which outliers are not among."""

_MODULES = """\
Inputs `[1, {seq}, {hidden}]` of each distribution; weights are PyTorch's initial ones, output gradients N(0, 1).
Against FP64 on the same BF16 values."""

_STEPS = """\
A linear layer (`[{size}, {size}]`) makes passes on new N(0, 1) values; from one step on its input, or its output
gradient, is {factors} times larger or smaller, for good or in one step alone. What the GEMM computes from it is
judged: the output, or the input gradient. Recovered means: at most {as_good:g} dB below the worst step before,
{settled} times in a row. Without a past there is nothing to recover from; recipes that scale by the tensor at hand are
measured all the same."""

_ATTENTION = """\
FlashAttention-3 quantizes queries, keys and values to E4M3 and finds its error with the outliers above. The same
computation here (one head, {seq} tokens, head dim {head_dim}, probabilities in E4M3 as well, FP32 sums; plain PyTorch,
TE has no part in it): root mean square error of attention's output. The last rows round one thing alone."""


def write(
    found: Results, missing: Mapping[str, str | None], settings: Settings, kernels: Kernels, folder: Path
) -> Path:
    """Write ``fp8_recipes.md`` and its plots into the folder, and return the report's path.

    Args:
        found: the results of all runs.
        missing: recipes that no GPU here runs, each with the reason.
        settings: the study's settings, without those recipes.
        kernels: the kernels that TE ran on.
        folder: an existing folder.
    """
    by_distribution(found, settings).savefig(folder / DISTRIBUTION_PICTURE, dpi=80)
    around_changes(found, settings).savefig(folder / STEPS_PICTURE, dpi=90)
    return reporting.written(folder / "fp8_recipes.md", _sections(found, missing, settings, kernels))


def recovery(found: Results, settings: Settings, recipe: str, history: int, side: str, change: str) -> list[str]:
    """Return, for each factor, the steps until a recipe has recovered and the worst SQNR from the change on."""
    cells = []
    for factor in settings.factors:
        steps = found[steps_run(settings, recipe, history, side, change, factor)]
        assert isinstance(steps, Steps)
        after = steps.recovered_after(STEPS_BEFORE)
        worst = min(steps.sqnr_db[STEPS_BEFORE:])
        cells.append("0" if after == 0 else f"{'never' if after is None else after} ({_decibels(worst)} dB)")
    return cells


def _sections(found: Results, missing: Mapping[str, str | None], settings: Settings, kernels: Kernels) -> Iterator[str]:
    yield "# FP8 recipes side by side"
    yield _INTRODUCTION.format(
        made_on=reporting.made_on(kernels),
        gpus=_gpus(found, settings),
        last_seed=settings.seeds - 1,
    )
    yield from (f"- `{name}` was not measured: {reason}" for name, reason in missing.items())
    yield "## What it means"
    yield _meaning(found, settings)
    yield f"![SQNR by distribution]({DISTRIBUTION_PICTURE})"
    yield "## Tensors"
    yield _TENSORS.format(size=settings.size, earlier=settings.earlier, body=100 * BODY)
    yield _tensors(found, settings)
    yield "## Modules"
    yield _MODULES.format(seq=settings.seq, hidden=settings.hidden)
    yield _modules(found, settings)
    yield _model_agreement(found)
    yield "## When the magnitude jumps"
    yield _STEPS.format(
        size=settings.steps_size,
        factors=", ".join(f"{factor:g}" for factor in settings.factors),
        as_good=AS_GOOD_DB,
        settled=SETTLED_STEPS,
    )
    yield f"![SQNR around the change]({STEPS_PICTURE})"
    yield "The picture shows the largest factor. Steps until recovered, and the worst SQNR in between:"
    yield _recoveries(found, settings)
    yield "In the step of the change, the shares of elements that delayed scaling clips and flushes to zero:"
    yield _misfits(found, settings)
    yield "## FP8 attention and outliers"
    yield _ATTENTION.format(seq=settings.attention_seq, head_dim=settings.head_dim)
    rows = [[way, *(short(attention_rmse(found, each, way)) for each in settings.distributions)] for way in WAYS]
    yield reporting.numbers(rows, ["queries, keys and values", *settings.distributions])
    yield "## Claims"
    yield reporting.claims(claims(found, settings))


def _gpus(found: Results, settings: Settings) -> str:
    gpus: dict[str, dict[str, None]] = {}
    for run, result in found.items():
        if isinstance(result, TensorLoss):
            gpus.setdefault(result.gpu, {})[f"`{run.recipe}`"] = None  # type: ignore[union-attr]
    return " ".join(f"On an {gpu}: {', '.join(recipes)}." for gpu, recipes in gpus.items())


def _meaning(found: Results, settings: Settings) -> str:
    lines = []
    worst = {
        recipe: max(
            (
                tensor_mean(found, "normal", role, recipe) - tensor_mean(found, distribution, role, recipe),
                role,
                distribution,
            )
            for role in ROLES
            for distribution in settings.distributions
        )
        for recipe in settings.recipes
        if "normal" in settings.distributions
    }
    alike: dict[str, list[str]] = {}
    for recipe, (loss, role, distribution) in worst.items():
        where = f" ({role}, {distribution})" if loss > AS_GOOD_DB else ""
        alike.setdefault(f"{_decibels(max(0.0, loss))} dB{where}", []).append(f"`{recipe}`")
    lines += [
        f"- {', '.join(recipes)}: against normal values, others cost a tensor at most {cost}."
        for cost, recipes in alike.items()
    ]
    lines.append(
        "- FP8 is a floating-point format: an outlier moves the scale of the others by some powers of two, which their "
        "exponents make up for. Finer blocks gain little on any of these tensors; E5M2 in place of E4M3, which "
        "per-tensor recipes use for gradients, costs 6 dB. FP4 has hardly any exponents, so the elements that share a "
        "scale with an outlier pay for it."
    )
    if DELAYED in settings.recipes:
        lines += _meaning_of_delays(found, settings)
    return "\n".join(lines)


def _meaning_of_delays(found: Results, settings: Settings) -> Iterator[str]:
    smallest, largest, history = min(settings.factors), max(settings.factors), max(settings.histories)
    grown = delayed_steps(found, settings, history, "up", smallest)
    after = delayed_steps(found, settings, history, "spike", largest).recovered_after(STEPS_BEFORE)
    gradient = found[steps_run(settings, DELAYED, history, "gradient", "spike", largest)]
    assert isinstance(gradient, Steps)
    before, fallen = grown.steady(STEPS_BEFORE)[0], min(grown.sqnr_db[STEPS_BEFORE:])
    yield (
        f"- Delayed scaling fails in the one step in which an input grows: {smallest:g} times larger, and the output "
        f"falls from {_decibels(before)} to {_decibels(fallen)} dB, because what is above the old amax is clipped. It "
        "knows the new one in the next step."
    )
    yield (
        "- What shrinks, or grew in one step alone, is scaled by its larger past as long as that is remembered: with a "
        f"history of {history}, one step that is {largest:g} times too large spoils "
        f"{'all' if after is None else after} steps from it on. E4M3's exponents bear an input that is up to "
        f"{_harmless(found, settings):g} times smaller; gradients in E5M2, of more exponents, are as good as before "
        f"{_steps_of(gradient.recovered_after(STEPS_BEFORE))} after the same spike."
    )


def _steps_of(count: int | None) -> str:
    return "in no step" if count is None else plural(count, "step")


def _harmless(found: Results, settings: Settings) -> float:
    """Return the largest factor by which an input may shrink without loss under delayed scaling; 1 if there is none."""
    unharmed = [
        factor
        for factor in settings.factors
        if delayed_steps(found, settings, max(settings.histories), "down", factor).recovered_after(STEPS_BEFORE) == 0
    ]
    return max(unharmed, default=1.0)


def _tensors(found: Results, settings: Settings) -> str:
    rows = []
    for role in ROLES:
        for distribution in settings.distributions:
            cells = [
                f"{_decibels(tensor_mean(found, distribution, role, recipe))} "
                f"({_decibels(tensor_mean(found, distribution, role, recipe, 'te_body'))})"
                for recipe in settings.recipes
            ]
            rows.append([role, distribution, *cells])
    return reporting.numbers(rows, ["tensor", "distribution", *settings.recipes])


def _modules(found: Results, settings: Settings) -> str:
    rows = []
    for module in settings.modules:
        for distribution in settings.distributions:
            cells = [
                " / ".join(
                    _decibels(module_mean(found, module, distribution, recipe, kind))
                    for kind in ("output", "input gradient", "weight gradient")
                )
                for recipe in ("bf16", *settings.recipes)
            ]
            rows.append([MODULES[module].title, distribution, *cells])
    headers = ["output / input gradient / weight gradients", "distribution", "bf16", *settings.recipes]
    return reporting.numbers(rows, headers)


def _model_agreement(found: Results) -> str:
    differences = [
        loss.te[kind] - loss.model[kind] for loss in found.values() if isinstance(loss, ModuleLoss) for kind in loss.te
    ]
    return (
        "The rounding model (`parity/rounding/`), which has never seen TE, predicts each of these within "
        f"{min(differences):+.1f} to {max(differences):+.1f} dB."
    )


def _recoveries(found: Results, settings: Settings) -> str:
    rows, unmoved = [], []
    for recipe in settings.recipes:
        of_recipe = [
            [
                f"{side} {CHANGE_TITLES[change]}",
                JUDGED[side],
                f"{recipe}, {history} remembered" if history else recipe,
                *recovery(found, settings, recipe, history, side, change),
            ]
            for side in SIDES
            for change in CHANGES
            for history in (settings.histories if recipe == DELAYED else (0,))
        ]
        if all(cell == "0" for row in of_recipe for cell in row[3:]):
            unmoved.append(f"`{recipe}`")
        else:
            rows += of_recipe
    headers = ["change", "judged", "recipe", *(f"{factor:g} times" for factor in settings.factors)]
    table = reporting.numbers(rows, headers) if rows else ""
    return table + (f"\n\n0 steps, whatever changes and by how much: {', '.join(unmoved)}." if unmoved else "")


def _misfits(found: Results, settings: Settings) -> str:
    if DELAYED not in settings.recipes:
        return "(Delayed scaling was not measured.)"
    rows = []
    for side in SIDES:
        for change, moment, what in (("up", 0, "clipped"), ("down", 0, "flushed"), ("spike", 1, "flushed")):
            cells = []
            for factor in settings.factors:
                steps = found[steps_run(settings, DELAYED, max(settings.histories), side, change, factor)]
                cells.append(f"{short(100 * getattr(steps, what)[moment])} %")
            when = "in the step after" if moment else "in its step"
            rows.append([f"{side} {CHANGE_TITLES[change]}", f"{what} {when}", *cells])
    return reporting.numbers(rows, ["change", "share", *(f"{factor:g} times" for factor in settings.factors)])


def _decibels(value: float) -> str:
    return "-∞" if value == -math.inf else f"{value:.1f}"
