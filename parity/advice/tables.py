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
from parity.advice.advice import ATTENTION, PARTS, STALLS_BELOW, Layer, Recipe, share_of
from parity.report import environment
from parity.report.numbers import markdown_table, plural, short

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SOURCE = "Computed by the rounding model of the reference; nothing here was measured on a GPU."
_MOST_LAYERS_IN_TERMINAL, _MOST_OUTPUTS = 10, 3
_LEGEND = (
    "*Error* is relative, `|x - golden| / |golden|`, where golden is the reference in FP64 on the same rounded weights "
    "and inputs, as root mean square over seeds; a single number, such as a loss, is not rounded last. *Bias* is the "
    "signed error `(x - golden)·golden / |golden|²`, its mean over seeds and 95 % confidence interval. *Noise* is what "
    "rounding changes in a weight's gradient; training is known to stall where the gradient's norm is below "
    f"√3 ({short(STALLS_BELOW, 3)}) times it (arXiv 2505.19115)."
)
_LEGEND_OF_LAYERS = (
    "*Share* is the part of the squared error that a layer causes, found by rounding one of its operands alone while "
    "all else is computed in FP32; such errors add up nearly in squares. *Zeroed* and *saturated* are shares of the "
    "elements of inputs, weights and gradients. A layer is one GEMM of TE's, which may read several of the reference's "
    "weights."
)


def describe(recipes: Sequence[Recipe]) -> str:
    """Return tables and sentences for a terminal."""
    lines = [SOURCE, "", _format_plainly(*_tabulate_recipes(recipes)), *_list_remarks(recipes)]
    for recipe in recipes:
        if recipe.layers:
            lines += ["", recipe.name, _format_plainly(*_tabulate_layers(recipe, _MOST_LAYERS_IN_TERMINAL))]
            lines += _list_sentences(recipe)
    return shown.text("\n".join(lines).replace("`", ""))


def to_json(pair: str, size: Mapping[str, Any], seeds: Sequence[int], recipes: Sequence[Recipe]) -> str:
    """Return everything as JSON, with null in place of numbers that are not known."""
    made = {"pair": pair, "size": dict(size), "seeds": list(seeds), "source": SOURCE}
    return json.dumps({**made, "recipes": [_to_plain_data(one) for one in recipes]}, indent=1, default=str)


def write(folder: Path, pair: str, size: Mapping[str, Any], seeds: Sequence[int], recipes: Sequence[Recipe]) -> Path:
    """Write ``recipes.md``, ``recipes.html`` with plots, and ``recipes.json`` into a folder.

    Returns:
        The path of the markdown page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipes.json").write_text(to_json(pair, size, seeds, recipes), encoding="utf-8")
    draw_plots(pair, recipes).write_html(folder / "recipes.html", include_plotlyjs=True)
    page = folder / "recipes.md"
    page.write_text(_write_page(pair, size, seeds, recipes), encoding="utf-8")
    return page


def _write_page(pair: str, size: Mapping[str, Any], seeds: Sequence[int], recipes: Sequence[Recipe]) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in size.items())
    parts = [
        f"# What recipes cost in {shown.prose(pair)}",
        f"{SOURCE} Size: {shown.prose(sizes) or 'the only one'}; {plural(len(seeds), 'seed')}.",
        _LEGEND,
        markdown_table(*_tabulate_recipes(recipes), left=1),
        *_list_remarks(recipes),
        _LEGEND_OF_LAYERS,
    ]
    for recipe in recipes:
        if recipe.layers:
            parts += [f"## {shown.prose(recipe.name)}", " ".join(_list_sentences(recipe))]
            parts.append(markdown_table(*_tabulate_layers(recipe), left=1))
    parts.append(f"Made by `parity recipes`{environment.at_commit()}. `recipes.html` beside it has the plots.")
    return "\n\n".join(parts) + "\n"


def _format_plainly(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    alignment = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=alignment)


# By recipe.


def _tabulate_recipes(recipes: Sequence[Recipe]) -> tuple[list[list[str]], list[str]]:
    names = [one.name for one in recipes[0].outputs][:_MOST_OUTPUTS]
    headers = ["recipe"]
    for name in names:
        headers += [f"error of {name}", "bias"]
    headers += ["weight gradients: median", "worst", "of", "gradient / noise", "below √3"]
    return [_make_recipe_row(recipe, names) for recipe in recipes], headers


def _make_recipe_row(recipe: Recipe, names: Sequence[str]) -> list[str]:
    row, outputs = [recipe.name], {one.name: one for one in recipe.outputs}
    for name in names:
        one = outputs.get(name)
        row += [short(one.error), f"{one.bias:+.1e} ± {one.confidence:.1e}"] if one else ["–", "–"]
    worst = recipe.gradients.get(recipe.worst_gradient, math.nan)
    ratio = short(1.0 / worst) if worst else short(math.inf)
    stalled = f"{len(recipe.stalled)} of {len(recipe.gradients)}"
    return [*row, short(recipe.typical_gradient), short(worst), recipe.worst_gradient or "–", ratio, stalled]


def _list_remarks(recipes: Sequence[Recipe]) -> Iterator[str]:
    for recipe in recipes:
        if recipe.stalled:
            yield (
                f"{recipe.name}: the gradient is below √3 times its noise, so that training may stall, in "
                f"{shown.few_of(recipe.stalled)}."
            )
        for one in recipe.outputs[_MOST_OUTPUTS:]:
            yield f"{recipe.name}: the error of {one.name} is {short(one.error)}."
        yield from (f"{recipe.name}: {note}." for note in recipe.notes)


# By layer.

_LAYER_HEADERS = (
    *("layer", "share of outputs' error", "inputs + weights", "of weight gradients' error"),
    *("zeroed: inputs, weights, gradients", "saturated"),
)


def _tabulate_layers(recipe: Recipe, most: int | None = None) -> tuple[list[list[str]], tuple[str, ...]]:
    rows = [_make_layer_row(layer) for layer in recipe.layers[:most]]
    if left := recipe.layers[len(rows) :]:
        shares = [sum(share_of(layer, kind) for layer in left) for kind in ("outputs", "gradients")]
        rows.append([f"{len(left)} others", _percent(shares[0]), "", _percent(shares[1]), "", ""])
    if recipe.attention:
        whole = _percent(recipe.attention)
        rows.append([ATTENTION, *((whole, "", "") if recipe.ranked_by == "outputs" else ("", "", whole)), "", ""])
    return rows, _LAYER_HEADERS


def _make_layer_row(layer: Layer) -> list[str]:
    counts = [layer.counts[part] for part in PARTS]
    return [
        layer.name,
        _percent(share_of(layer, "outputs")),
        " + ".join(_percent(layer.of_outputs[part]) for part in ("inputs", "weights")),
        _percent(share_of(layer, "gradients")),
        ", ".join(_percent(one.zeroed) for one in counts),
        ", ".join(_percent(one.saturated) for one in counts),
    ]


def _percent(share: float) -> str:
    if math.isnan(share):
        return "–"
    return "0" if share == 0.0 else "<0.1 %" if share < 0.001 else f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def _list_sentences(recipe: Recipe) -> Iterator[str]:
    kept = recipe.kept
    if kept is None:
        return
    what = "the error of outputs" if recipe.ranked_by == "outputs" else "the error of weight gradients"
    count = f"{len(kept.layers)} of {plural(len(recipe.layers), 'linear layer')}"
    yield (
        f"With {count} in {recipe.base.upper()}, {what} goes from {short(kept.before)} to {short(kept.after)} "
        f"(predicted: {short(kept.predicted)}): {', '.join(f'`{name}`' for name in kept.layers)}."
    )
    if recipe.ranked_by != "outputs":
        for before, after in zip(recipe.outputs, kept.outputs, strict=True):
            yield f"That of `{before.name}`, a single number, goes from {short(before.error)} to {short(after.error)}."
    for what in ("zeroed", "saturated"):
        worst = {part: max(recipe.layers, key=lambda layer: _read_count(layer, part, what)) for part in PARTS}
        shares = {part: _read_count(layer, part, what) for part, layer in worst.items()}
        named = [
            f"{part} of `{worst[part].name}` ({_percent(share)})" for part, share in shares.items() if share >= 0.001
        ]
        if named:
            yield f"Most elements are {what} in {', '.join(named)}."


def _read_count(layer: Layer, part: str, what: str) -> float:
    """Return a share of elements; 0 if it is not known."""
    share: float = getattr(layer.counts[part], what)
    return 0.0 if math.isnan(share) else share


def _to_plain_data(recipe: Recipe) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: convert(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [convert(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return convert(dataclasses.asdict(recipe))


# Plots.


def draw_plots(pair: str, recipes: Sequence[Recipe]) -> Figure:
    """Draw the errors by recipe, and for each recipe the shares of its layers, by operand."""
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    detailed = [recipe for recipe in recipes if recipe.layers]
    heights = [len(recipes) + 2, *(len(recipe.layers) + 2 for recipe in detailed)]
    titles = ["relative error", *(f"{one.name}: share of the error of {one.ranked_by}" for one in detailed)]
    figure: Figure = make_subplots(
        len(heights),
        1,
        subplot_titles=[html.escape(title) for title in titles],
        row_heights=[height / sum(heights) for height in heights],
        vertical_spacing=min(0.1, 1.5 / sum(heights)),
    )
    names = [html.escape(recipe.name) for recipe in recipes][::-1]
    for label, values in _list_errors(recipes):
        figure.add_trace(Scatter(x=values[::-1], y=names, name=html.escape(label), mode="markers"), 1, 1)
    figure.update_xaxes(type="log", row=1, col=1)
    for row, recipe in enumerate(detailed, start=2):
        layers = [html.escape(layer.name) for layer in recipe.layers][::-1]
        carried = [layer.of_outputs if recipe.ranked_by == "outputs" else layer.of_gradients for layer in recipe.layers]
        for part, color in zip(PARTS, ("#4c78a8", "#f58518", "#54a24b"), strict=True):
            drawn = dict(name=part, legendgroup=part, showlegend=row == 2, marker_color=color, orientation="h")
            figure.add_trace(Bar(x=[one[part] for one in carried][::-1], y=layers, **drawn), row, 1)
        figure.update_xaxes(tickformat=".0%", row=row, col=1)
    title = html.escape(f"{pair}. {SOURCE}")
    figure.update_layout(title=title, height=24 * sum(heights) + 120, barmode="stack", template="plotly_white")
    return figure


def _list_errors(recipes: Sequence[Recipe]) -> Iterator[tuple[str, list[float | None]]]:
    for index, output in enumerate(recipes[0].outputs[:_MOST_OUTPUTS]):
        yield output.name, [recipe.outputs[index].error if index < len(recipe.outputs) else None for recipe in recipes]
    if recipes[0].gradients:
        yield "weight gradients, median", [recipe.typical_gradient for recipe in recipes]
        yield "weight gradients, worst", [max(recipe.gradients.values()) for recipe in recipes]
