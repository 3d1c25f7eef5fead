"""Fused attention, forward and backward: what TransformerEngine asks of cuDNN.

Follows ``csrc/extensions/attention.cpp`` of TE 2.20.2. ``fused_f16`` and ``fused_fp8`` compute; here lie the kernels'
parameters and the tensors that the forward hands to the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.cpu import versions
from parity.cpu.attention import fused_f16, fused_fp8, layouts, masks
from parity.cpu.attention.masks import Band
from parity.cpu.attention.problem import GradientFormats, Problem
from parity.cpu.attention.scores import Attention
from parity.cpu.enums import NVTE_Bias_Type, NVTE_QKV_Layout, NVTE_Softmax_Type
from parity.cpu.quantized import float8

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]


@torch.no_grad()
def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: int,
    o_format: int,
    qkv_scale_inv_format: int,
    bias_type: int,
    attn_mask_type: int,
    softmax_type: int,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: Tensor | None,
    SoftmaxOffset: Tensor | None,
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:
    """Attention; without padding in the mask type, sequence lengths are the tensors' own.

    Args:
        Q: ``[batch, seq, heads, features]``, or as the layout says; FP16, BF16 or TE's FP8 tensor.
        K: with GQA groups for heads; pages of a cache if the layout is paged.
        V: as K, with features of its own.
        fake_dtype: FP16 or BF16: what O is, or seems to be if it is quantized.
        cu_seqlens_q: cumulative lengths ``[batch + 1]``, INT32.
        cu_seqlens_q_padded: in ``thd``, where sequences start, ``[batch + 1]``. Default: without gaps.
        page_table_k: pages of each sequence, ``[batch, pages]``; that of V is the same.
        s_quantizer: with FP8, of the probabilities; keeps their amax.
        o_quantizer: with FP8, of O; with delayed scaling O is quantized and its amax kept.
        Bias: ``[batch or 1, heads or 1, seq_q or 1, seq_kv]``; not with FP8.
        SoftmaxOffset: the sink's score, ``[1, heads, 1, 1]`` FP32.

    Returns:
        O, 0 for padding; the log-sum-exp, FP32 ``[batch, heads, max_seqlen_q, 1]``, or ``[tokens, heads, 1]`` in
        ``thd``; the largest scores in the same shape if ``return_max_logit``; the RNG state, INT64 ``[2]``; the bias
        and the softmax offset if there are any.

    Raises:
        ValueError: for a dtype or a bias that cuDNN does not take.
        NotImplementedError: for tensors quantized otherwise than to FP8 with one scale a tensor.
    """
    is_fp8 = _check_operands("fused_attn_fwd", Q, K, V, bias_type, return_max_logit)
    dropout = p_dropout if is_training else 0.0
    rng_state = _draw_rng_state(dropout, rng_gen)
    bias = Bias if bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS else None
    sink = SoftmaxOffset if softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else None
    band = masks.band(attn_mask_type, window_size, bottom_right_diagonal)
    layout = layouts.parse(qkv_layout)
    problem = Problem(
        layout=layout,
        attention=_attention(attn_scale, band, bias_type, sink, dropout),
        bias=bias,
        seed=int(rng_state[0]),
        is_padded=masks.is_padding(attn_mask_type),
        cumulative=(cu_seqlens_q, cu_seqlens_kv),
        padded=(cu_seqlens_q_padded, cu_seqlens_kv_padded),
        output_format=layouts.format_name(o_format, layout.query),
        page_table=page_table_k,
    )
    results: tuple[Any, ...]
    if is_fp8:
        results = fused_fp8.forward(problem, Q, K, V, max_seqlen_q, s_quantizer, o_quantizer, fake_dtype)
    else:
        output, lse, largest = fused_f16.forward(problem, Q.detach(), K.detach(), V.detach(), max_seqlen_q)
        results = (output, lse, largest) if return_max_logit else (output, lse)
    return [*results, rng_state, *(tensor for tensor in (bias, sink) if tensor is not None)]


@torch.no_grad()
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: int,
    o_format: int,
    do_format: int,
    dqkv_layout: int,
    qkv_scale_inv_format: int,
    do_scale_inv_format: int,
    bias_type: int,
    attn_mask_type: int,
    softmax_type: int,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741
    dO: Tensor,
    fake_dtype: torch.dtype,
    Aux_CTX_Tensors: Sequence[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Tensor | None]:
    """The gradients of ``fused_attn_fwd``; arguments as there.

    Args:
        O: what the forward returned; with FP8 quantized, or FP16 and BF16.
        dO: quantized if Q is.
        Aux_CTX_Tensors: what the forward returned after O, without the largest scores.
        s_quantizer: with FP8, of the probabilities, with the scale that it had in the forward.
        dp_quantizer: with FP8, of the gradients of the scores; keeps their amax.
        dqkv_quantizer: with FP8, of the results; with delayed scaling they are quantized and their amax kept.

    Returns:
        The gradients of Q, K and V, shaped and typed as they are and in one tensor if the layout says so; of the bias
        in its shape and dtype, or None; of the softmax offset, FP32 ``[1, heads, 1, 1]``, or None.

    Raises:
        ValueError: for a dtype or a bias that cuDNN does not take.
        NotImplementedError: for tensors quantized otherwise than to FP8 with one scale a tensor.
    """
    is_fp8 = _check_operands("fused_attn_bwd", Q, K, V, bias_type)
    lse, rng_state, *rest = Aux_CTX_Tensors
    bias = rest.pop(0) if bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS else None
    sink = rest.pop(0) if softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else None
    band = masks.band(attn_mask_type, window_size, bottom_right_diagonal)
    layout = layouts.parse(qkv_layout)
    problem = Problem(
        layout=layout,
        attention=_attention(attn_scale, band, bias_type, sink, p_dropout),
        bias=bias,
        seed=int(rng_state[0]),
        is_padded=masks.is_padding(attn_mask_type),
        cumulative=(cu_seqlens_q, cu_seqlens_kv),
        padded=(cu_seqlens_q_padded, cu_seqlens_kv_padded),
        output_format=layouts.format_name(o_format, layout.query),
    )
    unset = dqkv_layout == NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET
    formats = GradientFormats(
        output=layouts.format_name(do_format, layout.query),
        inputs=layout if unset else layouts.parse(dqkv_layout),
    )
    if is_fp8:
        quantizers = (s_quantizer, dp_quantizer, dqkv_quantizer)
        return fused_fp8.backward(problem, fused_fp8.Tensors(Q, K, V, O, dO, lse), formats, *quantizers, fake_dtype)
    return fused_f16.backward(problem, fused_f16.Tensors(Q, K, V, O, dO, lse), formats)


def _attention(scale: float, band: Band, bias_type: int, sink: Tensor | None, dropout: float) -> Attention:
    return Attention(
        scale=scale,
        band=band,
        alibi=bias_type == NVTE_Bias_Type.NVTE_ALIBI,
        sink=None if sink is None else sink.detach().float().flatten(),
        dropout=dropout,
    )


def _draw_rng_state(dropout: float, generator: torch.Generator | None) -> Tensor:
    """Seed and offset, INT64 ``[2]``: drawn from the generator (default: the CPU's) if dropout needs any, else 0.

    On a GPU each call advances the GPU's generator; the CPU's also serves the user, so it is left alone where possible.
    """
    if dropout == 0.0:
        return torch.zeros(2, dtype=torch.int64)
    seed = torch.randint(1 << 62, (1,), generator=generator, dtype=torch.int64)
    return torch.cat([seed, torch.zeros_like(seed)])


def _check_operands(
    kernel: str, query: Any, key: Any, value: Any, bias_type: int, return_max_logit: bool = False
) -> bool:
    """Whether the operands are FP8."""
    operands = (("Q", query), ("K", key), ("V", value))
    if all(float8.is_float8_tensor(tensor) for _, tensor in operands):
        if bias_type != NVTE_Bias_Type.NVTE_NO_BIAS or return_max_logit:
            raise ValueError(f"{kernel}: cuDNN's fused attention has neither biases nor the largest logit in FP8")
        return True
    for name, tensor in operands:
        if not isinstance(tensor, Tensor) or hasattr(tensor, "_quantizer"):
            raise NotImplementedError(
                f"the CPU kernel {kernel} serves FP16, BF16 and FP8 with one scale a tensor, and no "
                f"{type(tensor).__name__} for {name}, which TransformerEngine {versions.installed_version()} asked for"
            )
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"{kernel}: {name} is {tensor.dtype}; cuDNN's fused attention takes FP16, BF16 and FP8")
    if bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        raise ValueError(f"{kernel}: cuDNN's fused attention has no bias that is added before scaling")
    return False
