"""Distributions of values that quantization treats differently, by name: each draws FP32 tensors of any shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from parity.inputs import Rng

Draw = Callable[..., Tensor]


def normal(rng: Rng, *shape: int) -> Tensor:
    """N(0, 1)."""
    return rng.normal(*shape)


def heavy_tailed(rng: Rng, *shape: int) -> Tensor:
    """Student's t with three degrees of freedom, whose fourth moment is infinite: larger draws have larger amaxes."""
    chi_squared = rng.normal(3, *shape).square().sum(0)
    return rng.normal(*shape) / (chi_squared / 3).sqrt()


def outliers(rng: Rng, *shape: int) -> Tensor:
    """N(0, 1) + N(0, 100) Bernoulli(0.001), which FlashAttention-3 tests with (arXiv 2407.08608, section 4.3)."""
    return rng.normal(*shape) + rng.normal(*shape, std=10.0) * (rng.uniform(*shape) < 0.001)


DISTRIBUTIONS: Mapping[str, Draw] = {"normal": normal, "heavy_tailed": heavy_tailed, "outliers": outliers}
