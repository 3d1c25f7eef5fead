"""What TransformerEngine's kernels on an Ada, a Hopper or a Blackwell may do otherwise than the CPU kernels by default.

Each row is an option of the CPU kernels (``parity.cpu.kernel_choices``, ``PARITY_KERNEL_CHOICES``). None of them has
been seen on a GPU by this project yet: a row says what its source allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from parity.cpu import kernel_choices as names
from parity.precision_names import PRECISION_NAMES

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
        name: of the option, as in ``parity.cpu.kernel_choices.NAMES``.
        gpus: ``ada``, ``hopper``, ``blackwell``: those whose kernels may do it.
        precisions: names of ``parity.precision`` in which it can show.
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
    """The choices that a kernel of this GPU has at this precision.

    Args:
        gpu: ``ada``, ``hopper`` or ``blackwell``.
        precision: a name of ``parity.precision``.

    Raises:
        ValueError: for a GPU or a precision that there is not.
    """
    if gpu not in _ALL_GPUS or precision not in PRECISION_NAMES:
        raise ValueError(
            f"no kernels are known of {gpu!r} at {precision!r}; GPUs are {', '.join(_ALL_GPUS)}, precisions "
            f"{', '.join(PRECISION_NAMES)}"
        )
    return tuple(choice for choice in CHOICES if gpu in choice.gpus and precision in choice.precisions)
