"""The batched products of TE's unfused attention, whose Python calls ``torch.baddbmm`` and ``torch.bmm``.

They are PyTorch's. Under the kernel choice ``attention-16-bit-sums`` those of FP16 and BF16, and the products of their
gradients, split K and add the parts in that dtype, as cuBLAS may on a GPU, where PyTorch's
``allow_fp16_reduced_precision_reduction`` and its like for BF16 are True unless set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.cpu import kernel_choices
from parity.cpu.products import split_k


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """``torch.baddbmm``: ``beta * input + alpha * batch1 @ batch2``; parts are added as said above if ``beta`` is 0."""
    if beta == 0.0 and _splits(batch1):
        return _SplitProduct.apply(batch1, batch2, alpha)
    return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """``torch.bmm``: ``input @ mat2``, ``[batch, n, m]`` of ``[batch, n, k]`` and ``[batch, k, m]``."""
    return _SplitProduct.apply(input, mat2, 1.0) if _splits(input) else torch.bmm(input, mat2)


def _splits(operand: Tensor) -> bool:
    return operand.dtype in split_k.SIXTEEN_BIT and kernel_choices.ATTENTION_16_BIT_SUMS in kernel_choices.current()


class _SplitProduct(torch.autograd.Function):
    """``alpha * a @ b``; its backward pass is that of ``torch.baddbmm``, which applies ``alpha`` after rounding."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.alpha = alpha
        return _product(a, b, alpha)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        of_a = _product(gradient, b.transpose(1, 2)).mul_(ctx.alpha) if ctx.needs_input_grad[0] else None
        of_b = _product(a.transpose(1, 2), gradient).mul_(ctx.alpha) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None


def _product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    def partial(part: slice) -> Tensor:
        return torch.bmm(a[:, :, part].float(), b[:, part].float()).mul_(alpha)

    return split_k.added(partial, a.shape[2], a.dtype)
