"""Seeded random inputs, the same on every device and for every precision."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Rng:
    """A stream of random tensors, drawn on the CPU in FP32.

    Args:
        seed: of the run.
        purpose: streams of one seed with different purposes are independent.
    """

    def __init__(self, seed: int, purpose: str = "inputs") -> None:
        # The CPU's generator takes 32 bits of a seed and drops the rest: mix seed and purpose into those.
        digest = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=4).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        """Gaussian values of the given shape."""
        drawn = torch.empty(shape, dtype=torch.float32).normal_(generator=self._generator)  # ``draws`` sees the method
        return drawn if (std, mean) == (1.0, 0.0) else drawn * std + mean  # a step takes long where nothing is drawn

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Values evenly spread over [low, high)."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float32) * (high - low) + low

    def integers(self, *shape: int, low: int = 0, high: int) -> Tensor:
        """Int64 values from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._generator)

    def permutation(self, n: int) -> Tensor:
        """The numbers from 0 to n - 1 in random order, int64."""
        return torch.randperm(n, generator=self._generator)
