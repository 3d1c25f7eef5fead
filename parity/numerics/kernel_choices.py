"""List what TransformerEngine's kernels on an Ada, a Hopper or a Blackwell may do otherwise, and model it.

Each row is an option of the CPU kernels (``parity.cpu.kernel_choices``, ``PARITY_KERNEL_CHOICES``). This project has
not seen any of them on a GPU yet: a row says what its source allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.cpu import kernel_choices as names
from parity.cpu.kernel_choices import (
    ATTENTION_16_BIT_SUMS,
    FP8_14_BIT,
    FP8_BLOCK_14_BIT,
    SPLIT_K_IN_OUTPUT_TYPE,
    TF32_TRUNCATED,
)
from parity.numerics.formats import Rounding, e4m3, e4m3_squares, tf32, tf32_truncated
from parity.settings import PRECISION_NAMES

# What TransformerEngine's kernels on an Ada, a Hopper or a Blackwell may do, and the CPU kernels do not by default.


_ALL_GPUS = ("ada", "hopper", "blackwell")
_PER_TENSOR_FP8 = ("fp8_delayed", "fp8_current")
# Outputs, data gradients and most weight gradients are BF16 in the quantized precisions, too.
_SIXTEEN_BIT_RESULTS = tuple(name for name in PRECISION_NAMES if name != "fp32")
_MMA_SIM = "MMA-Sim, arXiv 2511.10909, and its code, github.com/microsoft/MMA-Sim"
_CUBLASLT_GEMM = "TE 2.20.2, common/gemm/cublaslt_gemm.cu"


@dataclass(frozen=True)
class KernelChoice:
    """One thing that a faithful kernel may do.

    Attributes:
        name: the option's name, as in ``parity.cpu.kernel_choices.NAMES``.
        gpus: ``ada``, ``hopper``, ``blackwell``: those whose kernels may do it.
        precisions: names of ``parity.te.precision`` in which it can show.
        does: what it does, in a sentence.
        source: where that is documented or was measured.
        leans: whether errors lean one way (toward zero, say) and so add up with the length of a sum; else they are
            noise.
    """

    name: str
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]
    does: str
    source: str
    leans: bool


CHOICES = (
    KernelChoice(
        names.TF32_TRUNCATED,
        _ALL_GPUS,
        ("fp32",),
        "FP32 operands of a GEMM are cut to TF32's 10 mantissa bits, toward zero.",
        f"{_MMA_SIM}: every TF32 instruction (mma, wgmma, tcgen05) reads the upper 19 bits of an operand; "
        f"{_CUBLASLT_GEMM}: CUBLAS_COMPUTE_32F_FAST_TF32, whose conversion cuBLAS does not document",
        leans=True,
    ),
    KernelChoice(
        names.TF32_TIES_AWAY,
        _ALL_GPUS,
        ("fp32",),
        "FP32 operands of a GEMM are rounded to TF32's 10 mantissa bits, to nearest, ties away from zero.",
        "PTX ISA 8.5, cvt.rna.tf32.f32; a kernel that converts before it multiplies has this rounding (CUTLASS 3.5, "
        f"include/cutlass/tfloat32.h, round_half_ulp_truncate); {_CUBLASLT_GEMM}: CUBLAS_COMPUTE_32F_FAST_TF32",
        leans=False,
    ),
    KernelChoice(
        names.FP32_EXACT,
        _ALL_GPUS,
        ("fp32",),
        "GEMMs of FP32 operands compute in FP32, without TF32.",
        f"{_CUBLASLT_GEMM}: CUBLAS_COMPUTE_32F_FAST_TF32; cuBLAS 13, cublasComputeType_t: it allows the library to use "
        "tensor cores with TF32, and does not oblige it to",
        leans=False,
    ),
    KernelChoice(
        names.FP8_14_BIT,
        ("ada", "hopper"),
        _PER_TENSOR_FP8,
        "Sums of FP8 products with one scale a tensor keep 14 bits: over all of K forward, over 128 products backward.",
        "DeepSeek-V3, arXiv 2412.19437, section 3.5.2; SageAttention2, arXiv 2411.10958; "
        f"{_MMA_SIM}: 13 fraction bits, 32 products a step on a Hopper, 16 on an Ada; TE 2.20.2, "
        "pytorch/module/base.py: _2X_ACC_FPROP = False, _2X_ACC_DGRAD = _2X_ACC_WGRAD = True; cuBLAS 13: "
        "CUBLASLT_MATMUL_DESC_FAST_ACCUM",
        leans=True,
    ),
    KernelChoice(
        names.FP8_BLOCK_14_BIT,
        ("hopper",),
        ("fp8_block",),
        "Sums of FP8 products keep 14 bits within a block of 128; the blocks are scaled and added in FP32.",
        "DeepSeek-V3, arXiv 2412.19437, section 3.3.2; CUTLASS 3.9, examples/67_hopper_fp8_warp_specialized_gemm_with_"
        "blockwise_scaling; TE 2.20.2, common/recipe/__init__.py: Float8BlockScaling",
        leans=True,
    ),
    KernelChoice(
        names.SPLIT_K_IN_OUTPUT_TYPE,
        _ALL_GPUS,
        _SIXTEEN_BIT_RESULTS,
        "A GEMM with a 16-bit result splits K; each part's sum is rounded to the result's dtype and added in it.",
        "cuBLAS 13, cublasLtReductionScheme_t: CUBLASLT_REDUCTION_SCHEME_INPLACE and _OUTPUT_TYPE; "
        f"{_CUBLASLT_GEMM} sets no CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, whose default allows all",
        leans=False,
    ),
    KernelChoice(
        names.ATTENTION_16_BIT_SUMS,
        _ALL_GPUS,
        _SIXTEEN_BIT_RESULTS,
        "The products of unfused attention split K, and add the parts' sums in FP16 or BF16.",
        "PyTorch 2.13, torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction and allow_bf16_..., both True "
        "unless set (docs: notes/numerical_accuracy); TE 2.20.2, pytorch/attention/dot_product_attention/backends.py: "
        "torch.baddbmm and torch.bmm",
        leans=False,
    ),
    KernelChoice(
        names.MX_25_BIT,
        ("blackwell",),
        ("mxfp8", "nvfp4"),
        "A sum of MXFP8 products keeps 25 fraction bits of its largest term, 32 products a step, one of NVFP4 35, 64 "
        "a step; both are cut to FP32, toward zero, after each step.",
        f"{_MMA_SIM}: tcgen05.mma with block scales",
        leans=True,
    ),
)


def of(gpu: str, precision: str) -> tuple[KernelChoice, ...]:
    """Return the choices that a kernel of this GPU has at this precision.

    Args:
        gpu: ``ada``, ``hopper`` or ``blackwell``.
        precision: a name of ``parity.te.precision``.

    Raises:
        ValueError: for an unknown GPU or precision.
    """
    if gpu not in _ALL_GPUS or precision not in PRECISION_NAMES:
        raise ValueError(
            f"no kernels are known for {gpu!r} at {precision!r}; GPUs are {', '.join(_ALL_GPUS)}, precisions "
            f"{', '.join(PRECISION_NAMES)}"
        )
    return tuple(choice for choice in CHOICES if gpu in choice.gpus and precision in choice.precisions)


# Model what GEMM kernels of real GPUs may do beyond rounding operands and results once
# (``parity.numerics.kernel_choices``).
#
# Some of it leans: truncating TF32 operands shrinks every product, and a tensor core that keeps 14 bits of a sum loses
# the low bits of terms of one sign. What leans is granted along the change that it makes, and nowhere else
# (``parity.judge.judge``). The rest is noise: partial sums that are rounded to 16 bits make errors larger everywhere.
# This is the rounding model's own account; it shares no code with the CPU kernels' emulation in ``parity.cpu``.


# K has so many parts whose sums are rounded. Errors of 4 parts are 1.8 times those of one rounding, errors of 16 parts
# 3.1 times, which is within a limit of 1.7 times those of 4.
SPLITS = 4
_SMALLEST_PART = 32  # the terms that one instruction sums
# One instruction of a Hopper adds 32 products to a sum of 14 bits (arXiv 2511.10909); FP32 takes over every 128.
_PRODUCTS = 32
_SUM_BITS = 14
_PROMOTE_EVERY = 128
_TILE = 1 << 20  # products that are held at once
_SAMPLED = 64  # rows and columns of a sample
# The relative error of a product of normal numbers in E4M3: two errors, each uniform within 2^-4 of a mantissa.
_FORMAT_ERROR = 0.037
_NEXT_TO_NOTHING = 0.05  # this share of the format's error does not count
_LARGEST_MANTISSA = 1.75  # of E4M3's and E5M2's largest number, to which a tensor's scale maps its largest magnitude


def leaning(rounding: Rounding) -> tuple[str, ...]:
    """Name what kernels of this rounding may do that leans."""
    if rounding.inputs is tf32:
        return (TF32_TRUNCATED,)
    if rounding.weights is e4m3:
        return (FP8_14_BIT,)
    return (FP8_BLOCK_14_BIT,) if rounding.weights is e4m3_squares else ()


def as_kernels_lean(rounding: Rounding) -> str:
    """Say what is granted to kernels that lean, for a note."""
    return "along the change that kernels make with " + " or ".join(leaning(rounding))


def noisy_sums(rounding: Rounding) -> tuple[str, ...]:
    """Name what kernels of this rounding may do that is noise."""
    return () if rounding.storage is torch.float32 else (SPLIT_K_IN_OUTPUT_TYPE, ATTENTION_16_BIT_SUMS)


def as_read(rounding: Rounding, kernels: tuple[str, ...]) -> Rounding:
    """Return the rounding with the operands' formats as the kernels read them."""
    if TF32_TRUNCATED not in kernels:
        return rounding
    formats = (rounding.inputs, rounding.weights, rounding.gradients)
    inputs, weights, gradients = (tf32_truncated if one is tf32 else one for one in formats)
    return replace(rounding, inputs=inputs, weights=weights, gradients=gradients)


def in_stored_parts(left: Tensor, right: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return a product whose partial sums over K are stored before they are added; None if K has no two parts.

    Args:
        left: ``[..., m, k]``, FP32.
        right: ``[..., k, n]``, FP32.
        store: rounds to the output's type.
    """
    parts = min(SPLITS, left.shape[-1] // _SMALLEST_PART)
    if parts < 2:
        return None
    pairs = zip(left.tensor_split(parts, -1), right.tensor_split(parts, -2), strict=True)
    first, *others = (store(one @ other) for one, other in pairs)
    for other in others:
        first = store(first + other)
    return first


def lost_in_sums(left: Tensor, right: Tensor, kernels: tuple[str, ...], backward: bool) -> Tensor | None:
    """Compute what a Hopper's FP8 tensor cores lose of a product.

    One instruction shifts its products and the running sum to the largest exponent among them, and truncates what lies
    below 13 fraction bits there. Terms of both signs lose little by that; terms of one sign lose more the longer the
    sum is. A sample of the product tells whether the loss matters; if it does not, the rest is not computed.

    Args:
        left: ``[m, k]``, dequantized, FP32.
        right: ``[k, n]``, dequantized, FP32.
        kernels: names of what the kernels do.
        backward: whether sums are promoted to FP32 every 128 products, as TE asks for in the backward pass alone
            (``use_split_accumulator``, ``pytorch/module/base.py`` of 2.20.2); with block scales they always are.

    Returns:
        ``[m, n]``, FP32: the exact product minus the one that such kernels compute. None if they keep FP32 sums, or
        lose next to nothing.
    """
    has_blocks = FP8_BLOCK_14_BIT in kernels
    if not (has_blocks or FP8_14_BIT in kernels) or not left.numel() or not right.numel():
        return None
    interval = _PROMOTE_EVERY if has_blocks or backward else left.shape[-1]
    # Exponents are those of codes. The scales of blocks are powers of two, which move all of them alike.
    a, b = (left, right) if has_blocks else (_codes(left), _codes(right))
    some, others = _sample(a), _sample(b.t()).t()
    rounding = _FORMAT_ERROR * (some.square() @ others.square()).sum().sqrt()
    if torch.linalg.vector_norm(some @ others - _summed(some, others, interval)) < _NEXT_TO_NOTHING * rounding:
        return None
    rows = max(1, _TILE // (b.shape[1] * _PRODUCTS))
    computed = torch.cat([_summed(part, b, interval) for part in a.split(rows)])
    scale = 1.0 if has_blocks else (_scale(left) * _scale(right)).item()
    return (a @ b).sub_(computed).mul_(scale)


def _scale(x: Tensor) -> Tensor:
    """Return what codes are multiplied by, up to a power of two."""
    return (x.abs().amax() / _LARGEST_MANTISSA).clamp(min=torch.finfo(torch.float32).tiny)


def _codes(x: Tensor) -> Tensor:
    """Return the FP8 numbers, of few bits, of which the matrix holds multiples, up to a power of two."""
    return tf32(x / _scale(x))


def _sample(x: Tensor) -> Tensor:
    """Return rows from all over a matrix."""
    return x[:: max(1, len(x) // _SAMPLED)][:_SAMPLED]


def _summed(a: Tensor, b: Tensor, interval: int) -> Tensor:
    """Multiply ``[m, k]`` by ``[k, n]``, promoting the running sum every ``interval`` products."""
    promoted = running = a.new_zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], _PRODUCTS):
        if start % interval == 0:
            promoted, running = promoted + running, torch.zeros_like(running)
        left, right = a[:, start : start + _PRODUCTS, None], b[start : start + _PRODUCTS]
        largest = torch.maximum((_power_of_two(left) * _power_of_two(right)).amax(1), _power_of_two(running))
        unit = torch.where(largest > 0, largest, 1.0).mul_(2.0 ** (1 - _SUM_BITS))
        total = (left * right).div_(unit[:, None]).trunc_().sum(1).add_((running / unit).trunc_())
        running = _cut(total.mul_(unit))
    return promoted + running


def _power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two up to each magnitude; 0 for 0."""
    return (x.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


def _cut(x: Tensor) -> Tensor:
    """Truncate to the bits of a sum."""
    return (x.view(torch.int32) & -(1 << (24 - _SUM_BITS))).view(torch.float32)
