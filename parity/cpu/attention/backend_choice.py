"""Which fused attention the emulated GPU offers for a configuration.

Up to 2.19 TransformerEngine writes the rules down (``nvte_get_fused_attn_backend`` in
``common/fused_attn/fused_attn.cpp``); 2.20 asks cuDNN itself, which cannot be asked here. So every version gets the
written rules, for the cuDNN that ``parity.cpu.info`` names (the rules for older and newer ones, and the kernels for
short sequences that TE 2.14 and 2.15 still had beside them, are left out) and for the configurations that
``parity.cpu.attention.fused`` computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from parity.cpu import cuda, info
from parity.cpu.attention import layouts, masks
from parity.cpu.attention.layouts import Layout
from parity.cpu.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

__all__ = ["get_fused_attn_backend"]

_F16_DTYPES = (DType.kFloat16, DType.kBFloat16)
_FP8_DTYPES = (DType.kFloat8E4M3, DType.kFloat8E5M2)
_LAST_CUDNN_WITH_GRAPH_BUG = 91500


@dataclass(frozen=True)
class _Configuration:
    """What the answer depends on, named and ordered as TE up to 2.19 passes it; units are elements and tokens."""

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
    """cuDNN's attention in FP8, or in FP16 and BF16 for sequences of any length, if it serves this; else no backend.

    TE 2.20 passes one object and takes the reason as well; up to 2.19 it passes each property and takes the backend
    alone (``attention/dot_product_attention/utils.py``).
    """
    if len(configuration) == 1:
        return _choose(_from_object(configuration[0]))
    return _choose(_Configuration(*configuration))[0]


def _from_object(parameters: Any) -> _Configuration:
    names = [field.name for field in fields(_Configuration) if field.name != "kv_dtype"]
    return _Configuration(kv_dtype=parameters.qkv_dtype, **{name: getattr(parameters, name) for name in names})


def _choose(configuration: _Configuration) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """The backend for these dtypes, or none and why cuDNN does not serve this."""
    is_fp8 = configuration.qkv_dtype in _FP8_DTYPES
    reason = next((_objections_in_fp8 if is_fp8 else _objections)(configuration), "")
    if reason:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, reason
    name = "NVTE_FP8" if is_fp8 else "NVTE_F16_arbitrary_seqlen"
    return NVTE_Fused_Attn_Backend[name], ""


def _objections_in_fp8(configuration: _Configuration) -> Iterator[str]:
    """The rules for cuDNN 9.7 to 9.20; sliding windows and the recipes are up to TE's Python."""
    c, architecture = configuration, _architecture()
    if architecture < 90:
        yield f"FP8 attention needs compute capability 9.0, and the GPU has {architecture / 10}"
    if c.kv_dtype != c.qkv_dtype:
        yield "Q and K have different dtypes"
    layout = layouts.parse(c.qkv_layout)
    if layout.query not in ("bshd", "sbhd") or layout.key != layout.query:
        yield "in FP8, queries and keys need the same format, bshd or sbhd"
    if c.bias_type != NVTE_Bias_Type.NVTE_NO_BIAS:
        yield "in FP8 there is no bias"
    if c.softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX:
        yield "in FP8 there are no softmax sinks"
    if c.return_max_logit:
        yield "in FP8 the largest logit is not returned"
    if "BOTTOM_RIGHT" in NVTE_Mask_Type(c.attn_mask_type).name:
        yield "in FP8 a causal mask is aligned top left"
    if not _head_dimensions_fit_in_fp8(c, architecture):
        yield f"head dimensions {c.head_dim_qk} (Q, K) and {c.head_dim_v} (V) are not served in FP8"


def _head_dimensions_fit_in_fp8(c: _Configuration, architecture: int) -> bool:
    if c.head_dim_qk % 16 or c.head_dim_v % 16:
        return False
    if architecture < 100 and c.is_training:
        return c.head_dim_qk == c.head_dim_v == 128
    return max(c.head_dim_qk, c.head_dim_v) <= (256 if architecture < 100 else 128)


def _objections(configuration: _Configuration) -> Iterator[str]:
    """Why cuDNN does not serve this in FP16 and BF16; nothing if it does."""
    c, architecture = configuration, _architecture()
    if c.qkv_dtype not in _F16_DTYPES or c.kv_dtype != c.qkv_dtype:
        yield "fused attention takes FP16, BF16 and FP8"
    if architecture < 80:
        yield f"fused attention needs compute capability 8.0, and the GPU has {architecture / 10}"
    layout = layouts.parse(c.qkv_layout)
    if c.qkv_layout == NVTE_QKV_Layout.NVTE_BHSD_BHSD_BHSD:
        yield "the layout bhsd_bhsd_bhsd is for FP8"
    if layout.query == "thd" and not masks.is_padding(c.attn_mask_type):
        yield "packed sequences (thd) need a padding mask"
    if "thd" in (layout.query, layout.key) and architecture < 90:
        yield "packed sequences (thd) need compute capability 9.0"
    if layout.paged and not masks.is_padding(c.attn_mask_type):
        yield "a paged cache needs a padding mask"
    if not _head_dimensions_fit(c, layout, architecture):
        yield f"head dimensions {c.head_dim_qk} (Q, K) and {c.head_dim_v} (V) are not served"
    yield from _objections_to_bias(c, architecture)
    yield from _objections_to_mask(c, layout)
    dropout_and_bias = c.dropout != 0.0 and c.bias_type != NVTE_Bias_Type.NVTE_NO_BIAS
    if architecture >= 100 and c.is_training and (c.deterministic or dropout_and_bias):
        yield "on Blackwell, the backward is neither deterministic nor does it serve dropout with a bias"
    in_graph = c.cuda_graph and c.is_training and info.get_cudnn_version() <= _LAST_CUDNN_WITH_GRAPH_BUG
    if in_graph and c.max_seqlen_kv % 128 and not masks.is_padding(c.attn_mask_type):
        yield "in a CUDA graph, this cuDNN needs keys in multiples of 128"


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
        if not masks.is_causal(c.attn_mask_type) or masks.is_padding(c.attn_mask_type):
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
