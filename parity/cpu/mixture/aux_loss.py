"""The loss that keeps a mixture's experts evenly busy.

Follows ``csrc/extensions/router.cpp`` of TransformerEngine 2.20.2 and ``common/fused_router/fused_moe_aux_loss.cu``:
``experts * coeff / (topk * tokens**2) * sum over experts of (tokens of the expert * sum of its probabilities)``, the
auxiliary loss of Switch Transformers (arXiv 2101.03961, equation 4). All arithmetic is FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fused_moe_aux_loss_bwd", "fused_moe_aux_loss_fwd", "fused_moe_aux_loss_fwd_graph_safe"]


@torch.no_grad()
def fused_moe_aux_loss_fwd(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """The loss, a scalar in the dtype of ``probs``, and what the backward pass needs.

    Args:
        probs: ``[num_rows, num_cols]``, a column an expert; sequences may lie side by side, so ``num_cols`` is a
            multiple of ``num_experts``.
        tokens_per_expert: ``[num_cols]``, any dtype.

    Returns:
        The loss; FP32 ``[2]``: the factor of the sum, and the loss before it was rounded.

    Raises:
        ValueError: if ``topk`` is not positive or the columns do not fit the experts.
    """
    if topk <= 0 or num_experts <= 0 or num_cols % num_experts:
        raise ValueError(f"aux loss: {num_cols} columns, {num_experts} experts and topk {topk} do not fit each other")
    of_expert = probs.sum(0, dtype=torch.float32) * tokens_per_expert.float()
    # Step by step as in TE: in FP32, the order of the divisions decides the last bit.
    factor = torch.tensor(coeff, dtype=torch.float32) * num_experts / topk / total_num_tokens / total_num_tokens
    loss = of_expert.sum() * factor
    return loss.to(probs.dtype), torch.stack([factor, loss])


def fused_moe_aux_loss_fwd_graph_safe(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """As ``fused_moe_aux_loss_fwd``, with the number of tokens in an int64 tensor of one element."""
    return fused_moe_aux_loss_fwd(
        probs, tokens_per_expert, int(total_num_tokens), num_experts, num_rows, num_cols, topk, coeff
    )


@torch.no_grad()
def fused_moe_aux_loss_bwd(
    Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int, num_cols: int, grad_aux_loss: Tensor
) -> Tensor:
    """The gradient of ``probs``, ``[num_rows, num_cols]``, in the dtype of the loss's gradient."""
    of_expert = Const_buf[0] * tokens_per_expert.float() * grad_aux_loss.float()
    return of_expert.to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()
