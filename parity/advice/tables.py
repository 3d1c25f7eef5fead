"""Show what recipes cost: as tables in a terminal or in markdown, as JSON, and as plots on a page of their own."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from parity import shown
from parity.advice.advice import KINDS, PARTS, Layer, Recipe
from parity.report import environment
from parity.report.numbers import markdown_table, plural, seeds, short

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SOURCE = "Computed by the rounding model of the reference; nothing here was measured on a GPU."
_MOST_OUTPUTS = 3
_LEGEND = (
    "*Error* is relative, `|x - golden| / |golden|`, where golden is the reference in FP64 on the same rounded weights "
    "and inputs, as root mean square over seeds; a single number, such as a loss, is not rounded last. *Bias* is the "
    "signed error `(x - golden)·golden / |golden|²`, its mean over seeds and 95 % confidence interval. *Noise* is what "
    "rounding changes in a weight's gradient; training is known to stall where the gradient's norm is below √3 times "
    "it (arXiv 2505.19115)."
)
_LEGEND_OF_LAYERS = (
    "*Share* is the part of the squared error that a layer causes, found by rounding one of its operands alone while "
    "all else is computed in FP32; such errors add up nearly in squares. *Zeroed* and *saturated* are shares of the "
    "elements of inputs, weights and gradients. A layer is one GEMM of TE's, which may read several of the reference's "
    "weights."
)
_LAYER_HEADERS = (
    *("layer", "share of outputs' error", "inputs + weights", "of weight gradients' error"),
    *("zeroed: inputs, weights, gradients", "saturated"),
)


def describe(recipes: Sequence[Recipe]) -> str:
    """Return tables and sentences for a terminal."""
    lines = [SOURCE, "", _format_plainly(*_tabulate_recipes(recipes)), *_list_remarks(recipes)]
    for recipe in (one for one in recipes if one.kept):
        lines += ["", recipe.name, _format_plainly(_list_layer_rows(recipe), _LAYER_HEADERS), *_list_sentences(recipe)]
    return shown.text("\n".join(lines).replace("`", ""))


def to_json(pair: str, size: Mapping[str, Any], at_seeds: Sequence[int], recipes: Sequence[Recipe]) -> str:
    """Return everything as JSON, with null in place of numbers that are not known."""
    found = [_without_nan(dataclasses.asdict(recipe)) for recipe in recipes]
    made = {"pair": pair, "size": dict(size), "seeds": list(at_seeds), "source": SOURCE, "recipes": found}
    return json.dumps(made, indent=1, default=str)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(folder: Path, pair: str, size: Mapping[str, Any], at_seeds: Sequence[int], recipes: Sequence[Recipe]) -> Path:
    """Write ``recipes.json``, ``recipes.html`` with plots and the page ``recipes.md``, whose path is returned."""
    sizes = ", ".join(f"{name} {value}" for name, value in size.items())
    parts = [
        f"# What recipes cost in {shown.prose(pair)}",
        f"{SOURCE} Size: {shown.prose(sizes) or 'the only one'}; seeds {seeds(tuple(at_seeds))}.",
        _LEGEND,
        markdown_table(*_tabulate_recipes(recipes), left=1),
        *_list_remarks(recipes),
        _LEGEND_OF_LAYERS,
    ]
    for recipe in (one for one in recipes if one.kept):
        parts += [f"## {shown.prose(recipe.name)}", " ".join(_list_sentences(recipe))]
        parts.append(markdown_table(_list_layer_rows(recipe), _LAYER_HEADERS, left=1))
    parts.append(f"Made by `parity recipes`{environment.at_commit()}, which draws plots in `recipes.html` as well.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipes.json").write_text(to_json(pair, size, at_seeds, recipes), encoding="utf-8")
    draw_plots(pair, recipes).write_html(folder / "recipes.html", include_plotlyjs=True)
    page = folder / "recipes.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _format_plainly(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    alignment = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=alignment)


def _tabulate_recipes(recipes: Sequence[Recipe]) -> tuple[list[list[str]], list[str]]:
    names = [one.name for one in recipes[0].outputs][:_MOST_OUTPUTS]
    headers = ["recipe", *(header for name in names for header in (f"error of {name}", "bias"))]
    rows = []
    for recipe in recipes:
        outputs = {one.name: one for one in recipe.outputs}
        row = [recipe.name]
        for one in map(outputs.get, names):
            row += (
                [short(one.error), f"{one.bias:+.1e} ± {one.confidence:.1e}".replace("nan", "?")] if one else ["–", "–"]
            )
        name, worst = recipe.worst_gradient
        stalled = f"{len(recipe.stalled)} of {len(recipe.gradients)}"
        ratio = short(1.0 / worst) if worst else short(math.inf)
        rows.append([*row, short(recipe.typical_gradient), short(worst), name, ratio, stalled])
    return rows, [*headers, "weight gradients: median", "worst", "of", "gradient / noise", "below √3"]


def _list_remarks(recipes: Sequence[Recipe]) -> Iterator[str]:
    for recipe in recipes:
        if recipe.stalled:
            some = shown.few_of(recipe.stalled)
            yield f"{recipe.name}: gradients are below √3 times their noise, so that training may stall, in {some}."
        for one in recipe.outputs[_MOST_OUTPUTS:]:
            yield f"{recipe.name}: the error of {one.name} is {short(one.error)}."
        yield from (f"{recipe.name}: {note}." for note in recipe.notes)


def _list_layer_rows(recipe: Recipe) -> list[list[str]]:
    return [
        [
            layer.name,
            _format_percent(layer.share("outputs")),
            " + ".join(_format_percent(layer.shares["outputs"].get(part, math.nan)) for part in ("inputs", "weights")),
            _format_percent(layer.share("gradients")),
            *(", ".join(_format_percent(some[part]) for part in PARTS) for some in (layer.zeroed, layer.saturated)),
        ]
        for layer in (*recipe.layers, *([recipe.attention] if recipe.attention else []))
    ]


def _format_percent(share: float) -> str:
    if math.isnan(share):
        return "–"
    return "0" if share == 0.0 else "<0.1 %" if share < 0.001 else f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def _list_sentences(recipe: Recipe) -> Iterator[str]:
    kept = recipe.kept
    if kept is None:
        return
    count = f"{len(kept.layers)} of {plural(len(recipe.layers), 'linear layer')}"
    yield (
        f"With {count} in {recipe.base.upper()}, the error of {KINDS[recipe.by]}s goes from {short(kept.before)} to "
        f"{short(kept.after)} (predicted: {short(kept.predicted)}): {', '.join(f'`{name}`' for name in kept.layers)}."
    )
    yield f"Alone, layers cause errors that add up in squares to {short(kept.added_up)}."
    if recipe.by != "outputs":
        for before, after in zip(recipe.outputs, kept.outputs, strict=True):
            yield f"That of `{before.name}` goes from {short(before.error)} to {short(after.error)}."
    for what in ("zeroed", "saturated"):
        worst = [
            (part, *max((_read_share(layer, what, part), layer.name) for layer in recipe.layers)) for part in PARTS
        ]
        named = [f"{part} of `{name}` ({_format_percent(share)})" for part, share, name in worst if share >= 0.001]
        if named:
            yield f"Most elements are {what} in {', '.join(named)}."


def _read_share(layer: Layer, what: str, part: str) -> float:
    """Return a share of elements; 0 if it is not known."""
    share: float = getattr(layer, what)[part]
    return 0.0 if math.isnan(share) else share


def draw_plots(pair: str, recipes: Sequence[Recipe]) -> Figure:
    """Draw the errors by recipe, and for each recipe the shares of its layers, by operand."""
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    detailed = [recipe for recipe in recipes if recipe.kept]
    heights = [len(recipes) + 2, *(len(recipe.layers) + 2 for recipe in detailed)]
    titles = ["relative error", *(f"{one.name}: share of the error of {KINDS[one.by]}s" for one in detailed)]
    figure: Figure = make_subplots(
        len(heights),
        1,
        subplot_titles=[html.escape(title) for title in titles],
        row_heights=[height / sum(heights) for height in heights],
        vertical_spacing=min(0.1, 1.5 / sum(heights)),
    )
    upwards, names = recipes[::-1], [html.escape(recipe.name) for recipe in recipes[::-1]]
    for label, errors in (
        ("outputs", [recipe.error("outputs") for recipe in upwards]),
        ("weight gradients, median", [recipe.typical_gradient for recipe in upwards]),
        ("weight gradients, worst", [recipe.worst_gradient[1] for recipe in upwards]),
    ):
        figure.add_trace(Scatter(x=errors, y=names, name=label, mode="markers"), 1, 1)
    figure.update_xaxes(type="log", row=1, col=1)
    for row, recipe in enumerate(detailed, start=2):
        layers = [html.escape(layer.name) for layer in recipe.layers[::-1]]
        for part, color in zip(PARTS, ("#4c78a8", "#f58518", "#54a24b"), strict=True):
            shares = [layer.shares[recipe.by][part] for layer in recipe.layers[::-1]]
            drawn = dict(name=part, legendgroup=part, showlegend=row == 2, marker_color=color, orientation="h")
            figure.add_trace(Bar(x=shares, y=layers, **drawn), row, 1)
        figure.update_xaxes(tickformat=".0%", row=row, col=1)
    title = html.escape(f"{pair}. {SOURCE}")
    figure.update_layout(title=title, height=24 * sum(heights) + 120, barmode="stack", template="plotly_white")
    return figure
