"""Convolutions whose patches lie side by side: ports compute them as linear layers.

The embedding of ViT's patches, and every convolution of one pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A linear layer's product, ``[rows, in]`` by ``[in, out]``, plus a bias ``[out]`` or None, as it is rounded."""


def are_patches(
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether a convolution with these arguments of ``aten.convolution`` reads each pixel once.

    Args:
        weight: ``[out, channels, *kernel]``.
        stride: as are the others, as ``aten.convolution`` takes it.
        padding: see ``stride``.
        dilation: see ``stride``.
        transposed: see ``stride``.
        output_padding: see ``stride``.
        groups: see ``stride``.
    """
    plain = not transposed and groups == 1 and not any(padding) and set(dilation) <= {1}
    return plain and tuple(weight.shape[2:]) == _of_all(stride, weight.dim() - 2)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, patches: Tensor, multiply: Multiply) -> Tensor:
    """The convolution's result, ``[batch, out, *spatial]``.

    Args:
        x: ``[batch, channels, *spatial]``.
        weight: ``[out, channels, *kernel]``.
        bias: ``[out]`` or None.
        patches: ``rows_of(x, kernel)``.
        multiply: how the product is rounded.
    """
    spatial = (size // width for size, width in zip(x.shape[2:], weight.shape[2:], strict=True))
    rows = multiply(patches, weight.flatten(1).t(), bias)
    return rows.reshape(x.shape[0], *spatial, len(weight)).movedim(-1, 1)


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, patches: Tensor, wanted: Sequence[bool], multiply: Multiply
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of ``x``, ``weight`` and a bias, each None where it is not wanted; arguments as ``forward``'s."""
    rows = gradient.movedim(1, -1).reshape(-1, gradient.shape[1])
    return (
        from_rows(multiply(rows, weight.flatten(1), None), x.shape, weight.shape[2:]) if wanted[0] else None,
        multiply(rows.t(), patches, None).view_as(weight) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def rows_of(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """``[batch, channels, *spatial]`` as ``[batch * patches, channels * kernel]``; what no patch holds is left out."""
    counts = [size // width for size, width in zip(x.shape[2:], kernel, strict=True)]
    for dim, (count, width) in enumerate(zip(counts, kernel, strict=True)):
        x = x.narrow(2 + dim, 0, count * width)
    rank = len(kernel)
    split = x.reshape(*x.shape[:2], *(size for pair in zip(counts, kernel, strict=True) for size in pair))
    patches, within = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    return split.permute(0, *patches, 1, *within).reshape(-1, x.shape[1] * math.prod(kernel))


def from_rows(rows: Tensor, shape: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """The reverse: zeros where no patch was."""
    batch, channels, *spatial = shape
    counts = [size // width for size, width in zip(spatial, kernel, strict=True)]
    rank = len(kernel)
    split = rows.reshape(batch, *counts, channels, *kernel)
    order = [0, 1 + rank, *(dim for i in range(rank) for dim in (1 + i, 2 + rank + i))]
    covered = split.permute(order).reshape(batch, channels, *(c * w for c, w in zip(counts, kernel, strict=True)))
    x = rows.new_zeros(*shape)
    part = x
    for dim, size in enumerate(covered.shape[2:], 2):
        part = part.narrow(dim, 0, size)
    part.copy_(covered)
    return x


def _of_all(values: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(values) * rank if len(values) == 1 else tuple(values)
