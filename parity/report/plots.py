"""Say what the plots of a page show, as plain numbers and in words; the page's script draws them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parity.report.numbers import plural, short
from parity.result import Histogram, Profile, Result, TensorResult

MOST_LINES = 12  # of a plot over depth
_FEWEST_LAYERS = 3  # two numbers are as often a Sequential's parts
_MOST_HEADS = 256
_DEPTH = re.compile(r"(?<![^.])\d+(?![^.])")
_MAKES_HEADS = re.compile(r"\b[qkv]_proj\b|query|key|value")
_READS_HEADS = re.compile(r"\b(?:o|out)_proj\b")
_OF_GROUPS = re.compile(r"\b[kv]_proj\b|key|value")


@dataclass(frozen=True)
class Plot:
    """Hold one plot.

    Attributes:
        kind: which of the script's functions draws it.
        title: what it shows, in a few words.
        words: the same as a sentence, for who does not see it.
        numbers: what it is drawn from; lists, texts and numbers, None where a number is not finite.
    """

    kind: str
    title: str
    words: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


def of_tensor(result: Result, tensor: TensorResult) -> Iterator[Plot]:
    """Yield where a tensor's error lies, axis by axis, and how it is distributed; nothing without a picture."""
    picture = tensor.picture
    if picture is None:
        return
    for profile in picture.profiles:
        if 0 <= profile.axis < len(tensor.shape) and len(profile.error) == len(profile.expected) > 0:
            yield _along_axis(result, tensor, profile)
    histogram = picture.histogram
    if histogram is not None and len(histogram.error) == len(histogram.expected) > 0:
        yield _distribution(histogram)


def _along_axis(result: Result, tensor: TensorResult, profile: Profile) -> Plot:
    length, span = tensor.shape[profile.axis], max(1, profile.span)
    name = axis_name(result.size, tensor, profile.axis)
    starts = [min(part * span, length - 1) for part in range(len(profile.error))]
    times = [error / expected for error, expected in zip(profile.error, profile.expected, strict=True) if expected]
    worst = max(range(len(starts)), key=lambda part: profile.error[part])
    where = f"{starts[worst]}" if span == 1 else f"{starts[worst]} to {min(starts[worst] + span, length) - 1}"
    told = f"The error is largest at {where}"
    if times:
        told += f"; it is {short(min(times))} to {short(max(times))} times the expected one"
    if profile.spoiled:
        told += f". NaN or Inf in {plural(sum(map(bool, profile.spoiled)), 'part')} of {len(profile.spoiled)}"
    return Plot(
        "profile",
        f"along {name}",
        f"{told}.",
        {
            "at": starts,
            "span": span,
            "error": finite(profile.error),
            "expected": finite(profile.expected),
            "spoiled": list(profile.spoiled),
            "axis": name,
            "parted": _heads(result.size, tensor, profile.axis),
        },
    )


def axis_name(size: Mapping[str, Any], tensor: TensorResult, axis: int) -> str:
    """Return what an axis is, as far as the shape tells: by the case's sizes, or a weight's rows and columns."""
    length = tensor.shape[axis]
    named = [name for name, value in size.items() if value == length and not isinstance(value, bool)]
    alike = f" ({' or '.join(named)}, {length})" if named else f" ({length})"
    if tensor.kind == "weight gradient" and len(tensor.shape) == 2:
        return ("rows, output features", "columns, input features")[axis] + alike
    if axis == len(tensor.shape) - 1 and axis:
        return f"the last axis, channels{alike}"
    return f"axis {axis}{alike}"


def _heads(size: Mapping[str, Any], tensor: TensorResult, axis: int) -> int:
    """Return into how many heads an axis of a projection's weight is parted, as far as names and sizes tell; 0 for
    none. Heads are rows of what makes queries, keys and values, and columns of what reads their outputs.
    """
    of_rows, of_columns = _MAKES_HEADS.search(tensor.name), _READS_HEADS.search(tensor.name)
    if tensor.kind != "weight gradient" or not (of_columns if axis else of_rows):
        return 0
    named = ("groups", "kv_heads", "heads") if _OF_GROUPS.search(tensor.name) else ("heads",)
    heads = next((size[name] for name in named if isinstance(size.get(name), int)), 0)
    length = tensor.shape[axis]
    return heads if 1 < heads <= _MOST_HEADS and length > heads and length % heads == 0 else 0


def _distribution(histogram: Histogram) -> Plot:
    edges = [histogram.start + histogram.width * i for i in range(len(histogram.error))]
    error, expected = ([max(count, 0) for count in bins] for bins in (histogram.error, histogram.expected))
    exact, exact_of_model = (max(count, 0) for count in histogram.exact)
    total, total_of_model = max(sum(error) + exact, 1), max(sum(expected) + exact_of_model, 1)
    filled = [i for i, counts in enumerate(zip(error, expected, strict=True)) if any(counts)]
    kept = slice(filled[0], filled[-1] + 1) if filled else slice(0, 0)
    beyond = sum(count for edge, count in zip(edges, error, strict=True) if edge >= 1.0)
    return Plot(
        "histogram",
        "how large the elements' errors are",
        f"{_share(beyond, total)} of the elements err by more than 10 times the expected error in root mean square. "
        f"Without any error: {_share(exact, total)}; expected: {_share(exact_of_model, total_of_model)}.",
        {
            "at": [edge + histogram.width / 2 for edge in edges[kept]],
            "width": histogram.width,
            "error": [count / total for count in error[kept]],
            "expected": [count / total_of_model for count in expected[kept]],
        },
    )


def _share(count: int, total: int) -> str:
    return f"{short(100 * (count / total))} %"


def over_depth(tensors: Sequence[TensorResult]) -> Plot | None:
    """Return the errors of a model's gradients layer by layer; None where the names tell no depth.

    A layer is the first number in a parameter's name, and parameters whose names are alike but for it are a line.
    """
    lines: dict[str, dict[int, TensorResult]] = {}
    for tensor in tensors:
        found = _DEPTH.search(tensor.name)
        if found is not None and tensor.kind == "weight gradient" and len(found[0]) < 6:
            kind = f"{tensor.name[: found.start()]}#{tensor.name[found.end() :]}"
            lines.setdefault(kind, {})[int(found[0])] = tensor
    deep = {kind: layers for kind, layers in lines.items() if len(layers) >= _FEWEST_LAYERS}
    if not deep:
        return None
    shown = sorted(deep, key=lambda kind: -max(tensor.margin for tensor in deep[kind].values()))[:MOST_LINES]
    layers = sorted({layer for kind in deep.values() for layer in kind})
    over = sorted({layer for kind in deep.values() for layer, tensor in kind.items() if not tensor.passed})
    told = f"{plural(len(deep), 'kind')} of parameters in layers {layers[0]} to {layers[-1]}. "
    told += f"Beyond a limit: layers {', '.join(map(str, over))}." if over else "Every layer is within its limits."
    if len(deep) > len(shown):
        told += f" The {len(shown)} with the largest margins are drawn."
    return Plot(
        "depth",
        "error against depth",
        told,
        {
            "lines": [
                {
                    "name": kind,
                    "at": list(deep[kind]),
                    "margin": finite(tensor.margin for tensor in deep[kind].values()),
                    "error": finite(tensor.errors.relative_l2 for tensor in deep[kind].values()),
                    "expected": finite(tensor.expected.relative_l2 for tensor in deep[kind].values()),
                }
                for kind in shown
            ]
        },
    )


def over_steps(result: Result) -> Plot | None:
    """Return a training's losses and margins, step by step; None for a single pass."""
    if not result.steps:
        return None
    worst = max(result.steps, key=lambda step: step.margin)
    return Plot(
        "steps",
        "loss and margin against steps",
        f"{plural(len(result.steps), 'step')}; the largest margin is {short(worst.margin)}, at step {worst.number}.",
        {
            "at": [step.number for step in result.steps],
            "loss": finite(step.loss for step in result.steps),
            "golden": finite(step.golden for step in result.steps),
            "margin": finite(step.margin for step in result.steps),
        },
    )


def finite(values: Any) -> list[float | None]:
    """Return numbers as JSON has them: None for NaN and the infinities."""
    return [value if math.isfinite(value) else None for value in values]
