"""Fused attention: the configurations that the emulated GPU serves, forward and backward, and the KV cache.

Follows ``csrc/extensions/attention.cpp`` of TransformerEngine 2.20.2. ``flash`` and ``flash_fp8`` compute. This module
handles the kernels' parameters, and the tensors that the forward pass hands to the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import attention_problem, cuda, flash, flash_fp8, float8, mxfp8, versions
from te_on_cpu.attention_problem import Attention, Band, GradientFormats, Layout, Problem, format_name, parse_layout
from te_on_cpu.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

__all__ = [
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "get_fused_attn_backend",
    "multi_tensor_transpose_to_bhsd",
]

# The choice of a fused attention backend for a configuration.
#
# TransformerEngine up to 2.19 has the rules in its source (``nvte_get_fused_attn_backend`` in
# ``common/fused_attn/fused_attn.cpp``). 2.20 asks cuDNN itself, which is not available here, so the rules from TE's
# source serve every version. Only those for the cuDNN version of ``te_on_cpu.cuda`` and for the configurations that
# ``te_on_cpu.attention`` computes are here; those for other versions of cuDNN, and the kernels for short sequences
# that TE 2.14 and 2.15 still had, are left out.


_F16_DTYPES = (DType.kFloat16, DType.kBFloat16)
_FP8_DTYPES = (DType.kFloat8E4M3, DType.kFloat8E5M2)
_LAST_CUDNN_WITH_GRAPH_BUG = 91500
_CUDNN_9_18_1 = 91801
_CUDNN_9_21 = 92100


@dataclass(frozen=True)
class _Configuration:
    """Hold the parameters that decide, named and ordered as TE up to 2.19 passes them, in elements and tokens."""

    is_training: bool
    qkv_dtype: int
    kv_dtype: int
    qkv_layout: int
    bias_type: int
    attn_mask_type: int
    softmax_type: int
    dropout: float
    num_attn_heads: int
    num_gqa_groups: int
    max_seqlen_q: int
    max_seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    window_size_left: int
    window_size_right: int
    return_max_logit: bool
    cuda_graph: bool
    deterministic: bool


def get_fused_attn_backend(
    *configuration: Any,
) -> NVTE_Fused_Attn_Backend | tuple[NVTE_Fused_Attn_Backend, str]:
    """Return cuDNN's backend for FP8, or for FP16 and BF16, if it serves this configuration, and otherwise no backend.

    TE 2.20 passes one object and also expects the reason. Up to 2.19, TE passes each property separately and expects
    only the backend (``attention/dot_product_attention/utils.py``).
    """
    if len(configuration) == 1:
        return _choose(_from_object(configuration[0]))
    return _choose(_Configuration(*configuration))[0]


def _from_object(parameters: Any) -> _Configuration:
    names = [field.name for field in fields(_Configuration) if field.name != "kv_dtype"]
    return _Configuration(kv_dtype=parameters.qkv_dtype, **{name: getattr(parameters, name) for name in names})


def _choose(configuration: _Configuration) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Return the backend and an empty reason, or no backend and why cuDNN does not serve this configuration."""
    is_fp8 = configuration.qkv_dtype in _FP8_DTYPES
    reason = next((_objections_in_fp8 if is_fp8 else _objections)(configuration), "")
    if reason:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, reason
    name = "NVTE_FP8" if is_fp8 else "NVTE_F16_arbitrary_seqlen"
    return NVTE_Fused_Attn_Backend[name], ""


def _objections_in_fp8(configuration: _Configuration) -> Iterator[str]:
    """Yield the rules of cuDNN 9.7 and later that are broken; TE's Python checks sliding windows and recipes itself.

    From 9.21 on, there are MXFP8, whose operands TE may pass as ``bhsd``, and softmax sinks.
    """
    c, architecture = configuration, _architecture()
    is_newer = cuda.cudnn_version() >= _CUDNN_9_21
    if architecture < 90:
        yield f"FP8 attention needs compute capability 9.0, and the GPU has {architecture / 10}"
    if c.kv_dtype != c.qkv_dtype:
        yield "Q and K have different dtypes"
    layout = attention_problem.parse_layout(c.qkv_layout)
    formats = ("bshd", "sbhd", "bhsd") if is_newer else ("bshd", "sbhd")
    if layout.query not in formats or layout.key != layout.query:
        yield f"FP8 attention needs queries and keys in the same format, one of {', '.join(formats)}"
    if c.bias_type != NVTE_Bias_Type.NVTE_NO_BIAS:
        yield "FP8 attention does not support a bias"
    if c.softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX and not is_newer:
        yield "FP8 attention does not support softmax sinks before cuDNN 9.21"
    if c.return_max_logit:
        yield "FP8 attention does not return the largest logit"
    if "BOTTOM_RIGHT" in NVTE_Mask_Type(c.attn_mask_type).name:
        yield "FP8 attention supports only causal masks that are aligned top left"
    if not _head_dimensions_fit_in_fp8(c, architecture):
        yield f"FP8 attention does not support head dimensions {c.head_dim_qk} (Q, K) and {c.head_dim_v} (V)"


def _head_dimensions_fit_in_fp8(c: _Configuration, architecture: int) -> bool:
    if c.head_dim_qk % 16 or c.head_dim_v % 16:
        return False
    if architecture < 100 and c.is_training:
        return c.head_dim_qk == c.head_dim_v == 128
    return max(c.head_dim_qk, c.head_dim_v) <= (256 if architecture < 100 else 128)


def _objections(configuration: _Configuration) -> Iterator[str]:
    """Yield each reason why cuDNN does not serve this configuration in FP16 and BF16."""
    c, architecture = configuration, _architecture()
    if c.qkv_dtype not in _F16_DTYPES or c.kv_dtype != c.qkv_dtype:
        yield "fused attention takes FP16, BF16 and FP8"
    if architecture < 80:
        yield f"fused attention needs compute capability 8.0, and the GPU has {architecture / 10}"
    layout = attention_problem.parse_layout(c.qkv_layout)
    if c.qkv_layout == NVTE_QKV_Layout.NVTE_BHSD_BHSD_BHSD:
        yield "only FP8 attention supports the layout bhsd_bhsd_bhsd"
    if layout.query == "thd" and not attention_problem.is_padding(c.attn_mask_type):
        yield "packed sequences (thd) need a padding mask"
    if "thd" in (layout.query, layout.key) and architecture < 90:
        yield "packed sequences (thd) need compute capability 9.0"
    if layout.paged and not attention_problem.is_padding(c.attn_mask_type):
        yield "a paged cache needs a padding mask"
    if not _head_dimensions_fit(c, layout, architecture):
        yield f"head dimensions {c.head_dim_qk} (Q, K) and {c.head_dim_v} (V) are not supported"
    yield from _objections_to_bias(c, architecture)
    yield from _objections_to_mask(c, layout)
    if architecture == 120:
        yield from _objections_of_rtx_blackwell(c)
    extras = (c.dropout != 0.0) + (c.bias_type != NVTE_Bias_Type.NVTE_NO_BIAS)
    is_deterministic = architecture != 120 and cuda.cudnn_version() >= _CUDNN_9_18_1 and not extras
    if architecture >= 100 and c.is_training and (extras == 2 or (c.deterministic and not is_deterministic)):
        yield "on Blackwell, the backward pass supports neither deterministic mode nor dropout with a bias"
    in_graph = c.cuda_graph and c.is_training and cuda.cudnn_version() <= _LAST_CUDNN_WITH_GRAPH_BUG
    if in_graph and c.max_seqlen_kv % 128 and not attention_problem.is_padding(c.attn_mask_type):
        yield "in a CUDA graph, this cuDNN needs keys in multiples of 128"


def _objections_of_rtx_blackwell(c: _Configuration) -> Iterator[str]:
    if cuda.cudnn_version() < _CUDNN_9_18_1:
        yield "on an RTX Blackwell, fused attention needs cuDNN 9.18.1"
    if c.qkv_layout in (NVTE_QKV_Layout.NVTE_T3HD, NVTE_QKV_Layout.NVTE_TH3D):
        yield "on an RTX Blackwell, packed sequences cannot lie in one tensor with queries, keys and values"


def _architecture() -> int:
    major, minor = cuda.get_device_capability()
    return 10 * major + minor


def _head_dimensions_fit(c: _Configuration, layout: Layout, architecture: int) -> bool:
    larger = max(c.head_dim_qk, c.head_dim_v)
    if c.head_dim_qk % 8 or c.head_dim_v % 8:
        return False
    if (c.head_dim_qk, c.head_dim_v) == (192, 128) and c.is_training:
        return architecture == 90 or architecture >= 100
    if c.is_training:
        hopper = architecture == 90 and larger <= 256
        differ_and_are_large = c.head_dim_qk != c.head_dim_v and min(c.head_dim_qk, c.head_dim_v) >= 128
        return larger <= 128 or (hopper and not differ_and_are_large)
    top_left = c.attn_mask_type in (NVTE_Mask_Type.NVTE_CAUSAL_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)
    return larger <= (256 if architecture == 90 else 128) or layout.paged or c.max_seqlen_q > 1 or not top_left


def _objections_to_bias(c: _Configuration, architecture: int) -> Iterator[str]:
    if c.bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        yield "cuDNN has no bias that is added before scaling"
    if c.bias_type == NVTE_Bias_Type.NVTE_ALIBI:
        if not attention_problem.is_causal(c.attn_mask_type) or attention_problem.is_padding(c.attn_mask_type):
            yield "ALiBi needs a causal mask without padding"
        if "BOTTOM_RIGHT" in NVTE_Mask_Type(c.attn_mask_type).name and c.max_seqlen_q != c.max_seqlen_kv:
            yield "with a bottom-right mask of unequal lengths, TE does not say where cuDNN's ALiBi starts"
        if architecture < 90:
            yield "ALiBi needs compute capability 9.0"
    with_padding = (NVTE_Mask_Type.NVTE_PADDING_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)
    if c.bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS and c.attn_mask_type in with_padding:
        yield "cuDNN does not take a bias together with padding"


def _objections_to_mask(c: _Configuration, layout: Layout) -> Iterator[str]:
    plain = c.bias_type == NVTE_Bias_Type.NVTE_NO_BIAS and c.dropout == 0.0
    in_order = c.max_seqlen_q <= c.max_seqlen_kv
    mask = NVTE_Mask_Type(c.attn_mask_type)
    if mask == NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK and not in_order:
        yield "a bottom-right causal mask needs at least as many keys as queries"
    if mask == NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK and not (plain or in_order):
        yield "a bottom-right causal mask with bias or dropout needs at least as many keys as queries"
    if layout.paged and not plain:
        yield "a paged cache takes neither bias nor dropout"
    if c.window_size_left == -1 and c.window_size_right in (-1, 0):
        return
    if not plain or not in_order:
        yield "a sliding window takes neither bias nor dropout, and needs at least as many keys as queries"
    one_sided = (NVTE_Mask_Type.NVTE_NO_MASK, NVTE_Mask_Type.NVTE_CAUSAL_MASK)
    if mask in one_sided and (c.window_size_right != 0 or "thd" in (layout.query, layout.key)):
        yield "without padding and without a bottom-right mask, a sliding window has to end at the diagonal"


# Fused attention, forward and backward.


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
    """Compute attention. Without a padding mask type, every sequence is as long as the tensors.

    Args:
        Q: ``[batch, seq, heads, features]``, or as the layout says; FP16, BF16 or TE's FP8 or MXFP8 tensor.
        K: like Q, but with GQA groups for heads; pages of a cache if the layout is paged.
        V: like K, but its number of features may differ.
        fake_dtype: FP16 or BF16, the dtype of O; the nominal dtype if O is quantized.
        cu_seqlens_q: cumulative lengths ``[batch + 1]``, INT32.
        cu_seqlens_q_padded: in ``thd``, where sequences start, ``[batch + 1]``. Default: no gaps between them.
        page_table_k: pages of each sequence, ``[batch, pages]``; that of V is the same.
        s_quantizer: with FP8, the quantizer of the probabilities; it keeps their amax. None in MXFP8.
        o_quantizer: with FP8, the quantizer of O; with delayed scaling, O is quantized and its amax kept.
        Bias: ``[batch or 1, heads or 1, seq_q or 1, seq_kv]``; not with FP8.
        SoftmaxOffset: the sink's score, ``[1, heads, 1, 1]`` FP32.

    Returns:
        O, 0 in padding; the log-sum-exp, FP32 ``[batch, heads, max_seqlen_q, 1]``, or ``[tokens, heads, 1]`` in
        ``thd``; the largest scores in the same shape if ``return_max_logit``; the RNG state, INT64 ``[2]``; the bias
        and the softmax offset if there are any.

    Raises:
        ValueError: for a dtype or a bias that cuDNN does not take.
        NotImplementedError: for quantized tensors other than MXFP8, and FP8 with one scale per tensor.
        RuntimeError: for quantizers of the probabilities that do not hold a scale.
    """
    is_fp8 = _check_operands("fused_attn_fwd", Q, K, V, bias_type, return_max_logit)
    dropout = p_dropout if is_training else 0.0
    rng_state = _draw_rng_state(dropout, rng_gen)
    bias = Bias if bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS else None
    sink = SoftmaxOffset if softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else None
    band = attention_problem.band_of(attn_mask_type, window_size, bottom_right_diagonal)
    layout = parse_layout(qkv_layout)
    problem = Problem(
        layout=layout,
        attention=_attention(attn_scale, band, bias_type, sink, dropout),
        bias=bias,
        seed=int(rng_state[0]),
        is_padded=attention_problem.is_padding(attn_mask_type),
        cumulative=(cu_seqlens_q, cu_seqlens_kv),
        padded=(cu_seqlens_q_padded, cu_seqlens_kv_padded),
        output_format=format_name(o_format, layout.query),
        page_table=page_table_k,
    )
    results: tuple[Any, ...]
    if is_fp8:
        results = flash_fp8.forward_of_batch(problem, Q, K, V, max_seqlen_q, s_quantizer, o_quantizer, fake_dtype)
    else:
        output, lse, largest = flash.forward_of_batch(problem, Q.detach(), K.detach(), V.detach(), max_seqlen_q)
        results = (output, lse, largest) if return_max_logit else (output, lse)
    return [*results, rng_state, *(tensor for tensor in (bias, sink) if tensor is not None)]


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
    """Return the gradients of ``fused_attn_fwd``, from the arguments described there and these:

    Args:
        O: the forward's O; if Q is FP8, it may be quantized or FP16 or BF16.
        dO: the gradient of O, quantized if Q is.
        Aux_CTX_Tensors: the forward's other results, without the largest scores; in MXFP8 also dO before it was
            quantized.
        s_quantizer: with FP8, the quantizer of the probabilities, with the scale that it had in the forward.
        dp_quantizer: with FP8, the quantizer of the gradients of the scores; it keeps their amax.
        dqkv_quantizer: with FP8, the quantizer of the results; with delayed scaling, they are quantized and their amax
            kept.

    Returns:
        The gradients of Q, K and V, in their shapes and dtypes, and in one tensor if the layout says so; that of the
        bias in its shape and dtype, or None; that of the softmax offset, FP32 ``[1, heads, 1, 1]``, or None.

    Raises:
        ValueError: for a dtype or a bias that cuDNN does not take.
        NotImplementedError: for quantized tensors other than MXFP8, and FP8 with one scale per tensor.
        RuntimeError: for quantizers of the probabilities, and of the gradients of scores, that do not hold a scale.
    """
    is_fp8 = _check_operands("fused_attn_bwd", Q, K, V, bias_type)
    lse, rng_state, *rest = Aux_CTX_Tensors
    bias = rest.pop(0) if bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS else None
    sink = rest.pop(0) if softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX else None
    band = attention_problem.band_of(attn_mask_type, window_size, bottom_right_diagonal)
    layout = parse_layout(qkv_layout)
    problem = Problem(
        layout=layout,
        attention=_attention(attn_scale, band, bias_type, sink, p_dropout),
        bias=bias,
        seed=int(rng_state[0]),
        is_padded=attention_problem.is_padding(attn_mask_type),
        cumulative=(cu_seqlens_q, cu_seqlens_kv),
        padded=(cu_seqlens_q_padded, cu_seqlens_kv_padded),
        output_format=format_name(o_format, layout.query),
    )
    unset = dqkv_layout == NVTE_QKV_Layout.NVTE_QKV_Layout_NOT_SET
    formats = GradientFormats(
        output=format_name(do_format, layout.query),
        inputs=layout if unset else parse_layout(dqkv_layout),
    )
    if is_fp8:
        quantizers = (s_quantizer, dp_quantizer, dqkv_quantizer)
        exact = rest.pop() if mxfp8.is_mxfp8_tensor(dO) else None
        return flash_fp8.backward_of_batch(
            problem, flash_fp8.Tensors(Q, K, V, O, dO, lse, exact), formats, *quantizers, fake_dtype
        )
    return flash.backward_of_batch(problem, flash.Tensors(Q, K, V, O, dO, lse), formats)


def _attention(scale: float, band: Band, bias_type: int, sink: Tensor | None, dropout: float) -> Attention:
    return Attention(
        scale=scale,
        band=band,
        alibi=bias_type == NVTE_Bias_Type.NVTE_ALIBI,
        sink=None if sink is None else sink.detach().float().flatten(),
        dropout=dropout,
    )


def _draw_rng_state(dropout: float, generator: torch.Generator | None) -> Tensor:
    """Return seed and offset, INT64 ``[2]``: drawn from the generator (default: the CPU's) for dropout, 0 without it.

    On a GPU, each call advances the GPU's generator. The CPU's generator also serves the user's code, so it is advanced
    only where dropout needs it.
    """
    if dropout == 0.0:
        return torch.zeros(2, dtype=torch.int64)
    seed = torch.randint(1 << 62, (1,), generator=generator, dtype=torch.int64)
    return torch.cat([seed, torch.zeros_like(seed)])


def _check_operands(
    kernel: str, query: Any, key: Any, value: Any, bias_type: int, return_max_logit: bool = False
) -> bool:
    """Return whether the operands are FP8, and raise an error for operands that cuDNN does not take."""
    operands = (("Q", query), ("K", key), ("V", value))
    formats = (float8.is_float8_tensor, mxfp8.is_mxfp8_tensor)
    if any(all(map(is_one, (query, key, value))) for is_one in formats):
        if bias_type != NVTE_Bias_Type.NVTE_NO_BIAS or return_max_logit:
            raise ValueError(
                f"{kernel}: in FP8, cuDNN's fused attention supports neither a bias nor returning the largest logit"
            )
        return True
    for name, tensor in operands:
        if not isinstance(tensor, Tensor) or hasattr(tensor, "_quantizer"):
            raise NotImplementedError(
                f"the CPU kernel {kernel} supports FP16, BF16, MXFP8 and FP8 with one scale per tensor, but "
                f"TransformerEngine {versions.installed_version()} passed a {type(tensor).__name__} as {name}"
            )
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"{kernel}: {name} is {tensor.dtype}; cuDNN's fused attention takes FP16, BF16 and FP8")
    if bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        raise ValueError(f"{kernel}: cuDNN's fused attention cannot add a bias before scaling")
    return False


def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[Tensor | None], original_format: str, outputs: Sequence[Tensor | None] = ()
) -> list[Tensor | None]:
    """Return contiguous copies of ``bshd`` or ``sbhd`` tensors as ``[batch, heads, seq, features]``; None stays None.

    Args:
        outputs: receive the copies, and may be wider in the last dimension, which is filled up with zeros. Default: new
            tensors.

    Raises:
        RuntimeError: for other formats, and if there are not as many outputs as inputs.
    """
    if original_format not in ("bshd", "sbhd"):
        raise RuntimeError(
            "multi_tensor_transpose_to_bhsd: only BSHD/SBHD -> BHSD is currently supported. Got original_format="
            f'"{original_format}".'
        )
    if outputs and len(outputs) != len(inputs):
        raise RuntimeError(
            f"multi_tensor_transpose_to_bhsd: outputs.size() ({len(outputs)}) != inputs.size() ({len(inputs)})."
        )
    order = [original_format.index(axis) for axis in "bhsd"]
    copies: list[Tensor | None] = []
    for tensor, given in zip(inputs, outputs or [None] * len(inputs), strict=True):
        if tensor is None:
            copies.append(None)
            continue
        by_head = tensor.detach().permute(order)
        output = torch.empty(by_head.shape, dtype=tensor.dtype) if given is None else given.zero_()
        output[..., : by_head.shape[-1]] = by_head
        copies.append(output)
    return copies


# The KV cache for inference, and conversions between padded and packed sequences.
#
# Follows ``csrc/extensions/attention.cpp`` of TransformerEngine 2.20.2 and ``common/fused_attn/kv_cache.cu``.


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Pad packed sequences ``[tokens, heads, features]`` with zeros to ``[b, max_seq_len, heads, features]``.

    Args:
        cu_seqlens: cumulative lengths ``[at least b + 1]``; sequences follow each other without gaps.
    """
    result = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    result[_is_token(cu_seqlens, b, max_seq_len)] = tensor[: int(cu_seqlens[b])]
    return result


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Pack padded sequences ``[batch, seq, heads, features]`` into ``[t, heads, features]``, with zeros at the end."""
    batch, max_seq_len = tensor.shape[:2]
    result = tensor.new_zeros(t, *tensor.shape[2:])
    result[: int(cu_seqlens[batch])] = tensor[_is_token(cu_seqlens, batch, max_seq_len)]
    return result


def _is_token(cu_seqlens: Tensor, batch: int, max_seq_len: int) -> Tensor:
    """Return a mask ``[batch, max_seq_len]``, False for padding."""
    return torch.arange(max_seq_len) < cu_seqlens[: batch + 1].diff()[:, None]


def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    qkv_format: int,
    b: int,
    max_ctx_len: int,
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Append the new tokens of each sequence to the cache, in place.

    Args:
        new_k: ``[b, max_ctx_len, heads, features]``; in ``sbhd`` the first two are swapped, and ``thd`` is packed.
        k_cache: ``[sequences, max_seq_len, heads, features]``, or ``[pages, page size, heads, features]`` if paged.
        page_table: the pages of each sequence, ``[at least b, max_pages_per_seq]``, or ``[at least b]`` if each has
            one page.
        cu_new_lens: cumulative numbers of new tokens, ``[at least b + 1]``.
        cu_cached_lens: cumulative numbers of all tokens, including the new ones.
        is_non_paged: ``page_table`` holds the previous place of each sequence in the cache. The sequences that continue
            are first moved to the front, in their order.

    Raises:
        ValueError: if dtypes differ, or if the format is none of these three.
    """
    if not new_k.dtype == new_v.dtype == k_cache.dtype == v_cache.dtype:
        dtypes = [str(tensor.dtype) for tensor in (new_k, new_v, k_cache, v_cache)]
        raise ValueError(f"copy_to_kv_cache needs new tokens and caches of one dtype, but got {', '.join(dtypes)}")
    new, cached = cu_new_lens[: b + 1].diff().long(), cu_cached_lens[: b + 1].diff().long()
    if is_non_paged:
        _move_to_front((k_cache, v_cache), page_table.flatten()[:b].long(), cached - new)
    entry = torch.arange(b).repeat_interleave(new)
    token = torch.arange(len(entry)) - cu_new_lens[:b].long()[entry]
    position = (cached - new)[entry] + token
    page_size = max_seq_len // max_pages_per_seq
    page = entry if is_non_paged else page_table.view(-1, max_pages_per_seq).long()[entry, position // page_size]
    where = (page, position % page_size)
    for cache, tokens in ((k_cache, new_k), (v_cache, new_v)):
        cache[where] = _tokens(tokens, qkv_format, entry, token)


def _tokens(tensor: Tensor, qkv_format: int, entry: Tensor, token: Tensor) -> Tensor:
    """Return the tokens of all sequences without padding, ``[tokens, heads, features]``."""
    if qkv_format == NVTE_QKV_Format.NVTE_BSHD:
        return tensor[entry, token]
    if qkv_format == NVTE_QKV_Format.NVTE_SBHD:
        return tensor[token, entry]
    if qkv_format == NVTE_QKV_Format.NVTE_THD:
        return tensor[: len(entry)]
    raise ValueError(f"copy_to_kv_cache takes the formats bshd, sbhd and thd, not {NVTE_QKV_Format(qkv_format).name}")


def _move_to_front(caches: tuple[Tensor, Tensor], sources: Tensor, lengths: Tensor) -> None:
    """Move sequence j from ``sources[j]`` to j, up to the last j whose source is greater than the next."""
    falls = (sources.diff() < 0).nonzero()
    count = int(falls[-1]) + 1 if len(falls) else len(sources)
    sources, lengths = sources[:count], lengths[:count]
    for cache in caches:
        moves = torch.arange(cache.shape[1]) < lengths[:, None]
        cache[:count][moves] = cache[sources][moves]
