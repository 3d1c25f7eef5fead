"""Several matrix products in one call, one for each expert of a mixture, also over ``GroupedTensorStorage``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.cpu import versions
from parity.cpu.products import gemm
from parity.cpu.quantized import grouped

__all__ = [
    "get_grouped_gemm_setup_workspace_size",
    "splits_to_offsets",
    "splits_to_offsets_multi",
    "te_general_grouped_gemm",
    "te_general_grouped_gemm_for_discrete_in",
    "te_general_grouped_gemm_for_discrete_out",
    "te_general_grouped_gemm_for_grouped_tensor",
]

# Several matrix products in one call, one for each expert of a mixture.
#
# Follows ``csrc/extensions/gemm.cpp`` (``te_general_grouped_gemm``) of TransformerEngine 2.20.2: a grouped product is
# the products one by one, and a group without rows makes zeros.


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


# Several matrix products in one call, over TransformerEngine's ``GroupedTensorStorage``.
#
# Follows ``csrc/extensions/gemm.cpp`` (``te_general_grouped_gemm_for_*``) and ``csrc/extensions/misc.cpp`` of TE
# 2.20.2. A grouped tensor holds the matrices of all groups one after the other. Later versions of TE ask for a newer
# cuBLAS than the one that is emulated by default (``parity.cpu.cuda.cublaslt_version``).


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """No bytes: there are no descriptors to set up."""
    return 0


def splits_to_offsets(first_dims: Tensor, logical_last_dim: int) -> Tensor:
    """Where each group begins and ends, int64 ``[groups + 1]``, from numbers of rows and elements in a row."""
    return torch.nn.functional.pad(first_dims.long().cumsum(0) * logical_last_dim, (1, 0))


def splits_to_offsets_multi(
    split_sizes: Tensor,
    device: torch.device,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Return the split sizes as int64, and ``splits_to_offsets`` for each stride, with or without the leading zero."""
    offsets = [
        splits_to_offsets(split_sizes, stride)[0 if leading else 1 :].to(dtype)
        for stride, leading, dtype in zip(strides, include_leading_zero, dtypes, strict=True)
    ]
    return split_sizes.long(), offsets


@torch.no_grad()
def te_general_grouped_gemm_for_grouped_tensor(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    bias: Any,
    bias_scale: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    workspace_setup: Tensor,
    workspace_cublas: Tensor,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any:
    """``D[i] = alpha[i] op(B[i]) op(A[i]) + beta[i] D[i]`` for each group i, then plus a bias.

    Args:
        A, B: grouped tensors or lists of matrices, FP16, BF16 or quantized.
        D: a grouped tensor or a list of matrices, not quantized.
        bias: grouped tensor of one row a group; the product is rounded before the bias is added.
        bias_scale: FP32, one for each row of D: times the bias.
        alpha: FP32, ``[groups]`` or one element.
        beta: FP32, ``[groups]`` or one element.

    Returns:
        D.
    """
    outputs = _members(D)
    factors = alpha.expand(len(outputs)).tolist(), beta.expand(len(outputs)).tolist()
    for a, b, output, product_factor, addend_factor in zip(_members(A), _members(B), outputs, *factors, strict=True):
        if a.size().numel() == 0 or b.size().numel() == 0:
            output.mul_(addend_factor) if addend_factor else output.zero_()
            continue
        gemm.generic_gemm(
            a, transA, b, transB, output, None, None, None, 0, False, None, False, workspace_cublas, 0,
            addend_factor != 0, use_split_accumulator, alpha=product_factor, beta=addend_factor or None,
        )  # fmt: skip
    if bias is not None:
        _add_bias(outputs, _members(bias), bias_scale)
    return D


te_general_grouped_gemm_for_discrete_in = te_general_grouped_gemm_for_grouped_tensor
te_general_grouped_gemm_for_discrete_out = te_general_grouped_gemm_for_grouped_tensor


def _members(operand: Any) -> Sequence[Any]:
    """Return each group's matrix: of a list, or of a grouped tensor, whose data they are views of."""
    return operand if isinstance(operand, (list, tuple)) else grouped.members(operand)


def _add_bias(outputs: Sequence[Tensor], biases: Sequence[Tensor], bias_scale: Tensor | None) -> None:
    scales = None if bias_scale is None else bias_scale.split([len(output) for output in outputs])
    for i, (output, bias) in enumerate(zip(outputs, biases, strict=True)):
        addend = bias.float().view(1, -1)
        if scales is not None:
            addend = addend * scales[i][:, None]
        output.copy_(output.float() + addend)
