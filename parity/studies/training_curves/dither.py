"""Other realisations of a rounding model: errors of the same size, with other signs and elsewhere on the grid.

A faithful port rounds what the model rounds, but not to the same neighbour each time: its scales, the order of its
sums and the places of its roundings differ a little. Subtractive dither makes such errors: ``round(x + d) - d``, with
d up to half the distance between neighbours, errs as ``round(x)`` does, independently of it (L. Schuchman, "Dither
signals and their effect on quantization noise", IEEE Trans. Commun. Technol. 12(4), 1964). A realisation has one d
for each place in a tensor of each shape, so a weight that does not change is rounded alike in each step, as by any
rounding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.formats import Format
from parity.rounding.parts import Rounding

_EXPONENT_FIELD = 0x7F800000


@dataclass(frozen=True)
class DitheredRounding(Rounding):
    """A realisation of a rounding model.

    Attributes:
        seed: of the realisation.
    """

    seed: int = 0

    def store(self, x: Tensor) -> Tensor:
        """``x`` as it reads after a dithered rounding to the dtype of storage; in that dtype already, as it is."""
        if x.dtype == self.storage:
            return x
        dither = _dither(x, torch.finfo(self.storage).eps / 2, self.seed)
        return (x + dither).to(self.storage).to(x.dtype) - dither


def dithered(rounding: Rounding, seed: int) -> DitheredRounding:
    """A realisation of the model; the same seed gives the same one."""
    return DitheredRounding(
        storage=rounding.storage,
        inputs=_dithered_format(rounding.inputs, seed),
        weights=_dithered_format(rounding.weights, seed),
        gradients=_dithered_format(rounding.gradients, seed),
        rotate_wgrad=rounding.rotate_wgrad,
        parts=rounding.parts,
        seed=seed,
    )


def unit_roundoff(to_format: Format) -> float:
    """The largest relative error of a format's values between two powers of two, not the largest in their blocks."""
    values = torch.linspace(1.0, 2.0, 128 * 128).view(128, 128)
    values[:, ::16] = 6.0
    return ((to_format(values, 1) - values) / values).abs().max().item()


def _dithered_format(to_format: Format | None, seed: int) -> Format | None:
    if to_format is None:
        return None
    half_distance = unit_roundoff(to_format)

    def dithered_format(x: Tensor, dim: int = -1, amax: Tensor | None = None) -> Tensor:
        dither = _dither(x, half_distance, seed)
        return to_format(x + dither, dim) - dither

    return dithered_format


def _dither(x: Tensor, half_distance: float, seed: int) -> Tensor:
    """Up to ``half_distance`` times the power of two below each value, FP32, either sign."""
    powers = (x.contiguous().view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)
    return powers * _pattern(tuple(x.shape), seed) * half_distance


@functools.lru_cache(maxsize=128)
def _pattern(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers between -1 and 1, the same for all tensors of a shape in a realisation."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
