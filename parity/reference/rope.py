"""Rotary position embedding (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates queries or keys by their positions, in the halves form of Hugging Face's models.

    Args:
        head_dim: width of a head, even.
        base: the wavelengths grow from 2 pi to 2 pi times this.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", 1.0 / base**exponents, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, heads, head_dim]``, positions counted from 0, to the same shape."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=self.inv_freq.dtype)
        return rotate_halves(x, positions[:, None] * self.inv_freq)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate element i together with element i + head_dim/2.

    Args:
        x: ``[batch, seq, heads, head_dim]``.
        angles: ``[seq, head_dim / 2]``, in radians.
    """
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def rotate_interleaved(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate element 2i together with element 2i + 1, the form of Meta's Llama; arguments as for ``rotate_halves``."""
    angles = angles.repeat_interleave(2, dim=-1)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return x * angles.cos() + torch.stack((-odd, even), dim=-1).flatten(-2) * angles.sin()
