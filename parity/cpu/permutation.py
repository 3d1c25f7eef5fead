"""Tokens to the rows of their experts and back by a map of expert indices, and rows of zeros between the experts.

Follows ``csrc/extensions/permutation.cpp`` and ``padding.cpp`` of TransformerEngine 2.20.2, and the kernels of
``common/permutation`` and ``common/util/padding.cu``. The permuted rows are sorted by expert; rows of one
expert keep the order of their tokens. ``row_id_map`` is int32 ``[top_k * tokens]``, the k-th choice of token t at
``k * tokens + t``: the row that holds it, or -1 if it was dropped. Maps from masks are TE's Triton kernels', see
``triton.py``.

The kernels compute in the dtype of the rows (``TCompute`` in ``permutation.cu``): probabilities are rounded to it, and
so are every product and every partial sum. Where a product is added to a sum, nvcc contracts the two into a fused
multiply-add, which rounds once: CUDA's ``*`` and ``+`` of half precision allow that (CUDA Math API, ``__hmul_rn``), and
the kernels of TransformerEngine's wheel do it on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "moe_permute_bwd",
    "moe_permute_fwd",
    "moe_unpermute_bwd",
    "moe_unpermute_fwd",
]

_LANES = 32


@torch.no_grad()
def moe_permute_fwd(
    input: Tensor,
    dtype: int,
    indices: Tensor,
    num_out_tokens: int,
    workspace: list[Tensor],
    max_expanded_token_num: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Copy each token to one row for each of its experts.

    Args:
        input: ``[tokens, hidden]``, any dtype.
        indices: the experts of each token, int32 ``[tokens, top_k]``; negative ones come first.
        num_out_tokens: rows to keep, the last experts' are dropped; 0 or less keeps ``tokens * top_k``.

    Returns:
        The rows ``[num_out_tokens, hidden]``, ``row_id_map``, and the workspace, which sorting needs on a GPU only.
    """
    tokens, top_k = indices.shape
    rows = num_out_tokens if num_out_tokens > 0 else tokens * top_k
    choices = torch.argsort(indices.reshape(-1), stable=True)
    kept = choices[:rows]
    row_of_choice = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    row_of_choice[kept] = torch.arange(len(kept), dtype=torch.int32)
    permuted = input.new_zeros(rows, input.shape[1])
    permuted[: len(kept)] = input[kept // top_k]
    return permuted, row_of_choice.view(tokens, top_k).t().reshape(-1), workspace


@torch.no_grad()
def moe_unpermute_fwd(
    input: Tensor, dtype: int, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int
) -> Tensor:
    """Add up the rows of each token, times their probabilities, in their dtype and in the order of its choices.

    Args:
        input: ``[rows, hidden]``.
        prob: ``[num_tokens, topK]``, or empty: all are 1.

    Returns:
        ``[num_tokens, hidden]``, in the dtype of ``input``; zeros for a token that was dropped.
    """
    total = input.new_zeros(num_tokens, input.shape[1])
    for k, rows in enumerate(row_id_map.view(topK, num_tokens)):
        choice = _rows(input, rows)
        total = _multiply_add(choice, prob[:, k, None].to(input.dtype), total) if prob.numel() else total + choice
    return total


def moe_permute_bwd(input: Tensor, dtype: int, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int) -> Tensor:
    """Return the gradient of the tokens from that of their rows; as ``moe_unpermute_fwd``."""
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


@torch.no_grad()
def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: int, row_id_map: Tensor, prob: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the probabilities.

    Args:
        input_bwd: gradient of the tokens, ``[tokens, hidden]``.
        input_fwd: the rows of the forward pass, ``[rows, hidden]``.
        prob: ``[tokens, top_k]``, or empty: then top_k is 1 and there is one row a token.

    Returns:
        The gradient of the rows, in the dtype of ``input_bwd``; that of the probabilities, FP32 ``[tokens, top_k]``.
    """
    tokens, top_k = prob.shape if prob.numel() else (len(row_id_map), 1)
    rows_grad = torch.zeros(len(input_fwd), input_bwd.shape[1], dtype=input_bwd.dtype)
    prob_grad = torch.zeros(tokens, top_k)
    for k, rows in enumerate(row_id_map.view(top_k, tokens)):
        kept = rows >= 0
        weighted = input_bwd * prob[:, k, None].to(input_bwd.dtype) if prob.numel() else input_bwd
        rows_grad[rows[kept].long()] = weighted[kept]
        if prob.numel():
            prob_grad[:, k] = _inner_products(input_bwd, _rows(input_fwd, rows))
    return rows_grad, prob_grad


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the FP32 inner product of each pair of rows, in the order of a warp.

    A lane adds up what it loads, 16 bytes of each row at a time; then the sums of lanes that differ by 16 are added, by
    8, and so on. A product is rounded to the dtype of the rows first; in FP32 it is not rounded at all.
    """
    of_a_load = 16 // left.element_size()
    lanes = torch.zeros(len(left), _LANES)
    for loads in zip(*(rows.split(_LANES * of_a_load, 1) for rows in (left, right)), strict=True):
        for a, b in zip(*(rows.unflatten(1, (-1, of_a_load)).unbind(2) for rows in loads), strict=True):
            total = lanes[:, : a.shape[1]]
            total.copy_(_multiply_add(a, b, total) if a.dtype is torch.float32 else total + a * b)
    while lanes.shape[1] > 1:
        lanes = lanes.unflatten(1, (2, -1)).sum(1)
    return lanes[:, 0]


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``a * b + c``, rounded once: FP64 holds the product, and rounds the sum finely enough to not be seen."""
    return torch.addcmul(c.double(), a.double(), b.double()).to(a.dtype)


def _rows(input: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of ``input`` with these numbers; zeros for -1."""
    return input[rows.clamp(min=0).long()].masked_fill_(rows[:, None] < 0, 0)


# Padding gives each part a number of rows that fits an FP8 product.


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
    """Return each part of the input that has rows, and its place in the output."""
    if len(input_rows) != len(output_rows):
        raise ValueError(f"padding got {len(input_rows)} parts of the input but {len(output_rows)} of the output")
    if input.dim() != 2 or output.dim() != 2:
        raise ValueError(f"padding works on matrices, got shapes {tuple(input.shape)} and {tuple(output.shape)}")
    sources = input[: sum(input_rows)].split(list(input_rows))
    places = output[: sum(output_rows)].split(list(output_rows))
    return ((source, place) for source, place in zip(sources, places, strict=True) if len(source))
