"""Cross entropy as TransformerEngine had it up to 2.18: the forward pass computes the gradient, too.

Stands in for the wrappers of ``transformer_engine/pytorch/triton/cross_entropy.py`` (2.14.1 to 2.18.0). Up to 2.16 the
gradient overwrites the logits, in their dtype, so that the backward pass rounds it again; 2.18 keeps it in FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.cpu.triton import cross_entropy as later

Forward = Callable[[Tensor, Tensor, float, bool, Any, int], tuple[Tensor, Tensor]]


def forward(gradient_in_fp32: bool) -> Forward:
    """``cross_entropy_forward`` of these versions.

    It takes the logits ``[batch, sequence, vocabulary]``, the target, the label smoothing, whether to average over the
    rows that count, the process group, and the target that is ignored. It returns the loss, as that of 2.19 does, and
    the gradient of the logits for a loss whose own gradient is 1.
    """

    @torch.no_grad()
    def cross_entropy_forward(
        _input: Tensor,
        target: Tensor,
        label_smoothing: float,
        reduce_loss: bool,
        dist_process_group: Any,
        ignore_idx: int,
    ) -> tuple[Tensor, Tensor]:
        logits = _input.contiguous()
        loss, _, stats, tokens, count, rank, ranks = later.cross_entropy_forward(
            logits, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx, True
        )
        grad = torch.empty_like(logits, dtype=torch.float32) if gradient_in_fp32 else logits
        rows, flat = grad.view(-1, grad.shape[-1]), tokens.view(-1)
        divisor = 1 if count is None else count
        rows.copy_(later.gradient_without_target(logits.view(rows.shape), stats, label_smoothing, ranks) / divisor)
        target_column = later.targets_here(flat, rows.shape[1], rank)
        rows[target_column] = (rows[target_column].float() - (1 - label_smoothing) / divisor).to(rows.dtype)
        rows.masked_fill_(flat[:, None] == ignore_idx, 0.0)
        return loss, grad

    return cross_entropy_forward


@torch.no_grad()
def cross_entropy_backward(grad_input: Tensor, grad_output: Tensor, is_cg_capturable: bool = False) -> Tensor:
    """Scale the gradient of the forward pass by that of the loss, in place."""
    rows = grad_input.view(-1, grad_input.shape[-1])
    rows.copy_(rows.float() * grad_output.reshape(-1, 1).float())
    return grad_input
