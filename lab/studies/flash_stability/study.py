"""Measure how far baseline and flash attention deviate from FP64, and which rounding causes it.

Follows Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803): both algorithms are re-implemented with a number
format for each intermediate result (``stepwise``) and compared with attention in FP64 on the same inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lab.studies import te_modules
from lab.studies.settings import check_names, kernels_on
from lab.studies.stepwise import (
    ALGORITHMS,
    FORMATS,
    HARDWARE,
    STEPS,
    UNLIMITED,
    Attended,
    Steps,
    Tiles,
    as_kernels,
    baseline,
    everywhere,
    flash,
    full_fp32_products,
    golden,
)
from lab.studies.te_modules import Backend
from parity import te
from parity.case.case import Rng
from parity.measuring import record
from parity.measuring.record import Campaign
from parity.te import Kernels
from parity.user_error import UserError

# Queries, keys and values. They are exact in a number format, so that only the attention itself deviates.


# normal: outputs are means of values that cancel, so they shrink as the number of keys grows.
# uniform: values in [0, 1), as from torch.rand; outputs stay near 1/2, and the accumulator grows evenly with each tile.
DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {"normal": Rng.normal, "uniform": Rng.uniform}
# The height that the staircase of keys climbs, in logits. Scores within a tile differ by much less.
_STAIRCASE_HEIGHT = 4.0
_STAIRCASE_STD = 0.1


@dataclass(frozen=True)
class Inputs:
    """Hold the inputs of attention.

    Attributes:
        query: ``[queries, features]`` FP32.
        key, value: ``[keys, features]`` FP32.
    """

    query: Tensor
    key: Tensor
    value: Tensor


def draw(distribution: str, seed: int, queries: int, keys: int, head_dim: int, number_format: str) -> Inputs:
    """Draw inputs from ``DISTRIBUTIONS``. Queries do not depend on the number of keys; keys and values do."""
    one_of = DISTRIBUTIONS[distribution]
    tensors = [
        one_of(Rng(seed, purpose), rows, head_dim)
        for purpose, rows in (("query", queries), ("key", keys), ("value", keys))
    ]
    return Inputs(*map(FORMATS[number_format].round, tensors))


def staircase(
    distribution: str, seed: int, keys: int, head_dim: int, number_format: str, tile: int, rises: int
) -> Inputs:
    """Draw inputs whose tiles of keys have different score levels, ordered so that the maximum rises ``rises`` times.

    The set of keys is always the same, so softmax and golden output do not depend on the order, only the running
    maximum does. The order is the lowest ``rises`` levels upwards, then the highest, then the others downwards.

    Args:
        distribution: the distribution of the values.
        tile: keys of a tile.
        rises: how often each query's maximum rises after its first tile; less than the number of tiles.
    """
    inputs = draw(distribution, seed, keys, keys, head_dim, number_format)
    tiles = math.ceil(keys / tile)
    levels = torch.linspace(0.0, _STAIRCASE_HEIGHT, tiles)[_order(tiles, rises)]
    rng = Rng(seed, "staircase")
    query, key = (rng.normal(keys, head_dim, std=_STAIRCASE_STD) for _ in range(2))
    # One feature carries the levels: it is 1 in all queries, so its product with a key's is the key's level.
    query[:, 0] = 1.0
    key[:, 0] = levels.repeat_interleave(tile)[:keys] * math.sqrt(head_dim)
    key_order, value = _tiles_in_order(_order(tiles, rises), tile, keys), inputs.value
    key[:, 1:] = key[key_order, 1:]
    return Inputs(FORMATS[number_format].round(query), FORMATS[number_format].round(key), value[key_order])


def _order(tiles: int, rises: int) -> list[int]:
    return [*range(rises), tiles - 1, *range(tiles - 2, rises - 1, -1)]


def _tiles_in_order(order: Sequence[int], tile: int, keys: int) -> Tensor:
    return torch.cat([torch.arange(index * tile, min((index + 1) * tile, keys)) for index in order])


# PyTorch's and TransformerEngine's own attention, by name of the backend.


_TORCH = {
    "torch math": SDPBackend.MATH,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
}
_TE: dict[str, Backend] = {"te unfused": "unfused", "te fused": "fused", "te flash": "flash"}
BACKENDS = (*_TORCH, *_TE)


class BackendRefused(RuntimeError):
    """A backend does not run here. The message is the library's reason."""


def attend(backend: str, inputs: Inputs, dtype: torch.dtype, causal: bool, kernels: Kernels) -> Tensor:
    """Return one head of attention.

    Args:
        backend: a name in ``BACKENDS``.
        dtype: the dtype of inputs and output.

    Returns:
        ``[queries, features]`` on the kernels' device.

    Raises:
        BackendRefused: if there is no such backend for this device, dtype or size.
    """
    query, key, value = (x.to(kernels.device, dtype)[None] for x in (inputs.query, inputs.key, inputs.value))
    try:
        if backend in _TE:
            return te_modules.attend(kernels, _TE[backend], query, key, value, causal=causal)[0]
        with sdpa_kernel(_TORCH[backend]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return scaled_dot_product_attention(query[None], key[None], value[None], is_causal=causal)[0, 0]
    except (RuntimeError, UserError) as error:
        raise BackendRefused(str(error).strip().splitlines()[0]) from error


# The runs: each sweep varies one property of an attention.


# Formats that PyTorch's and TE's attention can compute in.
KERNEL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Which steps are rounded: all; those that kernels round; those and flash's state between tiles; only the named steps;
# or all except the named steps. Names follow the prefix, joined by +.
EVERYWHERE, AS_KERNELS, STORED_STATE, ALONE, SPARED = "everywhere", "as kernels", "stored state", "alone: ", "all but: "
STATE = ("maximum", "sum", "accumulator")
# The steps that flash attention rounds again with each tile, unlike baseline.
SUMS = "sum+accumulator"


@dataclass(frozen=True)
class Settings:
    """Options of the study.

    Attributes:
        distributions: names in ``DISTRIBUTIONS``.
        formats: names in ``stepwise.HARDWARE`` to compare.
        format: the format of all other sweeps.
        length: number of queries and of keys, except in the sweep over lengths.
        lengths: numbers of keys in the sweep over lengths.
        queries: number of queries in that sweep. It is fixed because the maximum over more queries would be larger.
        whole_length: queries and keys of one long run that measures memory.
        head_dim: features of a head.
        tile: queries and keys of a tile.
        tiles: edges of tiles in the sweep over tiles.
        rises: how often the running maximum rises after the first tile, in the sweep over rescalings.
        seeds: how many seeds to run, starting at 0.
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
        algorithm: ``baseline``, ``flash`` or one of ``BACKENDS``.
        rounded: ``EVERYWHERE``, ``AS_KERNELS``, ``STORED_STATE``, or ``ALONE`` or ``SPARED`` with names of steps.
        format: the format of the inputs and of the rounded steps.
        distribution, seed: the distribution and seed of the inputs.
        queries, keys: the number of each.
        rows, columns, outer: as in ``Tiles``; sizes are 0 without tiles.
        causal: whether a query sees keys up to its own position only.
        rises: rises of the maximum in a staircase of keys; None for plain inputs.
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
    """Return the format of each step of a run of ``ALGORITHMS``."""
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
    """Return every run of every sweep, each once."""
    plain = [
        plain_run(settings, distribution, seed)
        for distribution in settings.distributions
        for seed in range(settings.seeds)
    ]
    found = [entry for base in plain for sweep in _SWEEPS for entry in sweep(base, settings)]
    return list(dict.fromkeys([*found, *whole_runs(settings)]))


def plain_run(settings: Settings, distribution: str, seed: int = 0) -> Run:
    """Return the run that each sweep starts from: flash attention with every step in the format."""
    length, tile = settings.length, settings.tile
    return Run("flash", EVERYWHERE, settings.format, distribution, seed, length, length, rows=tile, columns=tile)


def untiled(entry: Run, algorithm: str = "baseline") -> Run:
    """Return the same run with an algorithm that has no tiles."""
    return dataclasses.replace(entry, algorithm=algorithm, rows=0, columns=0)


def both(entry: Run) -> tuple[Run, ...]:
    """Return flash and baseline attention, each with every step rounded and with only what kernels round."""
    pair = (entry, untiled(entry))
    return tuple(dataclasses.replace(one, rounded=rounded) for one in pair for rounded in (EVERYWHERE, AS_KERNELS))


def formats(base: Run, settings: Settings) -> Iterator[Run]:
    """Yield runs in each number format, and in the ``UNLIMITED`` versions of formats with a small range."""
    unlimited = [UNLIMITED[name] for name in settings.formats if name in UNLIMITED]
    for name in (*settings.formats, *unlimited):
        yield from both(dataclasses.replace(base, format=name))


def steps(base: Run, settings: Settings) -> Iterator[Run]:
    """Yield runs with one step rounded and with all but one, for each step and for the two sums together."""
    for step in (*STEPS, SUMS):
        for prefix in (ALONE, SPARED):
            entry = dataclasses.replace(base, rounded=prefix + step)
            yield entry
            yield untiled(entry)


def lengths(base: Run, settings: Settings) -> Iterator[Run]:
    """Yield runs with each number of keys, at a fixed tile size and number of queries."""
    for keys in settings.lengths:
        yield from both(dataclasses.replace(base, queries=settings.queries, keys=keys, rows=settings.queries))


def tiles(base: Run, settings: Settings) -> Iterator[Run]:
    """Yield runs with every height and width of tiles, with every step rounded and with what kernels round."""
    for rows in settings.tiles:
        for columns in settings.tiles:
            entry = dataclasses.replace(base, rows=rows, columns=columns)
            yield from (entry, dataclasses.replace(entry, rounded=AS_KERNELS))


def loop_orders(base: Run, settings: Settings) -> Iterator[Run]:
    """Yield runs whose outer loop is over queries and over keys, in three roundings including a stored state."""
    for rounded in (EVERYWHERE, AS_KERNELS, STORED_STATE):
        entry = dataclasses.replace(base, rounded=rounded)
        yield from (entry, dataclasses.replace(entry, outer="keys"))


def rescalings(base: Run, settings: Settings) -> Iterator[Run]:
    """Yield runs in which the maximum rises more or less often, each also with the maximum known beforehand."""
    for rises in settings.rises:
        entry = dataclasses.replace(base, rises=rises)
        yield from (entry, dataclasses.replace(entry, maximum_known=True))
    yield dataclasses.replace(base, maximum_known=True)


def masks(base: Run, settings: Settings) -> Iterator[Run]:
    """Yield runs with a causal mask and without."""
    for causal in (False, True):
        yield from both(dataclasses.replace(base, causal=causal))


def libraries(base: Run, settings: Settings) -> Iterator[Run]:
    """Yield runs of PyTorch's and TE's attention."""
    for name in KERNEL_DTYPES:
        if name in settings.formats:
            same = dataclasses.replace(base, format=name, rounded=AS_KERNELS)
            yield from (untiled(same, backend) for backend in BACKENDS)


_SWEEPS = (formats, steps, lengths, tiles, loop_orders, rescalings, masks, libraries)


def whole_runs(settings: Settings) -> tuple[Run, ...]:
    """Return one long run of each algorithm, with as many queries as keys."""
    length = settings.whole_length
    base = plain_run(settings, settings.distributions[0])
    return both(dataclasses.replace(base, queries=length, keys=length, rows=min(length, 1024)))[::2]


def _with(steps: Steps, names: Sequence[str], number_format: str) -> Steps:
    return dataclasses.replace(steps, **dict.fromkeys(names, number_format))


# The deviation of one attention from FP64.


@dataclass(frozen=True)
class Deviation:
    """The difference from FP64 over all outputs of a run.

    Attributes:
        maximum: its largest magnitude; infinite if an output is not finite.
        mean: its mean magnitude.
        std: its standard deviation.
        relative_l2: its Euclidean norm over that of the golden output.
        rescalings: how often a query's maximum rose after its first tile, on average.
    """

    maximum: float
    mean: float
    std: float
    relative_l2: float
    rescalings: float


@dataclass(frozen=True)
class Result:
    """Hold one run's entry in the record.

    Attributes:
        deviation: the deviation from FP64; None if the backend refused.
        refusal: the library's reason if the backend refused.
        peak_bytes: the most memory that was in use during the run and the computation of its golden output: on the
            CPU the whole process with PyTorch's libraries, on a GPU only tensors.
        outputs: a checksum of the outputs, to see whether two runs' outputs are equal bit for bit.
    """

    deviation: Deviation | None
    refusal: str
    peak_bytes: int
    outputs: int


Results = Mapping[Run, Result]


def result_of(entry: Run, settings: Settings, kernels: Kernels) -> Result:
    """Attend once, and compare the output with FP64."""
    _forget_peak(kernels)
    inputs, exact = _with_golden(shared_part(entry), settings.head_dim, settings.tile, kernels.device)
    try:
        attended = _attended(entry, inputs, kernels)
    except BackendRefused as refusal:
        return Result(None, str(refusal), 0, 0)
    return Result(
        deviation=deviation(attended, exact),
        refusal="",
        peak_bytes=_peak_bytes(kernels),
        outputs=record.fingerprint([attended.output.cpu()]),
    )


def deviation(attended: Attended, exact: Tensor) -> Deviation:
    """Return the deviation of an output from the golden one."""
    difference = attended.output.double() - exact
    if not difference.isfinite().all():
        return Deviation(math.inf, math.inf, math.inf, math.inf, attended.rescalings)
    return Deviation(
        maximum=difference.abs().max().item(),
        mean=difference.abs().mean().item(),
        std=difference.std().item(),
        relative_l2=(difference.norm() / exact.norm()).item(),
        rescalings=attended.rescalings,
    )


def over_seeds(found: Results, entry: Run, settings: Settings) -> Deviation:
    """Return the deviation over all seeds, or NaN in all fields if the backend refused.

    The maximum is the largest of all seeds, mean and rescalings are averaged, the others are root mean squares.
    """
    of_seeds = [found[dataclasses.replace(entry, seed=seed)].deviation for seed in range(settings.seeds)]
    each = [one for one in of_seeds if one is not None]
    if len(each) < len(of_seeds):
        return Deviation(*[math.nan] * len(dataclasses.fields(Deviation)))

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return Deviation(
        maximum=max(one.maximum for one in each),
        mean=mean([one.mean for one in each]),
        std=math.sqrt(mean([one.std**2 for one in each])),
        relative_l2=math.sqrt(mean([one.relative_l2**2 for one in each])),
        rescalings=mean([one.rescalings for one in each]),
    )


def shared_part(entry: Run) -> Run:
    """Return the run with all fields that do not affect inputs or golden output set to fixed values."""
    return dataclasses.replace(
        entry, algorithm="golden", rounded="", rows=0, columns=0, outer="queries", maximum_known=False
    )


@functools.lru_cache(maxsize=1)
def _with_golden(shared: Run, head_dim: int, tile: int, device: torch.device) -> tuple[Inputs, Tensor]:
    drawn = inputs_of(shared, head_dim, tile)
    inputs = Inputs(*(x.to(device) for x in (drawn.query, drawn.key, drawn.value)))
    return inputs, golden(inputs.query, inputs.key, inputs.value, shared.causal)


def inputs_of(shared: Run, head_dim: int, tile: int) -> Inputs:
    """Return a run's inputs.

    Args:
        shared: a run from ``shared_part``.
        tile: keys of a tile of the staircase, if there is one.
    """
    if shared.rises is None:
        return draw(shared.distribution, shared.seed, shared.queries, shared.keys, head_dim, shared.format)
    return staircase(shared.distribution, shared.seed, shared.keys, head_dim, shared.format, tile, shared.rises)


def _attended(entry: Run, inputs: Inputs, kernels: Kernels) -> Attended:
    tensors = (inputs.query, inputs.key, inputs.value)
    if entry.algorithm not in ALGORITHMS:
        dtype = KERNEL_DTYPES[entry.format]
        output = attend(entry.algorithm, inputs, dtype, entry.causal, kernels)
        return Attended(output.float(), torch.empty(0))
    if entry.algorithm == "baseline":
        return baseline(*tensors, steps_of(entry), entry.causal)
    cut = Tiles(entry.rows, entry.columns, entry.outer)
    return flash(*tensors, steps_of(entry), cut, entry.causal, entry.maximum_known)


def _forget_peak(kernels: Kernels) -> None:
    """Reset the peak of memory use, which an earlier study may have set. On the CPU this works only on Linux."""
    if kernels.backend == "gpu":
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the resident set's peak (proc(5))


def _peak_bytes(kernels: Kernels) -> int:
    if kernels.backend == "gpu":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# All runs, read from the record or computed.


RECORD = "flash_stability.jsonl"
FULL = Settings()
QUICK = Settings(
    length=512,
    lengths=(256, 1024, 4096),
    queries=256,
    whole_length=1024,
    tiles=(16, 64, 256),
    rises=(0, 1, 3, 7),
    seeds=1,
)


def measured(settings: Settings, folder: Path) -> tuple[Results, Settings, Kernels]:
    """Compute what is missing from the folder's record.

    Returns:
        The arguments of ``write``, except the folder.

    Raises:
        UserError: if a name is unknown, there are more rises than tiles allow, or the device is not available.
    """
    check(settings)
    kernels = kernels_on(settings.device)
    return results(settings, folder, kernels), settings, kernels


def results(settings: Settings, folder: Path, kernels: Kernels) -> Results:
    """Run what is missing from the folder's record, and return all results."""
    campaign: Campaign[Run, Result] = Campaign(
        folder / RECORD,
        Result,
        functools.partial(_identity, settings=settings, kernels=kernels),
        record.code_of(__name__),
    )
    # Runs that share a golden output follow each other, because only the last one is cached.
    ordered = sorted(runs(settings), key=lambda entry: (entry.keys * entry.queries, str(shared_part(entry))))
    with full_fp32_products():
        found = campaign.complete(ordered, lambda entry: result_of(entry, settings, kernels), "attending")
    return {entry: found[entry] for entry in runs(settings)}


def check(settings: Settings) -> None:
    """Check that names are known and that sizes fit.

    Raises:
        UserError: if not.
    """
    check_names("distributions", settings.distributions, DISTRIBUTIONS)
    check_names("formats", settings.formats, HARDWARE)
    check_names("format", (settings.format,), HARDWARE)
    tiles = math.ceil(settings.length / settings.tile)
    if max(settings.rises) >= tiles:
        raise UserError(f"rises: {settings.length} keys in tiles of {settings.tile} allow for {tiles - 1} at most")


def _identity(entry: Run, settings: Settings, kernels: Kernels) -> dict[str, Any]:
    """Return everything that a run's result depends on, which excludes the choice of other runs."""
    start = _fingerprint(dataclasses.replace(shared_part(entry), queries=1, keys=settings.tile, rises=None), settings)
    identity = dataclasses.asdict(entry) | {"head_dim": settings.head_dim, "start": start, "device": kernels.backend}
    if entry.rises is not None:
        identity["tile"] = settings.tile
    if entry.algorithm in ALGORITHMS:
        return identity
    return identity | {"torch": torch.__version__, "te": te.version()}


@functools.lru_cache(maxsize=1024)
def _fingerprint(shared: Run, settings: Settings) -> int:
    inputs = inputs_of(shared, settings.head_dim, settings.tile)
    return record.fingerprint([inputs.query, inputs.key, inputs.value])
