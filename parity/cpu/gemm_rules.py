"""Refuse the matrix products that TransformerEngine and cuBLAS refuse.

Follows ``CanonicalizeGemmInput`` and ``cublas_gemm`` in ``common/gemm/cublaslt_gemm.cu`` and
``convert_block_scaling_to_mxfp8_tensor`` in ``csrc/extensions/swizzle.cpp`` (NVIDIA/TransformerEngine at 2.20.0.dev0),
in their order. What cuBLAS itself turns down is what TE's own tests expect of it
(``tests/pytorch/test_float8_blockwise_gemm_exact.py``) and cuBLAS's table of FP8 types. Operands without elements are
never refused, since TE makes no GEMM of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from parity.cpu import block_scaling, cuda, float8, formats, nvfp4

_ALIGNMENT = 16
_BLOCK_ALIGNMENT = 8

# What the dimensions of a linear layer's GEMMs are, by transA and transB: of the result, the input's gradient and the
# weight's gradient. No layer transposes both operands.
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
    """Describe a product ``D[n, m] = op(B)[n, k] op(A)[k, m]`` as TE's ``generic_gemm`` is asked for it.

    Attributes:
        A: a tensor, or a TE quantized tensor; likewise B.
        transA: whether A is ``[m, k]``.
        transB: whether B is ``[k, n]``.
        dtype: the dtype of the result.
        bias: whether a bias is added or, if ``grad``, its gradient computed.
        gelu: whether GELU or, if ``grad``, its derivative is applied.
        split: whether sums of FP8 products are promoted to FP32 again and again.
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
            f" and B a {type(request.B).__name__}; quantize both by one recipe"
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
            "generic_gemm: cuBLAS multiplies no E5M2 by E5M2 (CUBLAS_STATUS_NOT_SUPPORTED); one of the two has to be "
            "E4M3"
        )


def _check_leading_dimensions(request: Request) -> None:
    """Check the dimension that lies contiguously in memory of operands with one FP8 scale a tensor.

    That is k where GEMMs read transposed copies. A Blackwell reads the codes as they are, so that it is the last
    dimension of the tensor, and the number of tokens is none of the weight's gradient's.
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
    """Check operands with a scale per block of 128, which a Blackwell multiplies as MXFP8 with copied scales."""
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
            "block scaled GEMM, which has a bias or the derivative of GELU; compute a GELU or a bias gradient by itself"
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
