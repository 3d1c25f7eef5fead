"""Matrix products with the epilogues that TransformerEngine asks cuBLAS for, single or grouped by expert.

Follows ``csrc/extensions/gemm.cpp`` of TE 2.20.2 and ``common/gemm/cublaslt_gemm.cu`` of NVIDIA's repository. cuBLAS
is column-major; in PyTorch's order the product is ``D[n, m] = op(B)[n, k] @ op(A)[k, m]``.

Sums are FP32 and results are rounded once. The order of additions is not modelled. Less precise sums and other
roundings that a GPU's kernels may have are modelled on demand (``te_on_cpu.kernel_choices``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu as gelu_forward

from te_on_cpu import block_scaling, cast, cuda, float8, formats, kernel_choices, mxfp8, nvfp4, tensor_cores, versions
from te_on_cpu.enums import TORCH_DTYPE

__all__ = [
    "generic_gemm",
    "get_grouped_gemm_setup_workspace_size",
    "splits_to_offsets",
    "splits_to_offsets_multi",
    "te_general_grouped_gemm",
    "te_general_grouped_gemm_for_discrete_in",
    "te_general_grouped_gemm_for_discrete_out",
    "te_general_grouped_gemm_for_grouped_tensor",
]

# Factors with block scales may split K only at multiples of this, which are whole blocks of every format.
_WHOLE_BLOCKS = 128
# oneDNN's error if it has no memory for the code that it generates for each size of a product; FP32 needs no such code.
_NO_ROOM_FOR_CODE = "could not create a primitive"


@dataclass(frozen=True)
class _Operand:
    """One factor, ready to multiply.

    Attributes:
        matrix: ``[outer, inner]``; the values of FP8 and FP4 codes, times the scales of their blocks if they have any,
            in BF16 if it holds them exactly, otherwise in FP32.
        scale_inv: a factor of the product, for codes with one scale per tensor; otherwise 1.
        is_quantized: whether the values came from codes.
        factor: the operand of the tensor cores, if their sums are emulated and modelled for this format.
    """

    matrix: Tensor
    scale_inv: float
    is_quantized: bool
    factor: tensor_cores.Factor | tensor_cores.BlockFactor | None = None


@dataclass(frozen=True)
class _Epilogue:
    """Describe the steps before the product is rounded: ``alpha * product + beta * addend``, then bias, then GELU.

    Attributes:
        addend: the old D, ``[n, m]``, or None.
        bias: ``[m]``, or None.
        gelu: apply the tanh approximation of GELU.
        dgelu_of: apply the derivative of GELU at these inputs, ``[n, m]``, instead.
    """

    alpha: float
    beta: float
    addend: Tensor | None
    bias: Tensor | None
    gelu: bool
    dgelu_of: Tensor | None


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: int | None,
    bias: Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Compute ``D = epilogue(alpha * op(B) op(A) + beta * D)``, with leading dimensions flattened.

    If A, B and D are all FP32, A and B are rounded to TF32. With one FP8 scale per tensor, the sums are scaled; block
    scales multiply the values. ``kernel_choices`` may change this, and split K.

    Args:
        A: ``[m, k]`` if ``transA`` else ``[k, m]``: FP32, FP16, BF16, or a TE quantized tensor.
        B: ``[n, k]``, or ``[k, n]`` if ``transB``; dtypes as for A.
        D: receives the result, ``[n, m]``. Default: a new tensor.
        quantizer: casts the result, directly from FP32 if A is a ``Float8Tensor`` and scaling is delayed, otherwise
            after rounding to the output dtype.
        output_dtype: default: D's dtype or A's.
        bias: ``[m]``, added before GELU. If ``grad``, its presence only asks for the bias gradient.
        bias_type: dtype of the pre-GELU output if the operands are quantized; otherwise it has the output dtype.
        gelu: apply GELU; if ``grad``, multiply by the derivative of GELU at ``gelu_in`` instead.
        accumulate: add to D; ``beta`` (default 1) is the factor of the old D.
        use_split_accumulator: required for block-scaled FP8; changes sums only if FP8 tensor cores are emulated.

    Returns:
        D, the bias gradient ``[n]`` (the sum of op(B) over k) or None, the input of GELU or None, ``extra_output``.

    Raises:
        ValueError: for shapes, dtypes or flags that do not fit each other.
        RuntimeError: for a quantized operand that lacks the direction in which it is read, and for other products that
            TE and cuBLAS refuse (``check``).
        NotImplementedError: for other formats, communication overlap, and combinations that TE never asks for.
    """
    _check_flags(D, accumulate, beta, quantizer)
    left, right = _operand(A, not transA, "A"), _operand(B, transB, "B")
    dtype = _output_dtype(D, output_dtype, left)
    shape = _output_shape(A, B, D, transB, left, right)
    rows = (right.matrix.shape[0], left.matrix.shape[0])
    check(
        Request(
            A, transA, B, transB, left.matrix.shape[0], rows[0], left.matrix.shape[1], dtype,
            bias is not None, gelu and not (grad and gelu_in is None), grad, use_split_accumulator,
        )
    )  # fmt: skip
    if comm_overlap is not None or (grad and gelu and bias is not None):
        raise NotImplementedError(
            "generic_gemm: the CPU kernels support neither communication overlap nor dGELU with a bias gradient"
        )
    epilogue = _Epilogue(
        alpha=alpha,
        beta=1.0 if beta is None else beta,
        addend=D.reshape(rows) if accumulate else None,
        bias=None if grad else bias,
        gelu=gelu and not grad,
        dgelu_of=gelu_in.reshape(rows) if gelu and grad and gelu_in is not None else None,
    )
    multiply = _emulated_product(left, right, use_split_accumulator)
    fused_cast = float8.is_delayed(quantizer) and float8.is_float8_tensor(A)
    result, pre_gelu = _compute(left, right, epilogue, dtype, torch.float32 if fused_cast else dtype, multiply)
    bias_grad = _bias_grad(right, dtype) if bias is not None and grad else None
    if pre_gelu is not None:
        pre_gelu = pre_gelu.to(TORCH_DTYPE[int(bias_type)] if left.is_quantized else dtype).view(shape)
    delivered = cast.store(result.view(shape), quantizer, dtype, D, kernel="generic_gemm")
    return [delivered, bias_grad, pre_gelu, extra_output]


def _check_flags(D: Any, accumulate: bool, beta: float | None, quantizer: Any) -> None:
    if beta and not accumulate:
        raise ValueError(f"generic_gemm: beta={beta} has no effect without accumulate; pass accumulate=True")
    if accumulate and (D is None or quantizer is not None):
        what = "no D" if D is None else "a quantized D"
        raise ValueError(f"generic_gemm: accumulate adds to D, but there is {what}")


def _operand(value: Any, columnwise: bool, name: str) -> _Operand:
    """Return the operand as ``[outer, inner]``, which is its order in memory unless it is read ``columnwise``."""
    entry = formats.of_tensor(value)
    if entry is not None:
        values, scale_inv = formats.operand(entry, value, columnwise, name)
        return _Operand(values, scale_inv, True, _block_factor(entry, value, columnwise))
    if float8.is_float8_tensor(value):
        codes = float8.operand(value, columnwise, name)
        values = float8.decode(codes, float8.fp8_dtype(value), torch.bfloat16)
        factor = tensor_cores.Factor(values, float8.fp8_dtype(value))
        return _Operand(values, value._scale_inv.item(), True, factor)
    if not isinstance(value, Tensor) or hasattr(value, "_quantizer"):
        raise NotImplementedError(
            "the CPU kernel generic_gemm multiplies FP32, FP16, BF16 and TE's FP8 and FP4 tensors, but "
            f"TransformerEngine {versions.installed_version()} passed a {type(value).__name__}"
        )
    matrix = torch.atleast_2d(value.detach()).flatten(0, -2)
    return _Operand(matrix.t() if columnwise else matrix, 1.0, False)


def _block_factor(
    entry: formats.Format, value: Any, columnwise: bool
) -> tensor_cores.Factor | tensor_cores.BlockFactor | None:
    """Return the tensor cores' operand for values with one scale per block, or None if no sums are emulated."""
    if entry.kernels is block_scaling:
        if tensor_cores.core(block_scaled=True) is None:
            return None
        unscaled, scales = block_scaling.unscaled_operand(value, columnwise)
        return tensor_cores.Factor(unscaled, float8.fp8_dtype(value), scales)
    if kernel_choices.MX_25_BIT not in kernel_choices.current():
        return None
    if entry.kernels is mxfp8:
        return tensor_cores.BlockFactor(*mxfp8.unscaled_operand(value, columnwise), float8.fp8_dtype(value))
    return tensor_cores.BlockFactor(*nvfp4.unscaled_operand(value, columnwise), None)


def _shape(tensor: Any) -> torch.Size:
    entry = formats.of_tensor(tensor)
    if entry is not None:
        return entry.kernels.logical_shape(tensor)
    return float8.rowwise_shape(tensor) if float8.is_float8_tensor(tensor) else tensor.shape


def _kind(tensor: Any) -> str:
    if formats.of_tensor(tensor) is not None:
        return type(tensor).__name__
    return str(float8.fp8_dtype(tensor) if float8.is_float8_tensor(tensor) else tensor.dtype)


def _output_shape(A: Any, B: Any, D: Any, transB: bool, left: _Operand, right: _Operand) -> torch.Size:
    """Return the shape of D, which keeps B's leading dimensions unless B is transposed."""
    both_quantized = left.is_quantized and right.is_quantized
    if left.is_quantized != right.is_quantized or (left.matrix.dtype != right.matrix.dtype and not both_quantized):
        raise ValueError(f"generic_gemm: operands differ in dtype: A {_kind(A)}, B {_kind(B)}")
    if left.matrix.shape[1] != right.matrix.shape[1]:
        sizes = f"op(A) {tuple(left.matrix.t().shape)}, op(B) {tuple(right.matrix.shape)}"
        raise ValueError(f"generic_gemm: inner dimensions differ: {sizes}")
    outer = right.matrix.shape[:1] if transB else _shape(B)[:-1]
    shape = torch.Size((*outer, left.matrix.shape[0]))
    if D is not None and _shape(D) != shape:
        raise ValueError(f"generic_gemm: D has shape {tuple(_shape(D))}, the product has {tuple(shape)}")
    return shape


def _output_dtype(D: Any, output_dtype: int | None, left: _Operand) -> torch.dtype:
    if output_dtype is not None:
        dtype = TORCH_DTYPE[int(output_dtype)]
        if isinstance(D, Tensor) and D.dtype != dtype:
            raise ValueError(f"generic_gemm: D is {D.dtype}, but output_dtype is {dtype}")
        return dtype
    if isinstance(D, Tensor):
        return D.dtype
    if left.is_quantized:
        raise ValueError("generic_gemm: quantized operands do not determine the output dtype; pass output_dtype or D")
    return left.matrix.dtype


def _emulated_product(left: _Operand, right: _Operand, split: bool) -> Callable[[slice], Tensor] | None:
    """Return a function that multiplies a range of the inner dimension as tensor cores do; None for FP32 sums."""
    a, b = left.factor, right.factor
    if isinstance(a, tensor_cores.BlockFactor) and isinstance(b, tensor_cores.BlockFactor):
        return lambda part: tensor_cores.block_product(a.part(part), b.part(part))
    if not (isinstance(a, tensor_cores.Factor) and isinstance(b, tensor_cores.Factor)):
        return None
    core = tensor_cores.core(block_scaled=a.scales is not None)
    if core is None:
        return None
    return lambda part: tensor_cores.product(core, a.part(part), b.part(part), split)


def _compute(
    left: _Operand,
    right: _Operand,
    epilogue: _Epilogue,
    dtype: torch.dtype,
    result_dtype: torch.dtype,
    emulated: Callable[[slice], Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the result ``[n, m]`` in ``result_dtype``, and the input of GELU in FP32 if there is a GELU."""
    if left.matrix.numel() == 0 or right.matrix.numel() == 0:
        # TE returns zeros without bias, or leaves D as it is (``csrc/extensions/gemm.cpp``).
        zeros = torch.zeros(right.matrix.shape[0], left.matrix.shape[0])
        pre_gelu = zeros if epilogue.gelu else None
        return (zeros if epilogue.addend is None else epilogue.addend).to(result_dtype), pre_gelu
    splits = (
        result_dtype in tensor_cores.SIXTEEN_BIT and kernel_choices.SPLIT_K_IN_OUTPUT_TYPE in kernel_choices.current()
    )
    native = emulated is None and not splits and not _cuts_sums(left, dtype)
    if native and _fits_native_bf16(left, right, epilogue, result_dtype):
        try:
            return _in_native_bf16(left, right, epilogue), None
        except RuntimeError as error:
            if _NO_ROOM_FOR_CODE not in str(error):
                raise
    multiply = emulated or functools.partial(_product, left, right, dtype)
    scale = _scale(left, right, epilogue)

    def scaled(part: slice) -> Tensor:
        value = multiply(part)
        return value if scale == 1.0 else value.mul_(scale)

    inner = left.matrix.shape[1]
    if splits:
        step = tensor_cores.SHORTEST if emulated is None else _WHOLE_BLOCKS
        value = tensor_cores.added(scaled, inner, result_dtype, step).float()
    else:
        value = scaled(slice(0, inner))
    if epilogue.addend is not None:
        value.add_(epilogue.addend, alpha=epilogue.beta)
    if epilogue.bias is not None:
        value.add_(epilogue.bias)
    if epilogue.gelu:
        return gelu_forward(value, approximate="tanh").to(result_dtype), value
    if epilogue.dgelu_of is not None:
        value = torch.ops.aten.gelu_backward(value, epilogue.dgelu_of.float(), approximate="tanh")
    return value.to(result_dtype), None


def _product(left: _Operand, right: _Operand, dtype: torch.dtype, part: slice) -> Tensor:
    """Return ``B A^T`` over a range of the inner dimension, in FP32."""
    a, b = left.matrix[:, part], right.matrix[:, part]
    if a.dtype == b.dtype == dtype == torch.float32 and not left.is_quantized:
        a, b = tensor_cores.operand(a), tensor_cores.operand(b)
    if _cuts_sums(left, dtype):
        return tensor_cores.cut_product(a, b)
    return b.float() @ a.float().t()


def _cuts_sums(left: _Operand, dtype: torch.dtype) -> bool:
    """Return whether to emulate how tensor cores truncate sums of operands that are not quantized."""
    choices = kernel_choices.current()
    if left.is_quantized or kernel_choices.SUMS_25_BIT not in choices:
        return False
    is_tf32 = dtype == torch.float32 and kernel_choices.FP32_EXACT not in choices
    return left.matrix.dtype in tensor_cores.SIXTEEN_BIT or is_tf32


def _fits_native_bf16(left: _Operand, right: _Operand, epilogue: _Epilogue, result_dtype: torch.dtype) -> bool:
    """Return whether PyTorch's own BF16 product gives the same result.

    It sums in FP32, applies alpha, beta and a single addend there, and rounds once. It takes a quarter of the time on a
    CPU with BF16 instructions. PyTorch's FP16 product would be as faithful, but is up to 60 times slower than one in
    FP32; so is the BF16 product without oneDNN.
    """
    addends = [addend for addend in (epilogue.addend, epilogue.bias) if addend is not None]
    dtypes = {tensor.dtype for tensor in (left.matrix, right.matrix, *addends)} | {result_dtype}
    return (
        dtypes == {torch.bfloat16}
        and len(addends) < 2
        and not epilogue.gelu
        and epilogue.dgelu_of is None
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _scale(left: _Operand, right: _Operand, epilogue: _Epilogue) -> float:
    """Return the factor of the sums, which becomes infinite beyond the range of FP32, as on a GPU."""
    scale = epilogue.alpha * left.scale_inv * right.scale_inv
    return math.copysign(math.inf, scale) if abs(scale) > torch.finfo(torch.float32).max else scale


def _in_native_bf16(left: _Operand, right: _Operand, epilogue: _Epilogue) -> Tensor:
    a, b = left.matrix, right.matrix
    scale = _scale(left, right, epilogue)
    if epilogue.addend is not None:
        return torch.addmm(epilogue.addend, b, a.t(), beta=epilogue.beta, alpha=scale)
    if epilogue.bias is not None:
        return torch.addmm(epilogue.bias, b, a.t(), alpha=scale)
    return b.new_empty(b.shape[0], a.shape[0]).addmm_(b, a.t(), beta=0.0, alpha=scale)


def _bias_grad(right: _Operand, dtype: torch.dtype) -> Tensor:
    """Return the bias gradient ``[n]``, the FP32 sum of op(B) over k, rounded once (cuBLAS's BGRADB)."""
    return right.matrix.sum(1, dtype=torch.float32).mul_(right.scale_inv).to(dtype)


# Several matrix products in one call, one for each expert of a mixture.
#
# Follows ``csrc/extensions/gemm.cpp`` (``te_general_grouped_gemm``) of TransformerEngine 2.20.2. A grouped product
# gives the same results as its products one by one, and a group without rows gives zeros.


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
    """Compute ``D[i] = op(B[i]) op(A[i])`` for each group i, with the epilogue of ``generic_gemm``.

    Args:
        A: one matrix per group, ``[m, k]`` if ``transA`` else ``[k, m]``.
        B: one matrix per group, ``[n_i, k]``, or ``[k, n_i]`` if ``transB``.
        D: receives the results: one tensor ``[n_i, m]`` per group, or, if ``single_output``, one tensor that holds them
            one after the other.
        bias: one tensor ``[m]`` per group, added to the product; if ``grad``, receives the bias gradients ``[n_i]``. An
            empty tensor means no bias.
        pre_gelu_out: receives the inputs of GELU, ``[n_i, m]``; empty tensors mean no GELU.
        accumulate: add to D.

    Returns:
        ``bias``.

    Raises:
        NotImplementedError: without D, and for the derivative of GELU; no module of TE asks for either.
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
            _without_rows(output, group_bias, pre_gelu, grad, accumulate)
            continue
        # TE's operations do not ask for split sums of block-scaled operands, though its other paths always do. NVIDIA's
        # tests run these operations on a Hopper (tests/pytorch/test_fusible_ops.py), so they are not refused here.
        split = use_split_accumulator or getattr(formats.of_tensor(a), "kernels", None) is block_scaling
        _, bias_grad, gelu_input, _ = generic_gemm(
            a, transA, b, transB, output, None, None, group_bias if group_bias.numel() else None, bias_type,
            pre_gelu.numel() > 0, None, grad, workspace[0], workspaceSize, accumulate, split,
        )  # fmt: skip
        if bias_grad is not None:
            group_bias.copy_(bias_grad)
        if gelu_input is not None:
            pre_gelu.copy_(gelu_input)
    return bias


def _parts(output: Tensor, rows: list[int]) -> Sequence[Tensor]:
    """Return views of consecutive rows of a single output."""
    return output.view(-1, output.shape[-1])[: sum(rows)].split(rows)


def _without_rows(output: Tensor, bias: Tensor, pre_gelu: Tensor, grad: bool, accumulate: bool) -> None:
    if not accumulate:
        output.zero_()
    if grad:
        bias.zero_()
    pre_gelu.zero_()


# Several matrix products in one call, with operands in TransformerEngine's ``GroupedTensorStorage``.
#
# Follows ``csrc/extensions/gemm.cpp`` (``te_general_grouped_gemm_for_*``) and ``csrc/extensions/misc.cpp`` of TE
# 2.20.2. A grouped tensor holds the matrices of all groups one after the other. Later versions of TE need a newer
# cuBLAS than the one that is emulated by default (``te_on_cpu.cuda.cublaslt_version``).


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """Return 0 bytes, because there are no descriptors to set up."""
    return 0


def splits_to_offsets(first_dims: Tensor, logical_last_dim: int) -> Tensor:
    """Return the start of each group and the end, int64 ``[groups + 1]``, from the groups' rows and a row's length."""
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
    """Compute ``D[i] = alpha[i] op(B[i]) op(A[i]) + beta[i] D[i]`` for each group i, then add a bias.

    Args:
        A, B: grouped tensors or lists of matrices, FP16, BF16 or quantized.
        D: a grouped tensor or a list of matrices, not quantized.
        bias: grouped tensor of one row per group; the product is rounded before the bias is added.
        bias_scale: FP32, a factor of the bias for each row of D.
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
        generic_gemm(
            a, transA, b, transB, output, None, None, None, 0, False, None, False, workspace_cublas, 0,
            addend_factor != 0, use_split_accumulator, alpha=product_factor, beta=addend_factor or None,
        )  # fmt: skip
    if bias is not None:
        _add_bias(outputs, _members(bias), bias_scale)
    return D


te_general_grouped_gemm_for_discrete_in = te_general_grouped_gemm_for_grouped_tensor
te_general_grouped_gemm_for_discrete_out = te_general_grouped_gemm_for_grouped_tensor


def _members(operand: Any) -> Sequence[Any]:
    """Return the matrix of each group: the items of a list, or views of a grouped tensor's data."""
    return operand if isinstance(operand, (list, tuple)) else cast.members(operand)


def _add_bias(outputs: Sequence[Tensor], biases: Sequence[Tensor], bias_scale: Tensor | None) -> None:
    scales = None if bias_scale is None else bias_scale.split([len(output) for output in outputs])
    for i, (output, bias) in enumerate(zip(outputs, biases, strict=True)):
        addend = bias.float().view(1, -1)
        if scales is not None:
            addend = addend * scales[i][:, None]
        output.copy_(output.float() + addend)


# Checks that refuse the matrix products that TransformerEngine and cuBLAS refuse.
#
# Follows ``CanonicalizeGemmInput`` and ``cublas_gemm`` in ``common/gemm/cublaslt_gemm.cu`` and
# ``convert_block_scaling_to_mxfp8_tensor`` in ``csrc/extensions/swizzle.cpp`` (NVIDIA/TransformerEngine at
# 2.20.0.dev0), in their order. cuBLAS's own limits are from its table of FP8 types and from TE's tests
# (``tests/pytorch/test_float8_blockwise_gemm_exact.py``). Operands without elements are never refused, because TE runs
# no GEMM for them.


_ALIGNMENT = 16
# The first compute capability whose tensor cores multiply each block-scaled format (``pytorch/quantization.py``).
_FIRST_GPU = {"Float8BlockQuantizer": 9, "MXFP8Quantizer": 10, "NVFP4Quantizer": 10}
_BLOCK_ALIGNMENT = 8

# The meaning of the dimensions of a linear layer's GEMMs, by transA and transB. In order, these compute the result, the
# input's gradient and the weight's gradient. No layer transposes both operands.
_DIMENSIONS = {
    (True, False): {
        "m": "the layer's output features",
        "n": "the rows (tokens) that the layer is given",
        "k": "the layer's input features",
    },
    (False, False): {
        "m": "the layer's input features",
        "n": "the rows (tokens) that the layer is given",
        "k": "the layer's output features",
    },
    (False, True): {
        "m": "the layer's input features",
        "n": "the layer's output features",
        "k": "the rows (tokens) that the layer is given, which its weight's gradient sums over",
    },
    (True, True): {"m": "the rows of A", "n": "the columns of B", "k": "the columns of A"},
}


@dataclass(frozen=True)
class Request:
    """Describe a product ``D[n, m] = op(B)[n, k] op(A)[k, m]`` by the arguments of TE's ``generic_gemm``.

    Attributes:
        A: a tensor, or a TE quantized tensor; likewise B.
        transA: whether A is ``[m, k]``.
        transB: whether B is ``[k, n]``.
        dtype: the dtype of the result.
        bias: whether a bias is added or, if ``grad``, its gradient computed.
        gelu: whether GELU or, if ``grad``, its derivative is applied.
        split: whether partial sums of FP8 products are repeatedly promoted to FP32.
    """

    A: Any
    transA: bool
    B: Any
    transB: bool
    m: int
    n: int
    k: int
    dtype: torch.dtype
    bias: bool
    gelu: bool
    grad: bool
    split: bool


def check(request: Request) -> None:
    """Raise ``RuntimeError`` for a product that TE or cuBLAS refuses on the emulated GPU."""
    if 0 in (request.m, request.n, request.k):
        return
    entry, other = formats.of_tensor(request.A), formats.of_tensor(request.B)
    if entry is not other:
        raise RuntimeError(
            f"generic_gemm: inputs A and B need to have compatible scaling modes, but A is a {type(request.A).__name__}"
            f" and B a {type(request.B).__name__}; quantize both with the same recipe"
        )
    if entry is not None and cuda.get_device_capability() < (_FIRST_GPU[entry.quantizer], 0):
        raise RuntimeError(
            f"generic_gemm: Unable to find suitable cuBLAS GEMM algorithm: products of {type(request.A).__name__} need "
            f"compute capability {_FIRST_GPU[entry.quantizer]}.0; TE checks this for its own recipes, not for a "
            "CustomRecipe"
        )
    is_tn = request.transA and not request.transB
    if entry is not None and entry.kernels is mxfp8 and cuda.get_device_capability() >= (12, 0) and not is_tn:
        raise RuntimeError(
            "generic_gemm: Unable to find suitable cuBLAS GEMM algorithm: on compute capability 12.0, MXFP8 products "
            "are for forward passes alone (TN); TE checks this for its own recipes, not for a CustomRecipe"
        )
    if entry is None:
        _check_leading_dimensions(request)
    elif entry.kernels is block_scaling:
        _check_blocks(request)
    elif entry.kernels is nvfp4 and request.dtype == torch.float16:
        raise RuntimeError("generic_gemm: FP4 GEMM does not support FP16 output; compute in BF16")
    elif request.k % _ALIGNMENT:
        _raise_unaligned(request, "k", "A and B")
    if _is_e5m2(request.A) and _is_e5m2(request.B):
        raise RuntimeError(
            "generic_gemm: cuBLAS cannot multiply E5M2 by E5M2 (CUBLAS_STATUS_NOT_SUPPORTED); make one of the two E4M3"
        )


def _check_leading_dimensions(request: Request) -> None:
    """Check the contiguous dimension of operands with one FP8 scale per tensor.

    That is k if GEMMs read transposed copies. A Blackwell reads the codes as they are, so it is the tensor's last
    dimension, and the number of tokens is not restricted in the GEMM of the weight's gradient.
    """
    for name, tensor, last in (("A", request.A, request.transA), ("B", request.B, not request.transB)):
        if not float8.is_float8_tensor(tensor):
            continue
        as_it_is = cuda.has_gemm_without_transposes() and tensor._data is not None
        mirrored = cuda.has_gemm_without_transposes() and tensor._data is None
        reads_outer = (as_it_is and not last) or (mirrored and last)
        dimension = ("m" if name == "A" else "n") if reads_outer else "k"
        if getattr(request, dimension) % _ALIGNMENT:
            _raise_unaligned(request, dimension, name)


def _check_blocks(request: Request) -> None:
    """Check operands with one scale per block of 128, which a Blackwell multiplies as MXFP8 with repeated scales."""
    if request.k % _ALIGNMENT:
        _raise_unaligned(request, "k", "A and B")
    is_1d = {"A": not request.A._is_2D_scaled, "B": not request.B._is_2D_scaled}
    if cuda.get_device_capability() >= (10, 0):
        for name, dimension in (("A", "m"), ("B", "n")):
            if is_1d[name] and getattr(request, dimension) % 4:
                _raise_outer(request, dimension, name, 4)
        return
    if request.m % _BLOCK_ALIGNMENT:
        _raise_outer(request, "m", "A", _BLOCK_ALIGNMENT)
    if is_1d["B"] and request.n % _BLOCK_ALIGNMENT:
        _raise_outer(request, "n", "B", _BLOCK_ALIGNMENT)
    if not any(is_1d.values()):
        raise RuntimeError(
            "generic_gemm: Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling GEMM is supported, but both operands "
            "are scaled in 128 x 128 blocks; quantize one with block_scaling_dim=1"
        )
    if (request.gelu and (request.bias or not request.grad)) or (request.bias and request.grad):
        raise RuntimeError(
            "generic_gemm: Epilogue requested outside of the available and tested cuBLAS functionality for float8 "
            "block scaled GEMM, which supports a bias or the derivative of GELU; compute a GELU or a bias gradient "
            "separately"
        )
    if request.gelu and request.dtype != torch.bfloat16:
        raise RuntimeError(
            f"generic_gemm: an unsupported value or parameter was passed to cuBLAS: a float8 block scaled GEMM has the "
            f"derivative of GELU for bfloat16 results alone, not for {request.dtype}"
        )
    if not request.split:
        raise RuntimeError(
            "generic_gemm: cuBLAS has no float8 block scaled GEMM with fast accumulation "
            "(CUBLAS_STATUS_NOT_SUPPORTED); pass use_split_accumulator=True"
        )


def _is_e5m2(tensor: Any) -> bool:
    return hasattr(tensor, "_fp8_dtype") and float8.fp8_dtype(tensor) == torch.float8_e5m2


def _raise_unaligned(request: Request, dimension: str, name: str) -> None:
    raise RuntimeError(
        f"generic_gemm: Leading dimension requirement on {name} for FP8 GEMM: {getattr(request, dimension)}, "
        f"{_DIMENSIONS[request.transA, request.transB][dimension]}, has to be a multiple of {_ALIGNMENT}, so pad it"
    )


def _raise_outer(request: Request, dimension: str, name: str, multiple: int) -> None:
    raise RuntimeError(
        f"generic_gemm: Outer dimension requirement on {name} for block scaling GEMM: {getattr(request, dimension)}, "
        f"{_DIMENSIONS[request.transA, request.transB][dimension]}, has to be a multiple of {multiple}, so pad it"
    )
