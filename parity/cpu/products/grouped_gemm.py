"""Several matrix products in one call, one for each expert of a mixture.

Follows ``csrc/extensions/gemm.cpp`` (``te_general_grouped_gemm``) of TransformerEngine 2.20.2: a grouped product is the
products one by one, and a group without rows makes zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.cpu import versions
from parity.cpu.products import gemm

__all__ = ["te_general_grouped_gemm"]


@torch.no_grad()
def te_general_grouped_gemm(
    A: Sequence[Any],
    transA: bool,
    B: Sequence[Any],
    transB: bool,
    D: Sequence[Tensor] | None,
    D_type: int,
    m_splits: Sequence[int] | None,
    bias: Sequence[Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspace: Sequence[Tensor],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[Tensor]:
    """``D[i] = op(B[i]) op(A[i])`` for each group i, with the epilogue of ``generic_gemm``.

    Args:
        A: one matrix a group, ``[m, k]`` if ``transA`` else ``[k, m]``.
        B: one matrix a group, ``[n_i, k]``, or ``[k, n_i]`` if ``transB``.
        D: where the results go: one tensor ``[n_i, m]`` a group, or, if ``single_output``, one tensor that holds them
            one after the other.
        bias: one tensor ``[m]`` a group, added to the product; if ``grad``, where the bias gradients ``[n_i]`` go. An
            empty tensor stands for none.
        pre_gelu_out: where the inputs of GELU go, ``[n_i, m]``; empty tensors ask for no GELU.
        accumulate: add to D.

    Returns:
        ``bias``.

    Raises:
        NotImplementedError: without D, and for the derivative of GELU: no module of TE asks for either.
    """
    if D is None or (grad and any(tensor.numel() for tensor in pre_gelu_out)):
        what = "results without D" if D is None else "derivative of GELU"
        raise NotImplementedError(
            f"the CPU kernel te_general_grouped_gemm has no {what}, "
            f"which TransformerEngine {versions.installed_version()} asked for"
        )
    outputs = _parts(D[0], [b.size()[:-1].numel() for b in B]) if single_output else D
    for a, b, output, group_bias, pre_gelu in zip(A, B, outputs, bias, pre_gelu_out, strict=True):
        if a.size().numel() == 0 or b.size().numel() == 0:
            _without_product(output, group_bias, pre_gelu, grad, accumulate)
            continue
        _, bias_grad, gelu_input, _ = gemm.generic_gemm(
            a, transA, b, transB, output, None, None, group_bias if group_bias.numel() else None, bias_type,
            pre_gelu.numel() > 0, None, grad, workspace[0], workspaceSize, accumulate, use_split_accumulator,
        )  # fmt: skip
        if bias_grad is not None:
            group_bias.copy_(bias_grad)
        if gelu_input is not None:
            pre_gelu.copy_(gelu_input)
    return bias


def _parts(output: Tensor, rows: list[int]) -> Sequence[Tensor]:
    """Views of consecutive rows of a single output."""
    return output.view(-1, output.shape[-1])[: sum(rows)].split(rows)


def _without_product(output: Tensor, bias: Tensor, pre_gelu: Tensor, grad: bool, accumulate: bool) -> None:
    if not accumulate:
        output.zero_()
    if grad:
        bias.zero_()
    pre_gelu.zero_()
