"""Numbers that models and trainings usually have, read from ``usual_numbers.toml``, which says whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from parity.data_files import read_toml

Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Numbers = Annotated[tuple[Positive, ...], Field(min_length=1)]
Counts = Annotated[tuple[Annotated[int, Field(strict=True, gt=0)], ...], Field(min_length=1)]
Ids = Annotated[tuple[Annotated[int, Field(strict=True, ge=0)], ...], Field(min_length=1)]


@dataclass(frozen=True)
class UsualNumbers:
    """The numbers of the file, the likeliest of each kind first."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    norm_eps: Numbers
    large_norm_eps: Numbers
    norm_groups: Counts
    rope_bases: Numbers
    grid_rope_bases: Numbers
    rope_shares: Numbers
    llama3_lengths: Numbers
    yarn_lengths: Numbers
    llama3_factors: Numbers
    yarn_factors: Numbers
    interpolation_factors: Numbers
    head_dims: Counts
    softcaps: Numbers
    bucket_distances: Counts
    cache_lengths: Counts
    special_tokens: Counts
    gate_limits: Numbers
    leaky_slope: Positive
    label_smoothings: Numbers
    z_losses: Numbers
    temperatures: Numbers
    pad_ids: Ids
    weight_decays: Numbers
    momenta: Numbers
    rare_betas: Numbers
    beta_pairs: tuple[tuple[Positive, Positive], ...]
    optimizer_eps: Numbers
    rare_optimizer_eps: Numbers
    additions: Counts


USUAL = read_toml(Path(__file__).with_suffix(".toml"), UsualNumbers)
