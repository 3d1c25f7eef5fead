"""How strong a bug is against the rounding noise that hides it.

The *noise* is the right candidate at the judged precision minus the golden value. A bug's *effect* on a tensor is the
candidate with the bug minus the candidate without, on the same weights and inputs, both in FP32: without TF32 on CPU
kernels; on a GPU, where TE always takes TF32, what that rounds differently is taken for effect.

* ``norm_ratio``: the norm of the effect over that of the noise. A rule that compares norms needs about 1.
* ``coefficient``: the noise regressed on the effect, ``<noise, effect> / <effect, effect>``: what a matched filter
  reads where no bug is, and 1 more where it is. Its root mean square over seeds is the scatter of the filter, and
  one over that its signal to noise ratio. No formula for white noise comes in.

A bug that FP32 cannot have, such as a stale FP8 scale, is itself a rounding: it has no effect that a filter could know.
Its ``norm_ratio`` is what it adds to the noise or takes away, in squares: the root of
``|(|error with it| / |noise|)^2 - 1|``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Fewer seeds do not tell how a filter scatters.
LEAST_SEEDS = 3


@dataclass(frozen=True)
class Signal:
    """Of a bug in one tensor at one seed.

    Attributes:
        norm_ratio: ``|effect| / |noise|``; infinite without noise.
        coefficient: ``<noise, effect> / |effect|^2``; NaN without effect, and for a bug that FP32 cannot have.
    """

    norm_ratio: float
    coefficient: float


def measure(effect: Tensor, noise: Tensor) -> Signal:
    """Both tensors of one shape, finite."""
    effect, noise = effect.double().flatten(), noise.double().flatten()
    effect_norm, noise_norm = (torch.linalg.vector_norm(x).item() for x in (effect, noise))
    if effect_norm == 0.0:
        return Signal(0.0, math.nan)
    ratio = effect_norm / noise_norm if noise_norm else math.inf
    return Signal(ratio, torch.dot(noise, effect).item() / effect_norm**2)


def measure_added(error: Tensor, noise: Tensor) -> Signal:
    """Of a bug that FP32 cannot have.

    Args:
        error: the candidate with the bug minus the golden value, finite.
        noise: the candidate without minus the golden value, of the same shape.
    """
    error_norm, noise_norm = (torch.linalg.vector_norm(x.double()).item() for x in (error, noise))
    if noise_norm == 0.0:
        return Signal(math.inf if error_norm else 0.0, math.nan)
    return Signal(math.sqrt(abs((error_norm / noise_norm) ** 2 - 1.0)), math.nan)


def filter_ratio(coefficients: Sequence[float]) -> float:
    """The matched filter's signal to noise ratio from its readings without the bug; NaN for too few seeds."""
    finite = [coefficient for coefficient in coefficients if math.isfinite(coefficient)]
    if len(finite) < LEAST_SEEDS:
        return math.nan
    scatter = math.sqrt(sum(coefficient**2 for coefficient in finite) / len(finite))
    return 1.0 / scatter if scatter else math.inf
