"""Golden et al.'s claims about flash attention's forward pass, tested on the figures of ``flash_stability``."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from parity.lab.studies.flash_stability.deviation import Deviation, Results, over_seeds
from parity.lab.studies.flash_stability.sweeps import (
    ALONE,
    AS_KERNELS,
    EVERYWHERE,
    SPARED,
    STORED_STATE,
    SUMS,
    Run,
    Settings,
    plain_run,
    untiled,
    whole_runs,
)
from parity.lab.studies.stepwise import FORMATS, UNLIMITED
from parity.lab.studies.tables import Claim, verdict
from parity.report.numbers import ratio, short

MEMORY_LIMIT = 2 << 30
_SOURCE = "arXiv 2405.02803"
# "About ten times": nearer to ten than to one or a hundred, on a logarithmic scale.
_ABOUT_TEN = (math.sqrt(10), 10 * math.sqrt(10))
# Differences of less than this share are none: seeds differ by more.
_SAME = 0.05
_ROUNDED = {EVERYWHERE: "every step rounded", AS_KERNELS: "as kernels round"}


def claims(found: Results, settings: Settings) -> list[Claim]:
    """Each claim with its test."""
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
    """The exponent p of the law ``deviation ~ keys**p``: the slope of a line through the logarithms."""
    if len(settings.lengths) < 2:
        return math.nan
    values = [measure(over_seeds(found, of_length(entry, settings, keys), settings)) for keys in settings.lengths]
    logarithms = [math.log(value) for value in values]
    return statistics.linear_regression([math.log(keys) for keys in settings.lengths], logarithms).slope


def of_length(entry: Run, settings: Settings, keys: int) -> Run:
    """A run of the sweep over lengths."""
    rows = settings.queries if entry.algorithm == "flash" else 0
    return dataclasses.replace(entry, keys=keys, queries=settings.queries, rows=rows)


def flash_over_baseline(found: Results, settings: Settings, entry: Run) -> float:
    """The largest deviation of flash attention over that of baseline, all else equal."""
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
    """What the small range of FP8 has to do with it."""
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
    """Both algorithms on each distribution, every step rounded."""
    return [entry for base in _bases(settings) for entry in (base, untiled(base))]


def _of_formats(found: Results, settings: Settings, entry: Run, names: Sequence[str]) -> dict[str, float]:
    """Relative L2 deviations."""
    return {name: over_seeds(found, dataclasses.replace(entry, format=name), settings).relative_l2 for name in names}


def _breaks(errors: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Pairs of formats of which the first has more mantissa bits and deviates more."""
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
    """The height of tiles at which widths are compared; none matters."""
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
