"""How far one attention of the study ``flash_stability`` deviates from FP64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parity.lab import record
from parity.lab.studies.flash_stability import backends, inputs
from parity.lab.studies.flash_stability.backends import BackendRefused
from parity.lab.studies.flash_stability.inputs import Inputs
from parity.lab.studies.flash_stability.sweeps import KERNEL_DTYPES, Run, Settings, steps_of
from parity.lab.studies.stepwise import ALGORITHMS, Attended, Tiles, baseline, flash, golden
from parity.te import Kernels


@dataclass(frozen=True)
class Deviation:
    """The difference from FP64 over all outputs of a run.

    Attributes:
        maximum: of its magnitude; infinite if an output is not finite.
        mean: of its magnitude.
        std: its standard deviation.
        relative_l2: its Euclidean norm over that of the golden output.
        rescalings: how often a query's maximum rose after its first tile, in the mean.
    """

    maximum: float
    mean: float
    std: float
    relative_l2: float
    rescalings: float


@dataclass(frozen=True)
class Result:
    """What the record holds of a run.

    Attributes:
        deviation: None where the backend refused.
        refusal: of the backend, in its library's words.
        peak_bytes: the most memory that this process used during the run and its golden output: all of it on the CPU,
            PyTorch's libraries included; tensors on a GPU.
        outputs: checksum of the outputs, which are equal bit for bit where it is.
    """

    deviation: Deviation | None
    refusal: str
    peak_bytes: int
    outputs: int


Results = Mapping[Run, Result]


def result_of(entry: Run, settings: Settings, kernels: Kernels) -> Result:
    """Attend once, and compare with FP64."""
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
    """How far an output is from the golden one."""
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
    """A run's deviation over all seeds: the largest maximum, the mean mean, the others in the mean square.

    NaN where a backend refused.
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
    """The fields of a run that its inputs and golden output depend on; the others as in every run."""
    return dataclasses.replace(
        entry, algorithm="golden", rounded="", rows=0, columns=0, outer="queries", maximum_known=False
    )


@functools.lru_cache(maxsize=1)
def _with_golden(shared: Run, head_dim: int, tile: int, device: torch.device) -> tuple[Inputs, Tensor]:
    drawn = inputs_of(shared, head_dim, tile)
    inputs = Inputs(*(x.to(device) for x in (drawn.query, drawn.key, drawn.value)))
    return inputs, golden(inputs.query, inputs.key, inputs.value, shared.causal)


def inputs_of(shared: Run, head_dim: int, tile: int) -> Inputs:
    """What a run reads.

    Args:
        shared: of ``shared_part``.
        tile: keys of a tile of the staircase, if there is one.
    """
    if shared.rises is None:
        return inputs.draw(shared.distribution, shared.seed, shared.queries, shared.keys, head_dim, shared.format)
    return inputs.staircase(shared.distribution, shared.seed, shared.keys, head_dim, shared.format, tile, shared.rises)


def _attended(entry: Run, inputs: Inputs, kernels: Kernels) -> Attended:
    tensors = (inputs.query, inputs.key, inputs.value)
    if entry.algorithm not in ALGORITHMS:
        dtype = KERNEL_DTYPES[entry.format]
        output = backends.attend(entry.algorithm, inputs, dtype, entry.causal, kernels)
        return Attended(output.float(), torch.empty(0))
    if entry.algorithm == "baseline":
        return baseline(*tensors, steps_of(entry), entry.causal)
    cut = Tiles(entry.rows, entry.columns, entry.outer)
    return flash(*tensors, steps_of(entry), cut, entry.causal, entry.maximum_known)


def _forget_peak(kernels: Kernels) -> None:
    """Begin to watch memory anew, or the peak of an earlier study counts; elsewhere than on Linux it does."""
    if kernels.backend == "gpu":
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the resident set's peak (proc(5))


def _peak_bytes(kernels: Kernels) -> int:
    if kernels.backend == "gpu":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
