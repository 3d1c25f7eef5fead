"""Draw the report of the study ``flash_stability``: Golden et al.'s claims tested, plots, and tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.studies import reporting
from lab.studies.flash_stability.study import (
    ALONE,
    AS_KERNELS,
    BACKENDS,
    EVERYWHERE,
    KERNEL_DTYPES,
    SPARED,
    STORED_STATE,
    SUMS,
    Deviation,
    Results,
    Run,
    Settings,
    both,
    over_seeds,
    plain_run,
    untiled,
    whole_runs,
)
from lab.studies.reporting import Claim, verdict
from lab.studies.settings import name_of
from lab.studies.stepwise import FORMATS, STEPS, UNLIMITED
from parity import te
from parity.report.environment import KERNELS
from parity.report.numbers import ratio, seeds, short
from parity.te import Kernels

# Golden et al.'s claims about flash attention's forward pass, tested with the study's results.


MEMORY_LIMIT = 2 << 30
_SOURCE = "arXiv 2405.02803"
# "About ten times": nearer to ten than to one or a hundred, on a logarithmic scale.
_ABOUT_TEN = (math.sqrt(10), 10 * math.sqrt(10))
# Relative differences below this do not count, because seeds differ by more.
_SAME = 0.05
_ROUNDED = {EVERYWHERE: "every step rounded", AS_KERNELS: "as kernels round"}


def claims(found: Results, settings: Settings) -> list[Claim]:
    """Return all claims, each with the result of its test."""
    return [
        _mantissa(found, settings),
        _ten_times(found, settings),
        _length(found, settings),
        _larger_tiles(found, settings),
        _rescalings(found, settings),
        _loop_order(found, settings),
        _square_tiles(found, settings),
        _memory(found, settings),
    ]


def growth(found: Results, settings: Settings, entry: Run, measure: Callable[[Deviation], float]) -> float:
    """Return the exponent p of ``deviation ~ keys**p``, fitted as the slope of a line through the logarithms."""
    if len(settings.lengths) < 2:
        return math.nan
    values = [measure(over_seeds(found, of_length(entry, settings, keys), settings)) for keys in settings.lengths]
    logarithms = [math.log(value) for value in values]
    return statistics.linear_regression([math.log(keys) for keys in settings.lengths], logarithms).slope


def of_length(entry: Run, settings: Settings, keys: int) -> Run:
    """Return the run of the sweep over lengths that has this number of keys."""
    rows = settings.queries if entry.algorithm == "flash" else 0
    return dataclasses.replace(entry, keys=keys, queries=settings.queries, rows=rows)


def flash_over_baseline(found: Results, settings: Settings, entry: Run) -> float:
    """Return flash attention's largest deviation divided by baseline's, all else being equal."""
    flash, baseline = (over_seeds(found, one, settings).maximum for one in (entry, untiled(entry)))
    return flash / baseline


def _bases(settings: Settings, rounded: str = EVERYWHERE) -> list[Run]:
    return [
        dataclasses.replace(plain_run(settings, distribution), rounded=rounded)
        for distribution in settings.distributions
    ]


def _mantissa(found: Results, settings: Settings) -> Claim:
    holds, breaks = [], []
    for entry in _entries(settings):
        errors = _of_formats(found, settings, entry, settings.formats)
        broken = list(_breaks(errors))
        holds.append(not broken)
        breaks += [
            f"{entry.algorithm}, {entry.distribution}: {better} {short(errors[better])}, {worse} {short(errors[worse])}"
            for better, worse in broken
        ]
    example = _of_formats(found, settings, plain_run(settings, settings.distributions[0]), settings.formats)
    figures = ", ".join(f"{name} {short(error)}" for name, error in example.items())
    exceptions = f" Exceptions: {'; '.join(breaks)}." if breaks else ""
    return Claim(
        _SOURCE,
        "the deviation falls with the number of mantissa bits",
        f"relative L2 of flash, every step rounded, {settings.distributions[0]}: {figures}.{exceptions}",
        verdict(holds),
        _range_costs(found, settings),
    )


def _range_costs(found: Results, settings: Settings) -> str:
    """Say how the small range of FP8 affects the claim about mantissa bits."""
    limited = [name for name in settings.formats if name in UNLIMITED]
    if not limited:
        return "More bits, finer roundings."
    names = [UNLIMITED[name] for name in limited]
    ordered = [not list(_breaks(_of_formats(found, settings, entry, names))) for entry in _entries(settings)]
    figures = "; ".join(
        f"{entry.algorithm}, {entry.distribution}: "
        + ", ".join(f"{name} {short(error)}" for name, error in _of_formats(found, settings, entry, names).items())
        for entry in _entries(settings)
    )
    order = "the claim holds" if all(ordered) else "the claim does not hold either"
    return (
        "More bits, finer roundings, as long as the range suffices. E4M3 has nothing between 0 and 2^-9, where "
        "baseline's probabilities of about 1 / keys lie, and nothing above 448, where the sum of a row ends. With the "
        f"same mantissas and FP32's range {order}: {figures}."
    )


def _entries(settings: Settings) -> list[Run]:
    """Return the runs of both algorithms on each distribution, with every step rounded."""
    return [entry for base in _bases(settings) for entry in (base, untiled(base))]


def _of_formats(found: Results, settings: Settings, entry: Run, names: Sequence[str]) -> dict[str, float]:
    """Return the relative L2 deviation in each format."""
    return {name: over_seeds(found, dataclasses.replace(entry, format=name), settings).relative_l2 for name in names}


def _breaks(errors: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Yield pairs of formats in which the first has more mantissa bits and yet deviates more."""
    for better in errors:
        for worse in errors:
            more_bits = FORMATS[better].mantissa_bits > FORMATS[worse].mantissa_bits
            if more_bits and errors[better] > errors[worse]:
                yield better, worse


def _ten_times(found: Results, settings: Settings) -> Claim:
    holds, ours = [], []
    for rounded, name in _ROUNDED.items():
        for base in _bases(settings, rounded):
            ratios = [
                flash_over_baseline(found, settings, of_length(base, settings, keys)) for keys in settings.lengths
            ]
            holds.append(_ABOUT_TEN[0] <= max(ratios) <= _ABOUT_TEN[1])
            ours.append(f"{name}, {base.distribution}: {', '.join(map(short, ratios))}")
    return Claim(
        _SOURCE,
        f"in {settings.format.upper()}, flash deviates about ten times as much as baseline",
        f"largest deviation, flash over baseline, at {_listed(settings.lengths)} keys: {'; '.join(ours)}.",
        verdict(holds),
        "It depends on two rounded quantities, the running sum and the accumulator, which flash rounds once with each "
        f"tile and baseline at most once: {_sums_alone(found, settings)}. Real flash kernels keep both in FP32.",
    )


def _sums_alone(found: Results, settings: Settings) -> str:
    texts = []
    for base in _bases(settings):
        whole, alone, spared = (
            over_seeds(found, dataclasses.replace(base, rounded=rounded), settings).relative_l2
            for rounded in (EVERYWHERE, ALONE + SUMS, SPARED + SUMS)
        )
        texts.append(
            f"{base.distribution}, {base.keys} keys, relative L2: all steps {short(whole)}, these two alone "
            f"{short(alone)}, all but these {short(spared)}"
        )
    return "; ".join(texts)


def _length(found: Results, settings: Settings) -> Claim:
    holds, ours = [], []
    for rounded, name in _ROUNDED.items():
        for base in _bases(settings, rounded):
            largest = growth(found, settings, base, lambda one: one.maximum)
            relative = growth(found, settings, base, lambda one: one.relative_l2)
            holds.append(relative > _SAME)
            ours.append(f"{name}, {base.distribution}: keys^{relative:.2f} (largest deviation: keys^{largest:.2f})")
    return Claim(
        _SOURCE,
        "flash attention's deviation grows with the sequence length",
        f"relative L2, {_listed(settings.lengths)} keys in tiles of {settings.tile}: {'; '.join(ours)}.",
        verdict(holds),
        "Each tile rounds the sum and the accumulator once more, and what a tile adds shrinks against what is there "
        "already, in the end to less than half a unit in the last place. With both in FP32 the relative deviation does "
        "not grow. Outputs of `normal` values shrink as keys^-0.5, and their largest deviations with them.",
    )


def _larger_tiles(found: Results, settings: Settings) -> Claim:
    holds, ours = [], []
    for rounded, name in _ROUNDED.items():
        for base in _bases(settings, rounded):
            errors = [
                _of_tile(found, settings, base, base_rows(settings), width).relative_l2 for width in settings.tiles
            ]
            holds.append(all(later < earlier * (1 - _SAME) for earlier, later in itertools.pairwise(errors)))
            ours.append(f"{name}, {base.distribution}: {', '.join(map(short, errors))}")
    return Claim(
        _SOURCE,
        "larger tiles deviate less",
        f"relative L2 at {_listed(settings.tiles)} keys a tile: {'; '.join(ours)}.",
        verdict(holds),
        "Wider tiles make fewer roundings of the sum and the accumulator. Where these are FP32, nothing is to be won.",
    )


def base_rows(settings: Settings) -> int:
    """Return the height of tiles at which widths are compared. Any height gives the same result."""
    return settings.tiles[0]


def _of_tile(found: Results, settings: Settings, base: Run, rows: int, columns: int) -> Deviation:
    return over_seeds(found, dataclasses.replace(base, rows=rows, columns=columns), settings)


def _rescalings(found: Results, settings: Settings) -> Claim:
    holds, ours = [], []
    for base in _bases(settings):
        fewest, most = (
            over_seeds(found, dataclasses.replace(base, rises=rises), settings)
            for rises in (min(settings.rises), max(settings.rises))
        )
        never = over_seeds(found, dataclasses.replace(base, maximum_known=True), settings)
        running = over_seeds(found, base, settings)
        holds.append(most.relative_l2 > fewest.relative_l2 * (1 + _SAME))
        ours.append(
            f"{base.distribution}: relative L2 {short(fewest.relative_l2)} with {short(fewest.rescalings)} rescalings, "
            f"{short(most.relative_l2)} with {short(most.rescalings)}; on plain inputs {short(running.relative_l2)} "
            f"with {short(running.rescalings)}, {short(never.relative_l2)} with none"
        )
    return Claim(
        "a guess of this project's",
        "more rescalings, more deviation: that is why larger tiles help",
        f"the same keys in another order, every step rounded: {'; '.join(ours)}.",
        verdict(holds),
        "Tiles count, not rescalings: each tile rounds the sum and the accumulator, whether or not the maximum rose. A "
        "rescaling shrinks earlier errors with what they are errors of. Wider tiles have fewer of both, so one is "
        "easily taken for the other.",
    )


def _loop_order(found: Results, settings: Settings) -> Claim:
    swapped_alike, stored_worse, ours = True, [], []
    for base in _bases(settings):
        for rounded in (EVERYWHERE, AS_KERNELS, STORED_STATE):
            entry = dataclasses.replace(base, rounded=rounded)
            swapped_alike &= _same_outputs(found, settings, entry, dataclasses.replace(entry, outer="keys"))
        registers = over_seeds(found, dataclasses.replace(base, rounded=AS_KERNELS), settings).relative_l2
        stored = over_seeds(found, dataclasses.replace(base, rounded=STORED_STATE, outer="keys"), settings).relative_l2
        stored_worse.append(stored > registers * (1 + _SAME))
        ours.append(
            f"{base.distribution}: queries outside, state in FP32 {short(registers)}; keys outside, state stored in "
            f"{settings.format.upper()} between tiles {short(stored)}, {ratio(stored, registers)} times that"
        )
    alike = "equal bit for bit" if swapped_alike else "not equal"
    return Claim(
        _SOURCE,
        "the order of the block loops matters",
        f"the same formats, loops swapped: outputs are {alike}. Relative L2: {'; '.join(ours)}.",
        verdict([not swapped_alike, all(stored_worse)]),
        "A query meets the tiles of keys in the same order either way. What can differ is where its state (maximum, "
        "sum, accumulator) waits: with queries outside in registers, with keys outside in memory. It matters if memory "
        "holds it in fewer bits.",
    )


def _same_outputs(found: Results, settings: Settings, one: Run, other: Run) -> bool:
    return all(
        found[dataclasses.replace(one, seed=seed)].outputs == found[dataclasses.replace(other, seed=seed)].outputs
        for seed in range(settings.seeds)
    )


def _square_tiles(found: Results, settings: Settings) -> Claim:
    holds, ours = [], []
    for base in _bases(settings):
        for width in settings.tiles:
            of_heights = [_of_tile(found, settings, base, rows, width).relative_l2 for rows in settings.tiles]
            holds.append(max(of_heights) <= min(of_heights) * (1 + _SAME))
        shapes = [(rows, edge) for edge in settings.tiles[1:] for rows in (edge, base_rows(settings))]
        figures = [
            f"{rows} x {columns} {short(_of_tile(found, settings, base, rows, columns).relative_l2)}"
            for rows, columns in shapes
        ]
        ours.append(f"{base.distribution}: {', '.join(figures)}")
    return Claim(
        _SOURCE,
        "whether tiles are square does not matter",
        f"relative L2, queries x keys of a tile, every step rounded: {'; '.join(ours)}.",
        verdict(holds),
        "The height of a tile, in queries, changes nothing, since queries do not meet. Its width, in keys, counts: a "
        "square tile deviates as any other of its width, and one turned from 16 x 64 to 64 x 16 as a narrower one.",
    )


def _memory(found: Results, settings: Settings) -> Claim:
    peak = max(found[entry].peak_bytes for entry in whole_runs(settings))
    return Claim(
        "this project",
        f"{settings.whole_length} queries by {settings.whole_length} keys take less than 2 GiB, golden included",
        f"the process's peak: {peak / 2**30:.2f} GiB",
        "yes" if peak < MEMORY_LIMIT else "no",
        "Golden and baseline compute some rows at a time.",
    )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


# Plots of the study ``flash_stability``.


_COLORS = {"flash": "tab:orange", "baseline": "tab:blue"}
_STYLES: dict[str, dict[str, Any]] = {
    EVERYWHERE: dict(linestyle="-", marker="o", label="every step rounded"),
    AS_KERNELS: dict(linestyle="--", marker="s", label="as kernels round", markerfacecolor="none"),
}


def draw(found: Results, settings: Settings) -> Figure:
    """Draw relative L2 over formats, keys, keys of a tile and rescalings, with a row for each distribution."""
    names = settings.distributions
    figure = Figure(figsize=(15, 3.6 * len(names) + 0.6), layout="constrained")
    axes = figure.subplots(len(names), 4, squeeze=False)
    for row, name in zip(axes, names, strict=True):
        base = plain_run(settings, name)
        _plot_formats(row[0], found, settings, base)
        _plot_lengths(row[1], found, settings, base)
        _plot_tiles(row[2], found, settings, base)
        _plot_rescalings(row[3], found, settings, base)
        row[0].set_ylabel(f"{name} inputs\nrelative L2 deviation")
        for axis in row:
            axis.grid(True, which="major", alpha=0.3)
        row[3].legend(fontsize="small")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _styled(algorithm: str, rounded: str) -> dict[str, Any]:
    style = _STYLES[rounded]
    return {**style, "color": _COLORS[algorithm], "label": f"{algorithm}, {style['label']}"}


def _both(base: Run) -> list[Run]:
    pair = (untiled(base), base)
    return [dataclasses.replace(one, rounded=rounded) for one in pair for rounded in _STYLES]


def _plot_formats(axis: Axes, found: Results, settings: Settings, base: Run) -> None:
    names = sorted(settings.formats, key=lambda name: -FORMATS[name].mantissa_bits)
    for entry in _both(base):
        errors = [over_seeds(found, dataclasses.replace(entry, format=name), settings).relative_l2 for name in names]
        axis.semilogy(names, [error or float("nan") for error in errors], **_styled(entry.algorithm, entry.rounded))
    axis.set(title="number formats", xlabel="from many mantissa bits to few")


def _plot_lengths(axis: Axes, found: Results, settings: Settings, base: Run) -> None:
    for entry in _both(base):
        errors = [
            over_seeds(found, of_length(entry, settings, keys), settings).relative_l2 for keys in settings.lengths
        ]
        axis.loglog(settings.lengths, errors, **_styled(entry.algorithm, entry.rounded))
    axis.set(title=f"{settings.format.upper()}, tiles of {settings.tile} keys", xlabel="keys")


def _plot_tiles(axis: Axes, found: Results, settings: Settings, base: Run) -> None:
    for rounded in _STYLES:
        entry = dataclasses.replace(base, rounded=rounded, rows=base_rows(settings))
        errors = [
            over_seeds(found, dataclasses.replace(entry, columns=width), settings).relative_l2
            for width in settings.tiles
        ]
        axis.loglog(settings.tiles, errors, **_styled("flash", rounded))
    axis.axhline(over_seeds(found, untiled(base), settings).relative_l2, color=_COLORS["baseline"], linewidth=1)
    axis.set(title=f"{settings.format.upper()}, {settings.length} keys; line: baseline", xlabel="keys of a tile")


def _plot_rescalings(axis: Axes, found: Results, settings: Settings, base: Run) -> None:
    for known, label, marker in ((False, "as the maximum rises", "o"), (True, "maximum known beforehand", "x")):
        of = [
            over_seeds(found, dataclasses.replace(base, rises=rises, maximum_known=known), settings)
            for rises in settings.rises
        ]
        color = "tab:green" if known else _COLORS["flash"]
        axis.plot(settings.rises, [one.relative_l2 for one in of], marker=marker, label=label, color=color)
    axis.set_ylim(bottom=0)
    axis.set(title="same keys, tiles in another order", xlabel="rises of the maximum after the first tile")


# The report.


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
  step's format (`lab/studies/stepwise.py`). FP8 formats have no scale here and saturate, as NVIDIA GPUs
  cast; so E4M3 has nothing between 0 and 2^-9 and nothing above 448.
- In FP64 the re-implementation and `scaled_dot_product_attention` agree to FP64's rounding
  (`tests/studies/test_stepwise_attention.py`).
- Over sequence lengths {queries} queries are measured at each length: the largest of more deviations would be larger.
- For the rescalings, each tile of keys has another level of scores, and the tiles come in another order: the softmax
  and the golden output are the same, the running maximum rises as often as is asked for.
- `e8m3` and `e8m2` have the mantissas of E4M3 and E5M2 and the range of FP32. No GPU has them: they tell what the range
  costs."""


def write(found: Results, settings: Settings, kernels: Kernels, folder: Path) -> Path:
    """Write ``flash_stability.md`` and ``.png`` into the folder, and return the report's path.

    Args:
        found: the results of all runs.
        settings: the study's settings.
        kernels: the kernels that TE ran on.
        folder: an existing folder.
    """
    draw(found, settings).savefig(folder / "flash_stability.png", dpi=90)
    return reporting.written(folder / "flash_stability.md", _sections(found, settings, kernels))


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
    yield reporting.claims(claims(found, settings))
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
                    one = over_seeds(found, dataclasses.replace(entry, rounded=prefix + step), settings)
                    cells.append(short(one.relative_l2))
        rows.append([step.replace("+", " and "), *cells])
    headers = [
        f"{name}, {algorithm}, {what}"
        for name in settings.distributions
        for algorithm in ("flash", "baseline")
        for what in ("alone", "all but")
    ]
    return reporting.texts(rows, ["step", *headers])


def _formats(found: Results, settings: Settings) -> str:
    rows = [
        [name, f"{FORMATS[name].mantissa_bits}", *_labels(entry), *_four(over_seeds(found, entry, settings))]
        for name in (*settings.formats, *(UNLIMITED[name] for name in settings.formats if name in UNLIMITED))
        for distribution in settings.distributions
        for entry in both(dataclasses.replace(plain_run(settings, distribution), format=name))
    ]
    return reporting.texts(rows, ["format", "mantissa bits", "inputs", "algorithm", "rounded", *_FOUR])


def _lengths(found: Results, settings: Settings) -> str:
    rows = [
        [str(keys), *_labels(entry), *_four(one := over_seeds(found, entry, settings)), f"{one.rescalings:.1f}"]
        for keys in settings.lengths
        for distribution in settings.distributions
        for base in both(plain_run(settings, distribution))
        for entry in (of_length(base, settings, keys),)
    ]
    return reporting.texts(rows, ["keys", "inputs", "algorithm", "rounded", *_FOUR, "rescalings"])


def _tiles(found: Results, settings: Settings) -> str:
    rows = [
        [str(width), *_labels(entry), *_four(one := over_seeds(found, entry, settings)), f"{one.rescalings:.1f}"]
        for width in settings.tiles
        for distribution in settings.distributions
        for rounded in (EVERYWHERE, AS_KERNELS)
        for entry in (
            dataclasses.replace(
                plain_run(settings, distribution), rounded=rounded, rows=base_rows(settings), columns=width
            ),
        )
    ]
    return reporting.texts(rows, ["keys of a tile", "inputs", "algorithm", "rounded", *_FOUR, "rescalings"])


def _loop_orders(found: Results, settings: Settings) -> str:
    rows = [
        [outer, *_labels(entry), *_four(over_seeds(found, entry, settings))]
        for distribution in settings.distributions
        for rounded in (EVERYWHERE, AS_KERNELS, STORED_STATE)
        for outer in ("queries", "keys")
        for entry in (dataclasses.replace(plain_run(settings, distribution), rounded=rounded, outer=outer),)
    ]
    return reporting.texts(rows, ["outer loop over", "inputs", "algorithm", "rounded", *_FOUR])


def _masks(found: Results, settings: Settings) -> str:
    rows = [
        ["causal" if causal else "none", *_labels(entry), *_four(over_seeds(found, entry, settings))]
        for distribution in settings.distributions
        for causal in (False, True)
        for entry in both(dataclasses.replace(plain_run(settings, distribution), causal=causal))
    ]
    return reporting.texts(rows, ["mask", "inputs", "algorithm", "rounded", *_FOUR])


def _library_runs(settings: Settings, name: str, distribution: str) -> list[Run]:
    base = dataclasses.replace(plain_run(settings, distribution), format=name, rounded=AS_KERNELS)
    return [untiled(base), base, *(untiled(base, backend) for backend in BACKENDS)]


def _libraries(found: Results, settings: Settings) -> str:
    rows = [
        [name, *_labels(entry)[:2], *_four(over_seeds(found, entry, settings))]
        for name in KERNEL_DTYPES
        if name in settings.formats
        for distribution in settings.distributions
        for entry in _library_runs(settings, name, distribution)
        if found[entry].deviation is not None
    ]
    return reporting.texts(rows, ["format", "inputs", "attention", *_FOUR])


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
