"""Fused attention, forward and backward, in FP16 and BF16: what TransformerEngine asks of cuDNN.

Follows ``csrc/extensions/attention.cpp`` of TE 2.20.2. ``parity.cpu.attention.flash`` computes; here lies what is
around it: layouts, sequence lengths, pages, and the tensors that the forward hands to the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parity.cpu import versions
from parity.cpu.attention import flash, layouts, masks
from parity.cpu.attention.flash import Attention
from parity.cpu.attention.layouts import Layout, Sequences
from parity.cpu.attention.masks import Band
from parity.cpu.enums import NVTE_Bias_Type, NVTE_QKV_Layout, NVTE_Softmax_Type

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]


@dataclass(frozen=True)
class _Problem:
    """What forward and backward share.

    Attributes:
        attention: without bias and seed, which each sequence has its own part of.
        bias: of the whole batch, or None.
        seed: of the dropout masks.
        cumulative: lengths of queries and of keys, ``[batch + 1]`` INT32 each.
        padded: the same with padding between sequences, or None.
    """

    layout: Layout
    attention: Attention
    bias: Tensor | None
    seed: int
    is_padded: bool
    cumulative: tuple[Tensor, Tensor]
    padded: tuple[Tensor | None, Tensor | None]
    page_table: Tensor | None = None


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
        Q: ``[batch, seq, heads, features]``, or as the layout says; FP16 or BF16.
        K: with GQA groups for heads; pages of a cache if the layout is paged.
        V: as K, with features of its own.
        cu_seqlens_q: cumulative lengths ``[batch + 1]``, INT32.
        cu_seqlens_q_padded: in ``thd``, where sequences start, ``[batch + 1]``. Default: without gaps.
        page_table_k: pages of each sequence, ``[batch, pages]``; that of V is the same.
        Bias: ``[batch or 1, heads or 1, seq_q or 1, seq_kv]``.
        SoftmaxOffset: the sink's score, ``[1, heads, 1, 1]`` FP32.

    Returns:
        O, 0 for padding; the log-sum-exp, FP32 ``[batch, heads, max_seqlen_q, 1]``, or ``[tokens, heads, 1]`` in
        ``thd``; the largest scores in the same shape if ``return_max_logit``; the RNG state, INT64 ``[2]``; the bias
        and the softmax offset if there are any.

    Raises:
        ValueError: for a dtype or a bias that cuDNN does not take.
        NotImplementedError: for FP8.
    """
    _check_operands("fused_attn_fwd", Q, K, V, bias_type)
    dropout = p_dropout if is_training else 0.0
    rng_state = _draw_rng_state(dropout, rng_gen)
    bias = Bias if bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS else None
    sink = SoftmaxOffset if softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else None
    band = masks.band(attn_mask_type, window_size, bottom_right_diagonal)
    problem = _Problem(
        layout=layouts.parse(qkv_layout),
        attention=_attention(attn_scale, band, bias_type, sink, dropout),
        bias=bias,
        seed=int(rng_state[0]),
        is_padded=masks.is_padding(attn_mask_type),
        cumulative=(cu_seqlens_q, cu_seqlens_kv),
        padded=(cu_seqlens_q_padded, cu_seqlens_kv_padded),
        page_table=page_table_k,
    )
    output, lse, largest = _forward(problem, Q.detach(), K.detach(), V.detach(), o_format, max_seqlen_q)
    maxima = [largest] if return_max_logit else []
    return [output, lse, *maxima, rng_state, *(tensor for tensor in (bias, sink) if tensor is not None)]


def _forward(
    problem: _Problem, query: Tensor, key: Tensor, value: Tensor, o_format: int, max_seqlen_q: int
) -> tuple[Tensor, Tensor, Tensor]:
    layout = problem.layout
    output_format = layouts.format_name(o_format, layout.query)
    shape = layouts.reshaped((*query.shape[:-1], value.shape[-1]), layout.query, output_format)
    output = query.new_zeros(shape) if problem.is_padded else query.new_empty(shape)
    lse = torch.full(_stats_shape(layout, query, max_seqlen_q), float("-inf"))
    largest = lse.clone()
    for sequences, attention in _parts(problem, query, key):
        part = flash.forward(sequences.query.of(query), sequences.key.of(key), sequences.key.of(value), attention)
        where = (sequences.query.in_format(output_format), sequences.per_query, sequences.per_query)
        for whole, place, result in zip((output, lse, largest), where, part, strict=True):
            place.of(whole).copy_(result)
    return output, lse, largest


def _stats_shape(layout: Layout, query: Tensor, max_seqlen_q: int) -> list[int]:
    """As cuDNN 9.6 and later lay statistics out."""
    if layout.query == "thd":
        return [*query.shape[:2], 1]
    return [query.shape[layout.query.index("b")], query.shape[layout.query.index("h")], max_seqlen_q, 1]


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
        Aux_CTX_Tensors: what the forward returned after O, without the largest scores.

    Returns:
        The gradients of Q, K and V, shaped and typed as they are and in one tensor if the layout says so; of the bias
        in its shape and dtype, or None; of the softmax offset, FP32 ``[1, heads, 1, 1]``, or None.

    Raises:
        ValueError: for a dtype or a bias that cuDNN does not take.
        NotImplementedError: for FP8.
    """
    _check_operands("fused_attn_bwd", Q, K, V, bias_type)
    lse, rng_state, *rest = Aux_CTX_Tensors
    bias = rest.pop(0) if bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS else None
    sink = rest.pop(0) if softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else None
    band = masks.band(attn_mask_type, window_size, bottom_right_diagonal)
    problem = _Problem(
        layout=layouts.parse(qkv_layout),
        attention=_attention(attn_scale, band, bias_type, sink, p_dropout),
        bias=bias,
        seed=int(rng_state[0]),
        is_padded=masks.is_padding(attn_mask_type),
        cumulative=(cu_seqlens_q, cu_seqlens_kv),
        padded=(cu_seqlens_q_padded, cu_seqlens_kv_padded),
    )
    unset = dqkv_layout == NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET
    layout = problem.layout if unset else layouts.parse(dqkv_layout)
    formats = [layouts.format_name(name, problem.layout.query) for name in (o_format, do_format)]
    return _backward(problem, _Tensors(Q, K, V, O, dO, lse), layout, *formats)


@dataclass(frozen=True)
class _Tensors:
    """What the backward reads."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    output_grad: Tensor
    lse: Tensor


def _backward(
    problem: _Problem, tensors: _Tensors, layout: Layout, output_format: str, output_grad_format: str
) -> list[Tensor | None]:
    shapes = [
        layouts.reshaped(tensor.shape, old, new)
        for tensor, old, new in (
            (tensors.query, problem.layout.query, layout.query),
            (tensors.key, problem.layout.key, layout.key),
            (tensors.value, problem.layout.key, layout.key),
        )
    ]
    buffers = layouts.gradient_buffers(layout, shapes, tensors.query.dtype)
    sink = problem.attention.sink
    bias_grad = None if problem.bias is None else torch.zeros(problem.bias.shape)
    sink_grad = None if sink is None else torch.zeros(1, sink.numel(), 1, 1)
    for sequences, attention in _parts(problem, tensors.query, tensors.key):
        part = flash.backward(
            sequences.query.of(tensors.query),
            sequences.key.of(tensors.key),
            sequences.key.of(tensors.value),
            sequences.query.in_format(output_format).of(tensors.output),
            sequences.query.in_format(output_grad_format).of(tensors.output_grad),
            sequences.per_query.of(tensors.lse),
            attention,
        )
        places = (sequences.query.in_format(layout.query), *(2 * [sequences.key.in_format(layout.key)]))
        for buffer, place, gradient in zip(buffers, places, (part.query, part.key, part.value), strict=True):
            place.of(buffer).copy_(gradient)
        if bias_grad is not None and part.bias is not None:
            _part_of_bias(bias_grad, sequences).add_(part.bias)
        if sink_grad is not None and part.sink is not None:
            sink_grad += part.sink.view(1, -1, 1, 1)
    return [*buffers, None if bias_grad is None else bias_grad.to(tensors.query.dtype), sink_grad]


def _attention(scale: float, band: Band, bias_type: int, sink: Tensor | None, dropout: float) -> Attention:
    return Attention(
        scale=scale,
        band=band,
        alibi=bias_type == NVTE_Bias_Type.NVTE_ALIBI,
        sink=None if sink is None else sink.detach().float().flatten(),
        dropout=dropout,
    )


def _parts(problem: _Problem, query: Tensor, key: Tensor) -> Iterator[tuple[Sequences, Attention]]:
    """The sequences to work on, each with its part of the bias and a seed of its own."""
    if problem.is_padded:
        query_lengths = layouts.lengths(problem.cumulative[0], problem.padded[0])
        key_lengths = layouts.lengths(problem.cumulative[1], problem.padded[1])
        parts = layouts.each_sequence(problem.layout, query_lengths, key_lengths, problem.page_table)
    else:
        parts = layouts.whole_batch(problem.layout, query, key)
    for number, sequences in enumerate(parts):
        bias = None if problem.bias is None else _part_of_bias(problem.bias, sequences)
        yield sequences, replace(problem.attention, bias=bias, seed=problem.seed + number)


def _part_of_bias(bias: Tensor, sequences: Sequences) -> Tensor:
    """``[batch or 1, heads or 1, queries or 1, keys]`` of these sequences, a view."""
    if bias.shape[0] > 1:
        bias = bias[sequences.query.batch]
    return bias[:, :, : sequences.query.length, : sequences.key.length]


def _draw_rng_state(dropout: float, generator: torch.Generator | None) -> Tensor:
    """Seed and offset, INT64 ``[2]``: drawn from the generator (default: the CPU's) if dropout needs any, else 0.

    On a GPU each call advances the GPU's generator; the CPU's also serves the user, so it is left alone where possible.
    """
    if dropout == 0.0:
        return torch.zeros(2, dtype=torch.int64)
    seed = torch.randint(1 << 62, (1,), generator=generator, dtype=torch.int64)
    return torch.cat([seed, torch.zeros_like(seed)])


def _check_operands(kernel: str, query: Any, key: Any, value: Any, bias_type: int) -> None:
    for name, tensor in (("Q", query), ("K", key), ("V", value)):
        if not isinstance(tensor, Tensor) or hasattr(tensor, "_quantizer"):
            raise NotImplementedError(
                f"the CPU kernel {kernel} serves FP16 and BF16, and no {type(tensor).__name__} for {name}, "
                f"which TransformerEngine {versions.installed_version()} asked for"
            )
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"{kernel}: {name} is {tensor.dtype}; cuDNN's fused attention takes FP16 and BF16")
    if bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        raise ValueError(f"{kernel}: cuDNN's fused attention has no bias that is added before scaling")
