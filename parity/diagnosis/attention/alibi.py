"""Slopes of ALiBi, a bias that falls with the distance of a key, and which others a port has (arXiv 2108.12409)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_EXACT = 1e-3  # of a slope, by which a bias in a 16-bit dtype may deviate from it


def other_slopes(bias: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """What a port's slopes may be instead, each with the change from the reference's bias to that port's.

    Args:
        bias: ``[..., heads, queries, keys]`` without what hides keys; nothing is found if it is not ALiBi's.
    """
    slopes = _slopes(bias)
    if slopes is None:
        return
    heads = len(slopes)
    named = {
        "the paper's, which are its default": papers_slopes(heads),
        f"2^(-8 i / {heads})": 2.0 ** (-8.0 * torch.arange(1.0, heads + 1.0, dtype=torch.float64) / heads),
    }
    for described, others in named.items():
        ratio = others.to(slopes) / slopes
        if not torch.allclose(ratio, torch.ones_like(ratio), rtol=_EXACT):
            yield described, lambda shown, ratio=ratio: shown * ratio[:, None, None].to(shown)  # type: ignore[misc]


def papers_slopes(heads: int) -> Tensor:
    """``[heads]``, FP64: a geometric sequence for a power of 2, else every other one of a longer one besides."""
    power = 2 ** math.floor(math.log2(heads))
    first = 2.0 ** (-8.0 * torch.arange(1.0, power + 1.0, dtype=torch.float64) / power)
    between = 2.0 ** (-4.0 * (2.0 * torch.arange(heads - power, dtype=torch.float64) + 1.0) / power)
    return torch.cat((first, between))


def _slopes(bias: Tensor) -> Tensor | None:
    """``[heads]``, FP64: by how much each head's bias rises from one key to the next, for every query alike."""
    if bias.dim() < 3 or bias.shape[-3] < 2 or bias.shape[-1] < 3:
        return None
    last = bias[(0,) * (bias.dim() - 3)][:, -1].double()  # the last query sees the nearest keys in any mask
    steps = last[:, 1:] - last[:, :-1]
    slopes = steps[:, :1]
    if bool((slopes <= 0.0).any()) or not bool(((steps - slopes).abs() <= _EXACT * slopes).all()):
        return None
    return slopes.squeeze(-1)
