"""The projection of MLA's queries with RoPE and a cast to MXFP8: kernels that TE's ``FusedMLAQUpProjRopeQuant`` calls.

Stands for ``gemm_proj_rope_mxfp8_wrapper_sm100`` of cuDNN's Python frontend (1.32.0,
``gemm/cutedsl/dense/proj_rope_mxfp8``), whose kernels are open: the product of BF16 or MXFP8 operands is added in FP32
and rounded to BF16; then the last 64 of 192 features of each head are rotated in FP32, without rounding before the
cast. They read neighbours and write halves. And for the Triton kernel ``rotary_bwd_q_kernel`` of TE 2.20's
``pytorch/attention/fused_mla_q_uproj.py``, which rotates the gradient back.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from te_on_cpu import float8, mxfp8
from te_on_cpu.graphs import recorded

_FEATURES, _ROTATED, _BLOCK, _TOKENS = 192, 64, 32, 128
# TE imports this from ``cuda.bindings`` to hand its stream to the kernel.
driver = SimpleNamespace(CUstream=lambda stream: stream)


def gemm_proj_rope_mxfp8_wrapper_sm100(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Return what ``_project_and_rotate`` does, as a kernel that a capture records."""
    return cast(dict[str, Tensor], recorded(_project_and_rotate)(*args, **kwargs))


def _project_and_rotate(
    x: Tensor,
    w: Tensor,
    cos: Tensor,
    sin: Tensor,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    w_out_in: bool = True,
    stream: Any = None,
) -> dict[str, Tensor]:
    """Return the queries, ``[tokens, heads, 192]``, cast in blocks of 32 features and in blocks of 32 tokens.

    Args:
        x: BF16 or E4M3, ``[tokens, k]``.
        w: in the dtype of ``x``, ``[heads * 192, k]``.
        cos, sin: BF16 ``[tokens, 64]``.
        x_scale, w_scale: E8M0 bytes of the blocks of E4M3 operands, ``[.., k / 32]``.
        w_out_in: True, as TE lays out weights.
        stream: not used.

    Returns:
        ``out_fp8_row`` and ``out_fp8_col``, the E4M3 codes, and ``out_scales_row``, ``[tokens, heads, 6]``, and
        ``out_scales_col``, ``[tokens / 32, heads, 192]``, their E8M0 bytes.

    Raises:
        ValueError: for sizes that the kernel does not take.
    """
    tokens, heads = len(x), len(w) // _FEATURES
    if tokens % _TOKENS:
        raise ValueError(f"tokens ({tokens}) must be a multiple of TILE_M ({_TOKENS})")
    if len(w) % _FEATURES:
        raise ValueError(f"w must be [N, K] with N a multiple of HEAD_DIM ({_FEATURES}); got {tuple(w.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (tokens, _ROTATED):
            raise ValueError(f"{name} must be [tokens, QK_ROPE] = [{tokens}, {_ROTATED}]; got {tuple(table.shape)}")
    if x_scale is not None and heads % 2:
        raise ValueError(f"num_heads ({heads}) must be even for the MXFP8-input kernel (SFB scale-relay pairing)")
    product = _read_blocks("x_scale", x, x_scale) @ _read_blocks("w_scale", w, w_scale).t()
    queries = product.bfloat16().float().view(tokens, heads, _FEATURES)
    plain, rotated = queries.split([_FEATURES - _ROTATED, _ROTATED], -1)
    first, second = rotated[..., ::2], rotated[..., 1::2]
    cos_halves, sin_halves = (table.float()[:, None].chunk(2, -1) for table in (cos, sin))
    left = first * cos_halves[0] - second * sin_halves[0]
    right = first * sin_halves[1] + second * cos_halves[1]
    values = torch.cat([plain, left, right], -1)
    row_codes, row_scales = _cast_blocks(values.unflatten(-1, (-1, _BLOCK)), -1)
    column_codes, column_scales = _cast_blocks(values.unflatten(0, (-1, _BLOCK)), 1)
    return {
        "out_fp8_row": row_codes.view(values.shape),
        "out_scales_row": row_scales,
        "out_fp8_col": column_codes.view(values.shape),
        "out_scales_col": column_scales,
    }


def _read_blocks(name: str, codes: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None:
        return codes.float()
    rows, k = codes.shape
    if k % _BLOCK or scales.shape != (rows, k // _BLOCK):
        raise ValueError(f"{name} must be [{rows}, K//{_BLOCK}] = [{rows}, {k // _BLOCK}]; got {tuple(scales.shape)}")
    return (codes.float().unflatten(-1, (-1, _BLOCK)) * mxfp8.from_e8m0(scales)[..., None]).flatten(1)


def _cast_blocks(blocks: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks along ``dim`` in their shape, and the E8M0 byte of each block."""
    dtype = torch.float8_e4m3fn
    exponents = mxfp8.to_e8m0(blocks.abs().amax(dim) * mxfp8.reciprocal_limit(dtype))
    codes = float8.cast(blocks * mxfp8.encoding_scale(exponents).unsqueeze(dim), dtype)
    return codes.view(dtype), exponents


def rotate_gradient(
    gradient: Tensor,
    cos: Tensor,
    sin: Tensor,
    unrotated: int,
    rotated: int,
    heads: int,
    batch: int,
    sequences: int | None,
    cu_seqlens: Tensor | None,
    *_strides_and_ranks: int,
) -> None:
    """Rotate the last ``rotated`` features of ``gradient``, ``[tokens, heads, features]``, back in place."""
    if cu_seqlens is not None:
        raise NotImplementedError("the CPU kernels have no counterpart to rotary_bwd_q_kernel for packed sequences")
    x = gradient[..., unrotated:].float()
    left, right = x.chunk(2, -1)
    places = torch.arange(len(x)) // batch
    cos_halves, sin_halves = (table[places].float()[:, None].chunk(2, -1) for table in (cos, sin))
    first = left * cos_halves[0] + right * sin_halves[1]
    second = right * cos_halves[1] - left * sin_halves[0]
    gradient[..., unrotated:] = torch.stack([first, second], -1).flatten(-2).to(gradient.dtype)
