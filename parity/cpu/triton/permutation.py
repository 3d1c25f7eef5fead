"""Tokens to the rows of their experts and back by a mask, chunks in another order, zeros around scales, and the bias
gradients of several groups.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "compute_grouped_dbias",
    "compute_grouped_dbias_dscales",
    "make_chunk_sort_map",
    "make_row_id_map",
    "pad_columnwise_scale_inv",
    "permute_with_mask_map",
    "sort_chunks_by_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
]

# Tokens to the rows of their experts and back, by a mask; and chunks of rows in another order.
#
# Stands in for the wrappers of ``transformer_engine/pytorch/triton/permutation.py`` (2.14.1 to 2.20.2), whose kernels
# are Triton's (``common/triton/permutation.py``). ``row_id_map`` is int32 ``[tokens, 2 * experts + 1]``: for each token
# the rows of its n experts, highest first, from column 0; those experts, from column ``experts``; n in the last column.


@torch.no_grad()
def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """``row_id_map`` of a mask ``[num_tokens, num_experts]``; columns that stand for no row are -1.

    Rows are numbered expert by expert, within an expert token by token.
    """
    mask = routing_map.t().bool()
    rows = (mask.reshape(-1).cumsum(0) - 1).view(num_experts, num_tokens)
    rows, experts = rows.masked_fill(~mask, -1).t().sort(1, descending=True)
    routed = mask.sum(0)
    experts = experts.masked_fill(rows < 0, -1)
    return torch.cat([rows, experts, routed[:, None]], 1).int()


@torch.no_grad()
def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Copy each token, its scales and its probabilities to the rows of its experts.

    Args:
        inp: ``[num_tokens, hidden_size]``, any dtype.
        probs: ``[num_tokens, num_experts]``; where one is 0, the row becomes zeros.
        scale: ``[num_tokens, scale_hidden_dim]``.
        pad_offsets: int ``[num_experts]``: how many rows of zeros precede the rows of each expert.

    Returns:
        The rows ``[num_out_tokens, hidden_size]``, their scales, and their probabilities ``[num_out_tokens]``.
    """
    tokens, experts, rows = _routes(row_id_map, num_experts, pad_offsets)
    values = inp[tokens]
    permuted_scale = permuted_probs = None
    if probs is not None:
        chosen = probs[tokens, experts]
        permuted_probs = probs.new_zeros(num_out_tokens).index_copy_(0, rows, chosen)
        values.masked_fill_(chosen[:, None] == 0, 0)
    if scale is not None:
        permuted_scale = scale.new_zeros(num_out_tokens, scale.shape[1]).index_copy_(0, rows, scale[tokens])
    permuted = inp.new_zeros(num_out_tokens, hidden_size).index_copy_(0, rows, values)
    return permuted, permuted_scale, permuted_probs


@torch.no_grad()
def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Add up the rows of each token, in FP32, times ``merging_probs`` if there are any.

    Args:
        inp: ``[rows, hidden_size]``.
        merging_probs: ``[num_tokens, num_experts]``.
        permuted_probs: ``[rows]``, to be brought back as well.

    Returns:
        The tokens ``[num_tokens, hidden_size]`` in the dtype of ``inp``, and ``permuted_probs`` as
        ``[num_tokens, num_experts]``, 0 where a token has no row.
    """
    tokens, experts, rows = _routes(row_id_map, num_experts, pad_offsets)
    values = inp[rows].float()
    if merging_probs is not None:
        values *= merging_probs[tokens, experts, None].float()
    total = torch.zeros(num_tokens, hidden_size).index_add_(0, tokens, values)
    probs = None
    if permuted_probs is not None:
        probs = permuted_probs.new_zeros(num_tokens, num_experts)
        probs[tokens, experts] = permuted_probs[rows]
    return total.to(inp.dtype), probs


@torch.no_grad()
def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows ``[num_out_tokens, hidden_size]`` and of ``merging_probs``, computed in FP32.

    Args:
        fwd_output_grad: gradient of the tokens, ``[num_tokens, hidden_size]``.
        fwd_input: the rows of the forward pass.
    """
    tokens, experts, rows = _routes(row_id_map, num_experts, pad_offsets)
    grad = fwd_output_grad[tokens].float()
    weighted = (grad * merging_probs[tokens, experts, None].float()).to(fwd_output_grad.dtype)
    rows_grad = fwd_output_grad.new_zeros(num_out_tokens, hidden_size).index_copy_(0, rows, weighted)
    probs_grad = torch.zeros_like(merging_probs)
    probs_grad[tokens, experts] = (grad * fwd_input[rows].float()).sum(1).to(merging_probs.dtype)
    return rows_grad, probs_grad


@torch.no_grad()
def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Where each row goes, int32 ``[num_tokens]``, if the chunks are put in the order ``sorted_indices``.

    Args:
        split_sizes: rows of each chunk, int ``[num_splits]``. Rows beyond the last chunk stay where they are.
        sorted_indices: int ``[num_splits]``; chunk ``sorted_indices[i]`` comes i-th.
    """
    sizes, order = split_sizes.long(), sorted_indices.long()
    starts = torch.empty_like(sizes)
    starts[order] = sizes[order].cumsum(0) - sizes[order]
    shift = starts - (sizes.cumsum(0) - sizes)
    rows = torch.arange(num_tokens)
    in_chunks = rows[: int(sizes.sum())]
    in_chunks += shift.repeat_interleave(sizes)[: len(in_chunks)]
    return rows.int()


@torch.no_grad()
def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Move rows ``[num_tokens, hidden_size]`` and their probabilities by ``make_chunk_sort_map``'s map, or back."""
    to = row_id_map.long()
    source = torch.empty_like(to).index_copy_(0, to, torch.arange(num_tokens)) if is_forward else to
    return inp[source], None if probs is None else probs[source]


def _routes(row_id_map: Tensor, num_experts: int, pad_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The token, the expert and the row of each route, int64; a token's routes follow each other, highest row first."""
    tokens, column = torch.nonzero(torch.arange(num_experts) < row_id_map[:, 2 * num_experts, None], as_tuple=True)
    rows, experts = row_id_map[tokens, column].long(), row_id_map[tokens, num_experts + column].long()
    return tokens, experts, rows if pad_offsets is None else rows + pad_offsets.long()[experts]


# Zeros around the scales of columnwise data.
#
# Stands in for the wrapper of ``transformer_engine/pytorch/triton/pad.py`` (2.14.1 to 2.20.2), whose kernel is
# Triton's.


@torch.no_grad()
def pad_columnwise_scale_inv(inp: Tensor) -> Tensor:
    """Return a matrix with zeros below and to the right, up to multiples of 128 rows and 4 columns; any dtype."""
    rows, columns = inp.shape
    return pad(inp, (0, -columns % 4, 0, -rows % 128))


# Bias gradients of several groups of rows in one call.
#
# Stands in for the wrappers of ``transformer_engine/pytorch/triton/grouped_dbias_dscales.py`` (2.16.1 to 2.20.2), whose
# kernel is Triton's. All sums are FP32.


@torch.no_grad()
def compute_grouped_dbias(dy: Tensor, offsets: Tensor, num_groups: int, dbias: Tensor | None = None) -> Tensor:
    """Add the sum of each group's rows to ``dbias``.

    Args:
        dy: ``[rows, hidden]``; rows beyond the last group do not count.
        offsets: int64 ``[num_groups + 1]``, from 0: where the groups begin and end.
        dbias: FP32 ``[num_groups, hidden]``. Default: zeros.
    """
    if dbias is None:
        dbias = torch.zeros(num_groups, dy.shape[1])
    group = _groups(offsets)
    return dbias.index_add_(0, group, dy[: len(group)].float())


@torch.no_grad()
def compute_grouped_dbias_dscales(
    dy: Tensor,
    scales: Tensor,
    bias: Tensor,
    offsets: Tensor,
    dbias: Tensor | None = None,
    dscales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of a bias and of a scale, where each group's output is ``(product + bias) * scale``.

    Args:
        dy: ``[rows, hidden]``; rows beyond the last group do not count.
        scales: FP32 ``[rows]``.
        bias: ``[groups, hidden]``.
        offsets: int64 ``[groups + 1]``, from 0: where the groups begin and end.
        dbias: FP32 ``[groups, hidden]``. Default: zeros.
        dscales: FP32 ``[rows]``, what the product adds to it. Default: zeros.
    """
    if dbias is None:
        dbias = torch.zeros(bias.shape)
    if dscales is None:
        dscales = torch.zeros(len(dy))
    group = _groups(offsets)
    rows = dy[: len(group)].float()
    dbias.index_add_(0, group, rows * scales[: len(group), None])
    dscales[: len(group)] += (rows * bias[group].float()).sum(1)
    return dbias, dscales


def _groups(offsets: Tensor) -> Tensor:
    """Return the group of each row, int64."""
    return torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
