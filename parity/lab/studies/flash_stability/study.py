"""Is flash attention stable? How far baseline and flash attention deviate from FP64, and which rounding does it.

After Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803): both algorithms are re-implemented with a number
format for each intermediate result (``stepwise_attention``) and compared with attention in FP64 on the same inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from parity import te
from parity.lab import record
from parity.lab.studies.flash_stability.deviation import Deviation, Result, Results, inputs_of, result_of, shared_part
from parity.lab.studies.flash_stability.inputs import DISTRIBUTIONS
from parity.lab.studies.flash_stability.sweeps import Run, Settings, runs
from parity.lab.studies.settings import check_names, kernels_on
from parity.lab.studies.stepwise import ALGORITHMS, HARDWARE, full_fp32_products
from parity.te import Kernels
from parity.user_error import UserError

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
    """Compute what the folder's record lacks.

    Returns:
        What ``report.write`` is given, but for the folder.

    Raises:
        UserError: for a name that there is not, more rises than tiles allow, or a device that cannot be had.
    """
    check(settings)
    kernels = kernels_on(settings.device)
    compute_missing(settings, folder, kernels)
    recorded = record.recorded(
        folder / RECORD, runs(settings), functools.partial(_identity, settings=settings, kernels=kernels)
    )
    found = {entry: _from_json(result) for entry, result in recorded.items()}
    return found, settings, kernels


def compute_missing(settings: Settings, folder: Path, kernels: Kernels) -> None:
    """Make the runs that the folder's record lacks, and append each when it is finished."""

    def attend(entry: Run) -> Any:
        with full_fp32_products():
            return dataclasses.asdict(result_of(entry, settings, kernels))

    # Runs that share a golden output follow each other, since only the last is kept.
    ordered = sorted(runs(settings), key=lambda entry: (entry.keys * entry.queries, str(shared_part(entry))))
    record.make_missing(
        folder / RECORD,
        ordered,
        functools.partial(_identity, settings=settings, kernels=kernels),
        attend,
        "attending",
        record.code_of(__name__),
    )


def check(settings: Settings) -> None:
    """Whether all names are known and all sizes fit.

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
    """All that a run's result depends on; not which other runs there are."""
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


def _from_json(recorded: Mapping[str, Any]) -> Result:
    found = recorded["deviation"]
    return Result(**{**recorded, "deviation": None if found is None else Deviation(**found)})
