"""Tokens to the rows of their experts and back, by a map of expert indices.

Follows ``csrc/extensions/permutation.cpp`` of TransformerEngine 2.20.2 and ``common/permutation/permutation.cu``. The
permuted rows are sorted by expert; rows of one expert keep the order of their tokens. ``row_id_map`` is int32
``[top_k * tokens]``, the k-th choice of token t at ``k * tokens + t``: the row that holds it, or -1 if it was dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["moe_permute_bwd", "moe_permute_fwd", "moe_unpermute_bwd", "moe_unpermute_fwd"]


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
    """Add up the rows of each token, times their probabilities, in FP32 and in the order of its choices.

    Args:
        input: ``[rows, hidden]``.
        prob: ``[num_tokens, topK]``, or empty: all are 1.

    Returns:
        ``[num_tokens, hidden]``, in the dtype of ``input``; zeros for a token that was dropped.
    """
    total = torch.zeros(num_tokens, input.shape[1])
    for k, rows in enumerate(row_id_map.view(topK, num_tokens)):
        choice = _rows(input, rows).float()
        total += choice * prob[:, k, None].float() if prob.numel() else choice
    return total.to(input.dtype)


def moe_permute_bwd(input: Tensor, dtype: int, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int) -> Tensor:
    """The gradient of the tokens from that of their rows; as ``moe_unpermute_fwd``."""
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


@torch.no_grad()
def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: int, row_id_map: Tensor, prob: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the probabilities.

    Args:
        input_bwd: gradient of the tokens, ``[tokens, hidden]``.
        input_fwd: the rows of the forward pass, ``[rows, hidden]``.
        prob: ``[tokens, top_k]``, or empty: then top_k is 1 and there is one row a token.

    Returns:
        The gradient of the rows, in the dtype of ``input_bwd``; that of the probabilities, FP32 ``[tokens, top_k]``.
    """
    tokens, top_k = prob.shape if prob.numel() else (len(row_id_map), 1)
    grad = input_bwd.float()
    rows_grad = torch.zeros(len(input_fwd), input_bwd.shape[1], dtype=input_bwd.dtype)
    prob_grad = torch.zeros(tokens, top_k)
    for k, rows in enumerate(row_id_map.view(top_k, tokens)):
        kept = rows >= 0
        weighted = grad * prob[:, k, None].float() if prob.numel() else grad
        rows_grad[rows[kept].long()] = weighted[kept].to(input_bwd.dtype)
        if prob.numel():
            prob_grad[:, k] = (grad * _rows(input_fwd, rows).float()).sum(1)
    return rows_grad, prob_grad


def _rows(input: Tensor, rows: Tensor) -> Tensor:
    """The rows of ``input`` with these numbers; zeros for -1."""
    return input[rows.clamp(min=0).long()].masked_fill_(rows[:, None] < 0, 0)
