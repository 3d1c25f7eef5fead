"""What the study ``flash_stability`` runs: each sweep varies one thing about an attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from parity.lab.studies.flash_stability.backends import BACKENDS
from parity.lab.studies.flash_stability.inputs import DISTRIBUTIONS
from parity.lab.studies.stepwise import HARDWARE, STEPS, UNLIMITED, Steps, as_kernels, everywhere

# Formats that PyTorch's and TE's attention computes in.
KERNEL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What is rounded: every step; what kernels round; that and flash's state between two tiles; some steps and no others,
# or all others, of which the names follow, joined by +.
EVERYWHERE, AS_KERNELS, STORED_STATE, ALONE, SPARED = "everywhere", "as kernels", "stored state", "alone: ", "all but: "
STATE = ("maximum", "sum", "accumulator")
# What flash attention rounds once more with each tile, and baseline does not.
SUMS = "sum+accumulator"


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        distributions: names of ``inputs.DISTRIBUTIONS``.
        formats: names of ``number_formats.HARDWARE`` that are compared.
        format: of all other sweeps.
        length: queries and keys, except where the length is swept.
        lengths: of keys, where the length is swept.
        queries: that are measured there: as many at each length, or the maximum would grow with their number.
        whole_length: of the one run with as many queries as keys, for its memory.
        head_dim: features of a head.
        tile: queries and keys of a tile.
        tiles: edges of tiles, where tiles are swept.
        rises: of the running maximum after the first tile, where rescalings are swept.
        seeds: how many, from 0.
        device: ``cpu``, ``gpu``, or ``auto`` for the GPU where TE's kernels can run on one.
    """

    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    formats: tuple[str, ...] = HARDWARE
    format: str = "bf16"
    length: int = 2048
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    queries: int = 1024
    whole_length: int = 16384
    head_dim: int = 64
    tile: int = 64
    tiles: tuple[int, ...] = (16, 64, 256, 1024)
    rises: tuple[int, ...] = (0, 1, 3, 7, 15, 31)
    seeds: int = 3
    device: str = "auto"


@dataclass(frozen=True)
class Run:
    """One attention on one draw of inputs.

    Attributes:
        algorithm: ``baseline``, ``flash`` or one of ``backends.BACKENDS``.
        rounded: ``EVERYWHERE``, ``AS_KERNELS``, ``STORED_STATE``, or ``ALONE`` or ``SPARED`` with names of steps.
        format: that is rounded to; that of the inputs.
        distribution, seed: of the inputs.
        queries, keys: how many.
        rows, columns, outer: of ``Tiles``; 0 where there are none.
        causal: whether a query sees keys up to its own position only.
        rises: of the staircase of keys; None for plain inputs.
        maximum_known: whether flash attention starts from each row's largest score.
    """

    algorithm: str
    rounded: str
    format: str
    distribution: str
    seed: int
    queries: int
    keys: int
    rows: int = 0
    columns: int = 0
    outer: Literal["queries", "keys"] = "queries"
    causal: bool = False
    rises: int | None = None
    maximum_known: bool = False


def steps_of(entry: Run) -> Steps:
    """The format of each step of a run of ``ALGORITHMS``."""
    wide = "fp64" if entry.format == "fp64" else "fp32"
    kernels = as_kernels("baseline" if entry.algorithm == "baseline" else "flash", entry.format)
    if entry.rounded == AS_KERNELS:
        return kernels
    if entry.rounded == STORED_STATE:
        return _with(kernels, STATE, entry.format)
    if entry.rounded.startswith(ALONE):
        return _with(everywhere(wide), entry.rounded.removeprefix(ALONE).split("+"), entry.format)
    if entry.rounded.startswith(SPARED):
        return _with(everywhere(entry.format), entry.rounded.removeprefix(SPARED).split("+"), wide)
    return everywhere(entry.format)


def runs(settings: Settings) -> list[Run]:
    """Every run of every sweep, each once."""
    plain = [
        plain_run(settings, distribution, seed)
        for distribution in settings.distributions
        for seed in range(settings.seeds)
    ]
    found = [entry for base in plain for sweep in _SWEEPS for entry in sweep(base, settings)]
    return list(dict.fromkeys([*found, *whole_runs(settings)]))


def plain_run(settings: Settings, distribution: str, seed: int = 0) -> Run:
    """Flash attention with every step in the format, from which each sweep changes something."""
    length, tile = settings.length, settings.tile
    return Run("flash", EVERYWHERE, settings.format, distribution, seed, length, length, rows=tile, columns=tile)


def untiled(entry: Run, algorithm: str = "baseline") -> Run:
    """The same by an algorithm that has no tiles."""
    return dataclasses.replace(entry, algorithm=algorithm, rows=0, columns=0)


def both(entry: Run) -> tuple[Run, ...]:
    """The run of flash attention and that of baseline, with every step rounded and with what kernels round."""
    pair = (entry, untiled(entry))
    return tuple(dataclasses.replace(one, rounded=rounded) for one in pair for rounded in (EVERYWHERE, AS_KERNELS))


def formats(base: Run, settings: Settings) -> Iterator[Run]:
    """Number formats, and for those of a small range one of the same mantissa without."""
    unlimited = [UNLIMITED[name] for name in settings.formats if name in UNLIMITED]
    for name in (*settings.formats, *unlimited):
        yield from both(dataclasses.replace(base, format=name))


def steps(base: Run, settings: Settings) -> Iterator[Run]:
    """One step rounded, and one step not; and the two sums together."""
    for step in (*STEPS, SUMS):
        for prefix in (ALONE, SPARED):
            entry = dataclasses.replace(base, rounded=prefix + step)
            yield entry
            yield untiled(entry)


def lengths(base: Run, settings: Settings) -> Iterator[Run]:
    """Numbers of keys at a fixed size of tile and number of queries."""
    for keys in settings.lengths:
        yield from both(dataclasses.replace(base, queries=settings.queries, keys=keys, rows=settings.queries))


def tiles(base: Run, settings: Settings) -> Iterator[Run]:
    """Every height of tiles with every width, with every step rounded and with what kernels round."""
    for rows in settings.tiles:
        for columns in settings.tiles:
            entry = dataclasses.replace(base, rows=rows, columns=columns)
            yield from (entry, dataclasses.replace(entry, rounded=AS_KERNELS))


def loop_orders(base: Run, settings: Settings) -> Iterator[Run]:
    """Outer loop over queries and over keys, and the state stored in the format in between."""
    for rounded in (EVERYWHERE, AS_KERNELS, STORED_STATE):
        entry = dataclasses.replace(base, rounded=rounded)
        yield from (entry, dataclasses.replace(entry, outer="keys"))


def rescalings(base: Run, settings: Settings) -> Iterator[Run]:
    """How often the maximum rises, on the same keys in another order, and never, since it is known beforehand."""
    for rises in settings.rises:
        entry = dataclasses.replace(base, rises=rises)
        yield from (entry, dataclasses.replace(entry, maximum_known=True))
    yield dataclasses.replace(base, maximum_known=True)


def masks(base: Run, settings: Settings) -> Iterator[Run]:
    """With a causal mask and without."""
    for causal in (False, True):
        yield from both(dataclasses.replace(base, causal=causal))


def libraries(base: Run, settings: Settings) -> Iterator[Run]:
    """PyTorch's and TE's attention."""
    for name in KERNEL_DTYPES:
        if name in settings.formats:
            same = dataclasses.replace(base, format=name, rounded=AS_KERNELS)
            yield from (untiled(same, backend) for backend in BACKENDS)


_SWEEPS = (formats, steps, lengths, tiles, loop_orders, rescalings, masks, libraries)


def whole_runs(settings: Settings) -> tuple[Run, ...]:
    """Both algorithms with as many queries as keys, once."""
    length = settings.whole_length
    base = plain_run(settings, settings.distributions[0])
    return both(dataclasses.replace(base, queries=length, keys=length, rows=min(length, 1024)))[::2]


def _with(steps: Steps, names: Sequence[str], number_format: str) -> Steps:
    return dataclasses.replace(steps, **dict.fromkeys(names, number_format))
