"""Draws the report of the study ``flash_stability``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from parity import te
from parity.lab.studies import tables
from parity.lab.studies.flash_stability import plots
from parity.lab.studies.flash_stability.backends import BACKENDS
from parity.lab.studies.flash_stability.claims import base_rows, flash_over_baseline, of_length
from parity.lab.studies.flash_stability.claims import claims as tested
from parity.lab.studies.flash_stability.deviation import Deviation, Results, over_seeds
from parity.lab.studies.flash_stability.sweeps import (
    ALONE,
    AS_KERNELS,
    EVERYWHERE,
    KERNEL_DTYPES,
    SPARED,
    STORED_STATE,
    SUMS,
    Run,
    Settings,
    both,
    plain_run,
    untiled,
    whole_runs,
)
from parity.lab.studies.settings import name_of
from parity.lab.studies.stepwise import FORMATS, STEPS, UNLIMITED
from parity.report.environment import KERNELS
from parity.report.numbers import seeds, short
from parity.te import Kernels

_INTRODUCTION = """\
Attention turns queries, keys and values into `softmax(q k^T / sqrt(features)) v`. *Baseline* attention computes all
scores of a query, then their softmax, then the weighted sum of the values. *Flash* attention never holds all scores: it
takes the keys tile by tile, keeps for each query the largest score so far, the sum of the exponentials so far and the
weighted sum of the values so far (the accumulator), and rescales the last two whenever a larger score turns up. The two
are equal in exact arithmetic, and round differently. Golden et al. ("Is Flash Attention Stable?", arXiv 2405.02803) ask
how much, with a re-implementation whose working precision can be set; this study does the same and, step by step, asks
which rounding it is.

Each intermediate result has a number format of its own here. Two choices are compared throughout:

- **every step rounded** to the format, as if each were a PyTorch tensor of that dtype;
- **as kernels round**: baseline stores scores and probabilities in the format, and its softmax is FP32 inside, as
  PyTorch's is; flash keeps all in FP32 registers but the probabilities that multiply the values. Both round the output.

What is measured is the difference from FP64 on the same inputs, which are exact in the format. `normal` inputs are
N(0, 1), and outputs shrink with the number of keys; `uniform` ones are from [0, 1), as `torch.rand` gives them, and
outputs stay near 1/2. One head of {head_dim} features; unless it says otherwise {length} queries and keys, tiles of
{tile} by {tile}, {format}, no mask, seeds {seeds}: largest deviations are over all seeds, others the mean over them."""

_METHOD = """\
- Products and sums within one operation are FP32, as tensor cores accumulate them; its result is then rounded to the
  step's format (`parity/lab/studies/stepwise.py`). FP8 formats have no scale here and saturate, as NVIDIA GPUs
  cast; so E4M3 has nothing between 0 and 2^-9 and nothing above 448.
- In FP64 the re-implementation and `scaled_dot_product_attention` agree to FP64's rounding
  (`tests/studies/test_stepwise_attention.py`).
- Over sequence lengths {queries} queries are measured at each length: the largest of more deviations would be larger.
- For the rescalings, each tile of keys has another level of scores, and the tiles come in another order: the softmax
  and the golden output are the same, the running maximum rises as often as is asked for.
- `e8m3` and `e8m2` have the mantissas of E4M3 and E5M2 and the range of FP32. No GPU has them: they tell what the range
  costs."""


def write(found: Results, settings: Settings, kernels: Kernels, folder: Path) -> Path:
    """Write ``flash_stability.md`` and ``.png`` into the folder; returns the report's path.

    Args:
        found: every run's result.
        settings: of the study.
        kernels: that TE ran on.
        folder: exists.
    """
    plots.draw(found, settings).savefig(folder / "flash_stability.png", dpi=90)
    path = folder / "flash_stability.md"
    path.write_text("\n\n".join(_sections(found, settings, kernels)) + "\n", encoding="utf-8")
    return path


def _sections(found: Results, settings: Settings, kernels: Kernels) -> Iterator[str]:
    yield "# Is flash attention stable?"
    yield _short_answer(found, settings)
    yield _INTRODUCTION.format(
        head_dim=settings.head_dim,
        length=settings.length,
        tile=settings.tile,
        format=settings.format.upper(),
        seeds=seeds(tuple(range(settings.seeds))),
    )
    yield (
        f"Computed on {name_of(kernels)}, torch {torch.__version__}. The re-implementation emulates number formats on "
        f"any device. TransformerEngine {te.version()} in the table of libraries: {KERNELS[kernels.backend]}."
    )
    yield "![Deviation over formats, keys, tiles and rescalings](flash_stability.png)"
    yield "## Claims"
    yield tables.claims(tested(found, settings))
    yield "## Which rounding does it"
    yield (
        "Relative L2 deviation of flash and baseline attention where one step alone is rounded to "
        f"{settings.format.upper()} (the others are FP32), and where all but that one are."
    )
    yield _steps(found, settings)
    yield "## Number formats"
    yield _formats(found, settings)
    yield "## Sequence length"
    yield _lengths(found, settings)
    yield "## Tiles and loop order"
    yield "Deviation of flash attention by the keys of a tile; its queries change nothing (see the claims)."
    yield _tiles(found, settings)
    yield _loop_orders(found, settings)
    yield "## Causal mask"
    yield _masks(found, settings)
    yield "## PyTorch's and TransformerEngine's own attention"
    yield (
        "On the same inputs, next to the re-implementation with what kernels round: this says which steps a library "
        "rounds." + ("" if kernels.backend == "gpu" else " TE's rows are emulated here, and no evidence about a GPU.")
    )
    yield _libraries(found, settings)
    yield from _refusals(found, settings)
    yield "## How it was done"
    yield "\n".join((_METHOD.format(queries=settings.queries), _whole(found, settings)))
    yield "Made by `parity study flash_stability`."


def _short_answer(found: Results, settings: Settings) -> str:
    longest = settings.lengths[-1]
    everywhere, kernels = (
        [
            flash_over_baseline(
                found,
                settings,
                of_length(dataclasses.replace(plain_run(settings, name), rounded=rounded), settings, longest),
            )
            for name in settings.distributions
        ]
        for rounded in (EVERYWHERE, AS_KERNELS)
    )
    return (
        f"**As kernels compute it, {'yes' if max(kernels) < 2 else 'no'}.** At {longest} keys in "
        f"{settings.format.upper()}, flash attention's largest deviation is {_range(kernels)} times baseline's if each "
        f"rounds what real kernels round, and {_range(everywhere)} times if every step is rounded. The difference is "
        "the running sum and the accumulator: a flash kernel that kept them in the storage format would be as unstable "
        "as the source says."
    )


def _range(values: Iterable[float]) -> str:
    low, high = min(values := list(values)), max(values)
    return short(low) if short(low) == short(high) else f"{short(low)} to {short(high)}"


def _at(found: Results, settings: Settings, entry: Run) -> Deviation:
    return over_seeds(found, entry, settings)


def _four(one: Deviation) -> list[str]:
    return [short(one.maximum), short(one.mean), short(one.std), short(one.relative_l2)]


_FOUR = ["largest", "mean", "standard deviation", "relative L2"]


def _steps(found: Results, settings: Settings) -> str:
    rows = []
    for step in (*STEPS, SUMS):
        cells = []
        for name in settings.distributions:
            base = plain_run(settings, name)
            for entry in (base, untiled(base)):
                for prefix in (ALONE, SPARED):
                    one = _at(found, settings, dataclasses.replace(entry, rounded=prefix + step))
                    cells.append(short(one.relative_l2))
        rows.append([step.replace("+", " and "), *cells])
    headers = [
        f"{name}, {algorithm}, {what}"
        for name in settings.distributions
        for algorithm in ("flash", "baseline")
        for what in ("alone", "all but")
    ]
    return tables.texts(rows, ["step", *headers])


def _formats(found: Results, settings: Settings) -> str:
    rows = [
        [name, f"{FORMATS[name].mantissa_bits}", *_labels(entry), *_four(_at(found, settings, entry))]
        for name in (*settings.formats, *(UNLIMITED[name] for name in settings.formats if name in UNLIMITED))
        for distribution in settings.distributions
        for entry in both(dataclasses.replace(plain_run(settings, distribution), format=name))
    ]
    return tables.texts(rows, ["format", "mantissa bits", "inputs", "algorithm", "rounded", *_FOUR])


def _lengths(found: Results, settings: Settings) -> str:
    rows = [
        [str(keys), *_labels(entry), *_four(one := _at(found, settings, entry)), f"{one.rescalings:.1f}"]
        for keys in settings.lengths
        for distribution in settings.distributions
        for base in both(plain_run(settings, distribution))
        for entry in (of_length(base, settings, keys),)
    ]
    return tables.texts(rows, ["keys", "inputs", "algorithm", "rounded", *_FOUR, "rescalings"])


def _tiles(found: Results, settings: Settings) -> str:
    rows = [
        [str(width), *_labels(entry), *_four(one := _at(found, settings, entry)), f"{one.rescalings:.1f}"]
        for width in settings.tiles
        for distribution in settings.distributions
        for rounded in (EVERYWHERE, AS_KERNELS)
        for entry in (
            dataclasses.replace(
                plain_run(settings, distribution), rounded=rounded, rows=base_rows(settings), columns=width
            ),
        )
    ]
    return tables.texts(rows, ["keys of a tile", "inputs", "algorithm", "rounded", *_FOUR, "rescalings"])


def _loop_orders(found: Results, settings: Settings) -> str:
    rows = [
        [outer, *_labels(entry), *_four(_at(found, settings, entry))]
        for distribution in settings.distributions
        for rounded in (EVERYWHERE, AS_KERNELS, STORED_STATE)
        for outer in ("queries", "keys")
        for entry in (dataclasses.replace(plain_run(settings, distribution), rounded=rounded, outer=outer),)
    ]
    return tables.texts(rows, ["outer loop over", "inputs", "algorithm", "rounded", *_FOUR])


def _masks(found: Results, settings: Settings) -> str:
    rows = [
        ["causal" if causal else "none", *_labels(entry), *_four(_at(found, settings, entry))]
        for distribution in settings.distributions
        for causal in (False, True)
        for entry in both(dataclasses.replace(plain_run(settings, distribution), causal=causal))
    ]
    return tables.texts(rows, ["mask", "inputs", "algorithm", "rounded", *_FOUR])


def _library_runs(settings: Settings, name: str, distribution: str) -> list[Run]:
    base = dataclasses.replace(plain_run(settings, distribution), format=name, rounded=AS_KERNELS)
    return [untiled(base), base, *(untiled(base, backend) for backend in BACKENDS)]


def _libraries(found: Results, settings: Settings) -> str:
    rows = [
        [name, *_labels(entry)[:2], *_four(_at(found, settings, entry))]
        for name in KERNEL_DTYPES
        if name in settings.formats
        for distribution in settings.distributions
        for entry in _library_runs(settings, name, distribution)
        if found[entry].deviation is not None
    ]
    return tables.texts(rows, ["format", "inputs", "attention", *_FOUR])


def _refusals(found: Results, settings: Settings) -> Iterator[str]:
    refused: dict[str, dict[str, list[str]]] = {}
    for name in KERNEL_DTYPES:
        for backend in BACKENDS:
            entry = found.get(_library_runs(settings, name, settings.distributions[0])[2 + BACKENDS.index(backend)])
            if entry is not None and entry.deviation is None:
                refused.setdefault(backend, {}).setdefault(entry.refusal, []).append(name)
    if refused:
        yield "Backends that did not run here, in their libraries' words:"
        yield "\n".join(
            f"- `{backend}`, {', '.join(names)}: {refusal}"
            for backend, refusals in refused.items()
            for refusal, names in refusals.items()
        )


def _whole(found: Results, settings: Settings) -> str:
    length = settings.whole_length
    results = [(entry.algorithm, found[entry]) for entry in whole_runs(settings)]
    figures = ", ".join(
        f"{algorithm} {short(result.deviation.relative_l2)}" for algorithm, result in results if result.deviation
    )
    peak = max(result.peak_bytes for _, result in results)
    return (
        f"- All of {length} queries by {length} keys, once, every step rounded: relative L2 {figures}. The process "
        f"used {peak / 2**30:.2f} GiB at most, golden output, PyTorch and TransformerEngine included."
    )


def _labels(entry: Run) -> list[str]:
    rounded = {
        EVERYWHERE: "every step",
        AS_KERNELS: "as kernels",
        STORED_STATE: "as kernels, and the state between tiles",
    }
    return [entry.distribution, entry.algorithm, rounded[entry.rounded]]
