"""Inputs that expose the mistakes which Gaussian ones hide.

Gaussian rows all have about the same variance, far above any eps, a mean near zero, and no outlier. A probe is the
drawn inputs with other rows: of every magnitude from 1e-5 up, so that each eps shows in some of them; a third of them
far from zero, where a mean that is not subtracted shows, and statistics in low precision; a third with a single value,
where clamps, quantization and the tails of activations show.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parity.errors import all_finite
from parity.inputs import Rng

SMALLEST, LARGEST = 1e-5, 4.0
# Of a shifted row, in standard deviations.
_OFFSET = 4.0


def probe(inputs: Any, rng: Rng) -> Any:
    """The inputs with uneven rows.

    Args:
        inputs: as a pair's ``inputs`` returns them; floating-point tensors of two or more dimensions whose elements are
            all finite change, anything else stays. So does a row that holds one number throughout, as of padding,
            but where it becomes a single value: far from zero, a norm of it would compute what rounding left, see
            ``parity.judging.conditioning``.
        rng: which row becomes what.
    """
    return tree_map_only(Tensor, lambda x: _uneven(x, rng) if _is_activation(x) else x, inputs)


def _is_activation(x: Tensor) -> bool:
    is_matrix = x.is_floating_point() and x.dim() > 1 and x.numel() > 0
    return is_matrix and all_finite(x) and bool(_varies(x).any())


def _varies(rows: Tensor) -> Tensor:
    """Whether each row holds more than one number; all are finite."""
    return rows.amin(-1) != rows.amax(-1)


def _uneven(x: Tensor, rng: Rng) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).clone()
    count, width = rows.shape
    rms = rows.square().mean().sqrt()
    constant = ~_varies(rows)
    order = rng.permutation(count)
    shifted, single = order[1::3].to(x.device), order[2::3].to(x.device)
    constant[single] = False
    shifted = shifted[~constant[shifted]]
    rows[shifted] += _OFFSET * rms
    positions = rng.integers(len(single), high=width).to(x.device)
    rows[single] = 0.0
    rows[single, positions] = rms * width**0.5
    magnitudes = torch.logspace(math.log10(SMALLEST), math.log10(LARGEST), count)
    factors = magnitudes[rng.permutation(count)].to(x.device, x.dtype)
    rows *= factors.masked_fill(constant, 1.0)[:, None]
    return rows.reshape(x.shape)
