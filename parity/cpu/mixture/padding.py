"""Rows of zeros between the parts of a batch, so that each part's number of rows fits an FP8 product.

Follows ``csrc/extensions/padding.cpp`` of TransformerEngine 2.20.2 and ``common/util/padding.cu``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["fused_multi_row_padding", "fused_multi_row_unpadding"]


@torch.no_grad()
def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copy each part of ``input`` to its place in ``output``, followed by rows of zeros.

    A part without rows is left out, padding included: its place in ``output`` stays as it is.

    Args:
        input: ``[sum of input_row_list, columns]``, any dtype.
        output: ``[sum of padded_input_row_list, columns]``, of the same dtype.
        input_row_list: the rows of each part.
        padded_input_row_list: the rows of each part in ``output``, at least as many.

    Raises:
        ValueError: if the lists differ in length or a tensor is no matrix.
    """
    for source, padded in _parts(input, output, input_row_list, padded_input_row_list):
        padded[: len(source)] = source
        padded[len(source) :] = 0


@torch.no_grad()
def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Copy the leading rows of each part of ``input`` to ``output``: the inverse of ``fused_multi_row_padding``.

    Args:
        input: ``[sum of input_row_list, columns]``, any dtype.
        output: ``[sum of unpadded_input_row_list, columns]``, of the same dtype.
        input_row_list: the rows of each part, padding included.
        unpadded_input_row_list: the rows of each part without it.

    Raises:
        ValueError: if the lists differ in length or a tensor is no matrix.
    """
    for source, unpadded in _parts(input, output, input_row_list, unpadded_input_row_list):
        unpadded.copy_(source[: len(unpadded)])


def _parts(
    input: Tensor, output: Tensor, input_rows: Sequence[int], output_rows: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part of the input that has rows, and its place in the output."""
    if len(input_rows) != len(output_rows):
        raise ValueError(f"padding got {len(input_rows)} parts of the input but {len(output_rows)} of the output")
    if input.dim() != 2 or output.dim() != 2:
        raise ValueError(f"padding works on matrices, got shapes {tuple(input.shape)} and {tuple(output.shape)}")
    sources = input[: sum(input_rows)].split(list(input_rows))
    places = output[: sum(output_rows)].split(list(output_rows))
    return ((source, place) for source, place in zip(sources, places, strict=True) if len(source))
