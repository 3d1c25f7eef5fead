"""List and model what TransformerEngine's kernels on a GPU, from an Ada to an RTX Blackwell, may do differently.

Each row is an option of the CPU kernels (``te_on_cpu.kernel_choices``, ``PARITY_KERNEL_CHOICES``). A row says what its
source allows, and what was measured on one GPU: an H200 with TE 2.20.2, cuBLAS 13.1 and PyTorch 2.11, by
``parity.measuring.gpu_report.facts`` and by the table of kernels. A choice that the H200 does not make is granted all
the same, because other GPUs, shapes and versions of cuBLAS may make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from packaging.version import Version
from torch import Tensor

from parity.numerics.formats import Format, Quantized, Recast, Recasts, Rounding, tf32, tf32_truncated
from parity.settings import PRECISION_NAMES

# Things that TransformerEngine's kernels on a GPU may do, and that the CPU kernels do not do by default.

# The names of the CPU kernels' options, of which nothing is imported here (a test compares them).
TF32_TRUNCATED = "tf32-truncated"
TF32_TIES_AWAY = "tf32-ties-away"
FP32_EXACT = "fp32-exact"
FP8_14_BIT = "fp8-14-bit"
FP8_BLOCK_14_BIT = "fp8-block-14-bit"
SPLIT_K_IN_OUTPUT_TYPE = "split-k-in-output-type"
ATTENTION_16_BIT_SUMS = "attention-16-bit-sums"
MX_25_BIT = "mx-25-bit"
SUMS_25_BIT = "sums-25-bit"
# What no option of the CPU kernels chooses: the gradients of queries, keys and values are cast by one scale, and by
# the next layer by a slightly larger or smaller one, so that all are rounded the same way, since delayed scaling keeps
# a history for each. On the CPU kernels, a Llama layer's gradients leaned by -6.1 to +5.8 % in three seeds. In a
# training the two scales are known, and so is by how much gradients lean: 3.8 and 1.5 % instead of at most 6 %.
RECAST_UP = "recast-up"
RECAST_DOWN = "recast-down"

_ALL_GPUS = ("ada", "hopper", "blackwell", "rtx_blackwell")
_PER_TENSOR_FP8 = ("fp8_delayed", "fp8_current")
# Outputs, data gradients and most weight gradients are BF16 in the quantized precisions, too.
_SIXTEEN_BIT_RESULTS = tuple(name for name in PRECISION_NAMES if name != "fp32")
_SPLITS_K_BEFORE = "2.20"
_MMA_SIM = "MMA-Sim, arXiv 2511.10909, and its code, github.com/microsoft/MMA-Sim"
_CUBLASLT_GEMM = "TE 2.20.2, common/gemm/cublaslt_gemm.cu"
_TF32_ON_H200 = "not seen on an H200: operands are rounded to nearest, ties to even, in 12 shapes and layouts"
_PARTS_ON_H200 = "not seen on an H200, in 60 products with K up to 16384: each result is rounded once"


@dataclass(frozen=True)
class KernelChoice:
    """One thing that a faithful kernel may do.

    Attributes:
        name: the option's name, as in ``te_on_cpu.kernel_choices.NAMES``.
        gpus: the GPUs whose kernels may do it, of ``ada``, ``hopper``, ``blackwell`` and ``rtx_blackwell``.
        precisions: names in ``parity.te`` of the precisions in which it can show.
        does: what the kernel does, in a sentence.
        source: where this is documented or was measured by others.
        measured: what was measured on a GPU, or that nothing was.
        leans: whether errors lean one way, such as toward zero, and so add up with the length of a sum; if not, they
            are noise.
        before: the version of TE from which on only PyTorch's kernels may do it; empty if TE's may in all versions.
    """

    name: str
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]
    does: str
    source: str
    measured: str
    leans: bool
    before: str = ""


CHOICES = (
    KernelChoice(
        TF32_TRUNCATED,
        _ALL_GPUS,
        ("fp32",),
        "FP32 operands of a GEMM are cut to TF32's 10 mantissa bits, toward zero.",
        f"{_MMA_SIM}: every TF32 instruction (mma, wgmma, tcgen05) reads the upper 19 bits of an operand; "
        f"{_CUBLASLT_GEMM}: CUBLAS_COMPUTE_32F_FAST_TF32, whose conversion cuBLAS does not document",
        _TF32_ON_H200,
        leans=True,
    ),
    KernelChoice(
        TF32_TIES_AWAY,
        _ALL_GPUS,
        ("fp32",),
        "FP32 operands of a GEMM are rounded to TF32's 10 mantissa bits, to nearest, ties away from zero.",
        "PTX ISA 8.5, cvt.rna.tf32.f32; a kernel that converts before it multiplies has this rounding (CUTLASS 3.5, "
        f"include/cutlass/tfloat32.h, round_half_ulp_truncate); {_CUBLASLT_GEMM}: CUBLAS_COMPUTE_32F_FAST_TF32",
        _TF32_ON_H200,
        leans=False,
    ),
    KernelChoice(
        FP32_EXACT,
        _ALL_GPUS,
        ("fp32",),
        "GEMMs of FP32 operands compute in FP32, without TF32.",
        f"{_CUBLASLT_GEMM}: CUBLAS_COMPUTE_32F_FAST_TF32; cuBLAS 13, cublasComputeType_t: it allows the library to use "
        "tensor cores with TF32, and does not oblige it to",
        _TF32_ON_H200,
        leans=False,
    ),
    KernelChoice(
        FP8_14_BIT,
        ("ada", "hopper"),
        _PER_TENSOR_FP8,
        "Sums of FP8 products with one scale a tensor keep 14 bits: over all of K forward, over 128 products backward.",
        "DeepSeek-V3, arXiv 2412.19437, section 3.5.2; SageAttention2, arXiv 2411.10958; "
        f"{_MMA_SIM}: 13 fraction bits, 32 products a step on a Hopper, 16 on an Ada; TE 2.20.2, "
        "pytorch/module/base.py: _2X_ACC_FPROP = False, _2X_ACC_DGRAD = _2X_ACC_WGRAD = True; cuBLAS 13: "
        "CUBLASLT_MATMUL_DESC_FAST_ACCUM",
        "confirmed on an H200: its 12 products of the kernel table are equal to the bit; an Ada was not asked",
        leans=True,
    ),
    KernelChoice(
        FP8_BLOCK_14_BIT,
        ("hopper",),
        ("fp8_block",),
        "Sums of FP8 products keep 14 bits within a block of 128; the blocks are scaled and added in FP32.",
        "DeepSeek-V3, arXiv 2412.19437, section 3.3.2; CUTLASS 3.9, examples/67_hopper_fp8_warp_specialized_gemm_with_"
        "blockwise_scaling; TE 2.20.2, common/recipe/__init__.py: Float8BlockScaling",
        "confirmed on an H200: its 3 products of the kernel table are equal to the bit",
        leans=True,
    ),
    KernelChoice(
        SPLIT_K_IN_OUTPUT_TYPE,
        _ALL_GPUS,
        _SIXTEEN_BIT_RESULTS,
        "A GEMM with a 16-bit result splits K; each part's sum is rounded to the result's dtype and added in it.",
        "cuBLAS 13, cublasLtReductionScheme_t: CUBLASLT_REDUCTION_SCHEME_INPLACE and _OUTPUT_TYPE; "
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, which TE 2.19.0 does not set, allows all by default; TE 2.20.2 "
        "sets it to _COMPUTE_TYPE on every GPU (cublas_gemm in libtransformer_engine.so; TransformerEngine pull "
        "request 3440, after sums in BF16 were seen on an L40), so only PyTorch's own products may still do it",
        _PARTS_ON_H200,
        leans=False,
        before=_SPLITS_K_BEFORE,
    ),
    KernelChoice(
        ATTENTION_16_BIT_SUMS,
        _ALL_GPUS,
        _SIXTEEN_BIT_RESULTS,
        "The products of unfused attention split K, and add the parts' sums in FP16 or BF16.",
        "PyTorch 2.13, torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction and allow_bf16_..., both True "
        "unless set (docs: notes/numerical_accuracy); TE 2.20.2, pytorch/attention/dot_product_attention/backends.py: "
        "torch.baddbmm and torch.bmm",
        _PARTS_ON_H200,
        leans=False,
    ),
    KernelChoice(
        MX_25_BIT,
        ("blackwell", "rtx_blackwell"),
        ("mxfp8", "nvfp4"),
        "A sum of MXFP8 products keeps 25 fraction bits of its largest term, 32 products a step, one of NVFP4 35, 64 "
        "a step; both are cut to FP32, toward zero, after each step.",
        f"{_MMA_SIM}: tcgen05.mma with block scales, and mma of an RTX Blackwell",
        "no Blackwell was asked",
        leans=True,
    ),
    KernelChoice(
        SUMS_25_BIT,
        ("hopper", "blackwell", "rtx_blackwell"),
        ("fp32", "fp16"),
        "A sum of TF32 products keeps 25 fraction bits of its largest term, 8 products a step, one of BF16 or FP16 so "
        "too, 16 a step; both are cut to FP32, toward zero, after each step. A BF16 result's own rounding hides it.",
        f"{_MMA_SIM}: wgmma, tcgen05.mma, and mma of an RTX Blackwell",
        "confirmed on an H200: bits, products and cuts, though the smaller two of four shapes of TF32 add some sums to "
        "nearest; no Blackwell was asked",
        leans=True,
    ),
)


def of(gpu: str, precision: str) -> tuple[KernelChoice, ...]:
    """Return the choices that the kernels of this GPU have at this precision.

    Args:
        gpu: ``ada``, ``hopper``, ``blackwell`` or ``rtx_blackwell``.
        precision: a name of ``parity.te``.

    Raises:
        ValueError: for an unknown GPU or precision.
    """
    if gpu not in _ALL_GPUS or precision not in PRECISION_NAMES:
        raise ValueError(
            f"no kernels are known for {gpu!r} at {precision!r}; GPUs are {', '.join(_ALL_GPUS)}, precisions "
            f"{', '.join(PRECISION_NAMES)}"
        )
    return tuple(choice for choice in CHOICES if gpu in choice.gpus and precision in choice.precisions)


# Model what GEMM kernels of real GPUs may do beyond rounding operands and results once.
#
# Some of these errors lean: truncating TF32 operands shrinks every product, and a tensor core that keeps 14 bits of a
# sum loses the low bits of terms of one sign. Errors that lean are granted only along the change that they make
# (``parity.judge.judge``). The others are noise: partial sums that are rounded to 16 bits make errors larger
# everywhere. This model shares no code with the CPU kernels' emulation in ``te_on_cpu``.


# The number of parts of K whose sums are rounded. Errors of 4 parts are 1.8 times those of one rounding, errors of 16
# parts 3.1 times, which is within a limit of 1.7 times those of 4.
SPLITS = 4
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})  # of ATen
_SMALLEST_PART = 32  # the terms that one instruction sums
_PROMOTE_EVERY = 128  # products of FP8 after which the sum continues in FP32
_TILE = 1 << 20  # products that are held at once
_SAMPLED = 64  # rows and columns of a sample
# The relative errors of a product of normal numbers in E4M3 (two errors, each uniform within 2^-4 of a mantissa), of
# one in TF32 (within 2^-11), and of a result that is rounded once to FP16.
_E4M3_ERROR = 0.037
_TF32_ERROR = _E4M3_ERROR / 2**7
_FP16_ERROR = _TF32_ERROR / 2**0.5
_NEXT_TO_NOTHING = 0.05  # a loss below this share of the format's error does not count
_LARGEST_MANTISSA = 1.75  # of E4M3's and E5M2's largest number, to which a tensor's scale maps its largest magnitude


def biased_kernels(rounding: Rounding) -> tuple[str, ...]:
    """Return the names of the choices that lean, for kernels with this rounding."""
    if rounding.inputs is tf32:
        return (TF32_TRUNCATED, SUMS_25_BIT)
    if rounding.storage is torch.float16:
        return (SUMS_25_BIT,)
    recast = (RECAST_UP, RECAST_DOWN) if rounding.attention.qkv_gradients is not None else ()
    if not isinstance(rounding.weights, Quantized) or rounding.weights.numbers == "E2M1":
        return recast
    return (*{0: (FP8_14_BIT,), 128: (FP8_BLOCK_14_BIT,)}.get(rounding.weights.along, ()), *recast)


def as_kernels_lean(rounding: Rounding) -> str:
    """Return the words of a note that say which leaning errors are granted."""
    names = [name for name in biased_kernels(rounding) if name not in (RECAST_UP, RECAST_DOWN)]
    if len(names) < len(biased_kernels(rounding)):
        names.append("scales of two histories, by which gradients of queries, keys and values are cast,")
    return f"its error lies in the direction in which kernels with {' or '.join(names)} change it"


def may_split_k(te_version: str, plain: Iterable[str] = ()) -> bool:
    """Return whether a port's GEMMs may add parts of a sum in 16 bits.

    Args:
        te_version: the version of TE whose kernels multiply.
        plain: names of the ATen functions that the port calls by itself.
    """
    return Version(te_version) < Version(_SPLITS_K_BEFORE) or not _PRODUCTS.isdisjoint(plain)


def noisy_sums(rounding: Rounding, splits_k: bool) -> tuple[str, ...]:
    """Return the names of the choices that add noise, for kernels with this rounding."""
    if rounding.storage is torch.float32:
        return ()
    return (SPLIT_K_IN_OUTPUT_TYPE, ATTENTION_16_BIT_SUMS) if splits_k else (ATTENTION_16_BIT_SUMS,)


def as_read(rounding: Rounding, kernels: tuple[str, ...]) -> Rounding:
    """Return the rounding with the formats in which these kernels read operands."""
    if RECAST_UP in kernels or RECAST_DOWN in kernels:
        gradients = _make_lean(rounding.attention.qkv_gradients, RECAST_UP in kernels)
        return replace(rounding, attention=replace(rounding.attention, qkv_gradients=gradients))
    if TF32_TRUNCATED not in kernels:
        return rounding
    formats = (rounding.inputs, rounding.weights, rounding.gradients)
    inputs, weights, gradients = (tf32_truncated if one is tf32 else one for one in formats)
    return replace(rounding, inputs=inputs, weights=weights, gradients=gradients)


def as_scaled(rounding: Rounding, recasts: Recasts) -> Rounding:
    """Return the rounding of kernels that cast gradients of queries, keys and values by these scales."""
    gradients = rounding.attention.qkv_gradients
    known = replace(gradients, amaxes=recasts) if isinstance(gradients, Recast) else gradients
    return replace(rounding, attention=replace(rounding.attention, qkv_gradients=known))


def _make_lean(stored: Format | None, is_up: bool) -> Format | None:
    """Return a format whose numbers are all rounded up the second time, or all down."""
    if not isinstance(stored, Recast):
        return stored
    # Normal numbers lean by 6 % at most with E5M2's two bits of mantissa, with E4M3's three by 3 %.
    leans_by = {"E4M3": 1 / 32, "E5M2": 1 / 16}[stored.to_format.numbers]
    return replace(stored, gain=1.0 + leans_by if is_up else 1.0 - leans_by)


def in_stored_parts(left: Tensor, right: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return a product whose partial sums over K are rounded before they are added, or None if K is too short.

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


@dataclass(frozen=True)
class _Sums:
    """The way in which tensor cores add.

    Attributes:
        products: how many products one instruction adds to the running sum.
        term_bits: how many bits all terms keep, counted from the leading bit of the largest term.
        sum_bits: how many bits the significand of the running sum has.
        exact: a dtype that holds one instruction's sum exactly.
    """

    products: int
    term_bits: int
    sum_bits: int
    exact: torch.dtype


# How a Hopper adds (arXiv 2511.10909).
_FP8_SUMS = _Sums(32, 14, 14, torch.float32)
_TF32_SUMS = _Sums(8, 26, 24, torch.float64)
_FP16_SUMS = _Sums(16, 26, 24, torch.float64)


def lost_in_sums(
    left: Tensor, right: Tensor, kernels: tuple[str, ...], backward: bool, storage: torch.dtype
) -> Tensor | None:
    """Return the part of a product that a Hopper's tensor cores lose.

    One instruction aligns its products and the running sum to the largest exponent among them, and truncates the bits
    after 13 fraction bits in FP8, or after 25 in other formats, whose sum is then cut to FP32. This loses little if
    terms have both signs. If they have one sign, the loss grows with the length of the sum. A sample of the product
    shows whether the loss matters; if it does not, the rest is not computed.

    Args:
        left: ``[m, k]``, dequantized, FP32.
        right: ``[k, n]``, dequantized, FP32.
        kernels: names of the kernels' choices.
        backward: whether sums of FP8 are promoted to FP32 every 128 products, which TE requests only in the backward
            pass (``use_split_accumulator``, ``pytorch/module/base.py`` of 2.20.2). With block scales they always are.
        storage: dtype of stored results.

    Returns:
        ``[m, n]``, FP32: the exact product minus the one that such kernels compute. None if they keep FP32 sums, or
        if the loss is negligible.
    """
    if not left.numel() or not right.numel():
        return None
    if SUMS_25_BIT in kernels:
        return _compute_lost_part(left, right, _TF32_SUMS if storage is torch.float32 else _FP16_SUMS, left.shape[-1])
    has_blocks = FP8_BLOCK_14_BIT in kernels
    if not (has_blocks or FP8_14_BIT in kernels):
        return None
    interval = _PROMOTE_EVERY if has_blocks or backward else left.shape[-1]
    if has_blocks:
        return _compute_lost_part(left, right, _FP8_SUMS, interval)
    # The exponents are those of the FP8 codes. With blocks this makes no difference, as their scales are powers of two.
    lost = _compute_lost_part(_recover_codes(left), _recover_codes(right), _FP8_SUMS, interval)
    return None if lost is None else lost.mul_((_recover_scale(left) * _recover_scale(right)).item())


def _compute_lost_part(a: Tensor, b: Tensor, sums: _Sums, interval: int) -> Tensor | None:
    """Return the exact product minus the one that tensor cores compute, or None if a sample shows that it is small."""
    some, others = _sample_rows(a), _sample_rows(b.t()).t()
    if torch.linalg.vector_norm(_cut_off(some, others, sums, interval)) < _NEXT_TO_NOTHING * _estimate_rounding(
        some, others, sums
    ):
        return None
    rows = max(1, _TILE // (b.shape[1] * sums.products))
    return torch.cat([_cut_off(part, b, sums, interval) for part in a.split(rows)])


def _estimate_rounding(a: Tensor, b: Tensor, sums: _Sums) -> Tensor:
    """Estimate the error of a product from the rounding of its operands, or in FP16 from that of its result."""
    if sums is _FP16_SUMS:
        return _FP16_ERROR * torch.linalg.vector_norm(a @ b)
    return (_E4M3_ERROR if sums is _FP8_SUMS else _TF32_ERROR) * (a.square() @ b.square()).sum().sqrt()


def _recover_scale(x: Tensor) -> Tensor:
    """Return the scale by which FP8 codes are multiplied, up to a power of two."""
    return (x.abs().amax() / _LARGEST_MANTISSA).clamp(min=torch.finfo(torch.float32).tiny)


def _recover_codes(x: Tensor) -> Tensor:
    """Return the FP8 codes that the matrix holds, without their scale, up to a power of two."""
    return tf32(x / _recover_scale(x))


def _sample_rows(x: Tensor) -> Tensor:
    """Return evenly spaced rows of a matrix."""
    return x[:: max(1, len(x) // _SAMPLED)][:_SAMPLED]


def _cut_off(a: Tensor, b: Tensor, sums: _Sums, interval: int) -> Tensor:
    """Return the loss of ``[m, k]`` times ``[k, n]``, with sums promoted to FP32 every ``interval`` products."""
    a, b = a.to(sums.exact), b.to(sums.exact)
    promoted = running = a.new_zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], sums.products):
        if start % interval == 0:
            promoted, running = promoted + running, torch.zeros_like(running)
        left, right = a[:, start : start + sums.products, None], b[start : start + sums.products]
        largest = torch.maximum((_power_of_two(left) * _power_of_two(right)).amax(1), _power_of_two(running))
        unit = torch.where(largest > 0, largest, 1.0).mul_(2.0 ** (1 - sums.term_bits))
        total = (left * right).div_(unit[:, None], rounding_mode="trunc").sum(1)
        total.add_(running.div_(unit, rounding_mode="trunc"))
        running = _truncate_significand(total.mul_(unit), sums.sum_bits)
    return (a @ b).sub_(promoted).sub_(running).float()


# For each float, the integer type of its size, the mask of its exponent, and the bits of its significand.
_BITS = {
    torch.float32: (torch.int32, 0xFF << 23, 24),
    torch.float64: (torch.int64, 0x7FF << 52, 53),
}


def _power_of_two(x: Tensor) -> Tensor:
    """Return the power of two at or below each magnitude, and 0 for 0."""
    integers, exponent, _ = _BITS[x.dtype]
    return (x.contiguous().view(integers) & exponent).view(x.dtype)


def _truncate_significand(x: Tensor, bits: int) -> Tensor:
    """Truncate each number to a significand of so many bits."""
    integers, _, all_bits = _BITS[x.dtype]
    return (x.view(integers) & -(1 << (all_bits - bits))).view(x.dtype)
