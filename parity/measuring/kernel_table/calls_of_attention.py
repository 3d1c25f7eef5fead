"""Define the calls of attention and related kernels: softmaxes, RoPE, packed sequences, the key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from parity.measuring.kernel_table.bench import DTYPES, E4M3, HALF, Bench, KernelCall
from parity.te.attention_backend import AttentionBackend, attention_backends

# The fused softmaxes and RoPE, forward and backward.


_BATCH, _ROPE_HEADS, _SEQUENCE, _FEATURES = 2, 4, 128, 64
_SCALE = 0.13
_SOFTMAXES = ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")
_SHAPES_OF_TOKENS = {
    "SBHD": (_SEQUENCE, _BATCH, _ROPE_HEADS, _FEATURES),
    "BSHD": (_BATCH, _SEQUENCE, _ROPE_HEADS, _FEATURES),
}


def softmaxes_and_rope() -> Iterator[KernelCall]:
    for softmax in _SOFTMAXES:
        for text, dtype in HALF.items():
            for direction in ("forward", "backward"):
                run = partial(_call_softmax, softmax=softmax, dtype=dtype, direction=direction)
                shapes = str(list(_find_score_shape(softmax)))
                yield KernelCall("Softmax", f"{softmax}_softmax_{direction}", text, shapes, run)
    for direction in ("forward", "backward"):
        for text, dtype in DTYPES.items():
            for layout, shape in _SHAPES_OF_TOKENS.items():
                for interleaved in (False, True):
                    variant = f"{text}, {layout}, {'interleaved' if interleaved else 'halves'}"
                    run = partial(_call_rope, direction=direction, dtype=dtype, layout=layout, interleaved=interleaved)
                    yield KernelCall("RoPE", f"fused_rope_{direction}", variant, str(list(shape)), run)
        for text, dtype in DTYPES.items():
            for layout, shape in _SHAPES_OF_TOKENS.items():
                run = partial(_joint_rope, direction=direction, dtype=dtype, layout=layout)
                yield KernelCall("RoPE", f"fused_qkv_rope_{direction}", f"{text}, {layout}", str(list(shape)), run)


def _find_score_shape(softmax: str) -> tuple[int, ...]:
    square = (_SEQUENCE, _SEQUENCE)
    return (_BATCH * _ROPE_HEADS, *square) if "upper_triang" in softmax else (_BATCH, _ROPE_HEADS, *square)


def _call_softmax(bench: Bench, softmax: str, dtype: torch.dtype, direction: str) -> Mapping[str, Any]:
    """Call a softmax. The backward pass takes the probabilities from the forward pass of the same kernels."""
    scores = bench.normal(*_find_score_shape(softmax), dtype=dtype, scale=4.0)
    mask = (bench.coin(_BATCH, 1, _SEQUENCE, _SEQUENCE),) if softmax == "scaled_masked" else ()
    probabilities = getattr(bench.tex, f"{softmax}_softmax_forward")(scores, *mask, _SCALE)
    if direction == "forward":
        return {"probabilities": probabilities}
    grad = bench.normal(*_find_score_shape(softmax), dtype=dtype)
    return {"gradient": getattr(bench.tex, f"{softmax}_softmax_backward")(grad, probabilities, _SCALE)}


def _call_rope(bench: Bench, direction: str, dtype: torch.dtype, layout: str, interleaved: bool) -> Mapping[str, Any]:
    tokens = bench.normal(*_SHAPES_OF_TOKENS[layout], dtype=dtype)
    tex_layout = getattr(bench.tex.NVTE_QKV_Format, f"NVTE_{layout}")
    kernel = getattr(bench.tex, f"fused_rope_{direction}")
    angles = bench.angles(_SEQUENCE, _FEATURES)
    return {"result": kernel(tokens, angles, None, tex_layout, interleaved, None, 1, 0)}


def _joint_rope(bench: Bench, direction: str, dtype: torch.dtype, layout: str) -> Mapping[str, Any]:
    """Rotate two query heads, a key and a value in each group of the joint tensor."""
    *tokens, groups, _ = _SHAPES_OF_TOKENS[layout]
    split = [2 * _FEATURES, _FEATURES, _FEATURES]
    angles = bench.angles(_SEQUENCE, _FEATURES)
    tex_layout = getattr(bench.tex.NVTE_QKV_Format, f"NVTE_{layout}")
    layout_arguments = (split, tex_layout, False, 1, 0)
    if direction == "forward":
        joint = bench.normal(*tokens, groups, sum(split), dtype=dtype)
        return dict(
            zip("qkv", bench.tex.fused_qkv_rope_forward(joint, angles, angles, None, *layout_arguments), strict=True)
        )
    gradients = [bench.normal(*tokens, groups * (size // _FEATURES), _FEATURES, dtype=dtype) for size in split]
    return {"gradient": bench.tex.fused_qkv_rope_backward(*gradients, angles, angles, *layout_arguments)}


# Attention by TE's unfused and by cuDNN's fused kernels, forward and backward, through ``DotProductAttention``.
#
# The results of padded queries mean nothing and are set to 0 on both sides. Flash-attention is a separate package,
# which the CPU kernels do not cover.


_HEADS = 8
_BACKENDS: dict[AttentionBackend, tuple[str, ...]] = {"unfused": ("FP32", "BF16", "FP16"), "fused": ("BF16", "FP16")}


@dataclass(frozen=True)
class _Mask:
    """How TE is told of a mask. ``options`` are passed in its call."""

    groups: int = _HEADS
    name: str = "no_mask"
    options: tuple[tuple[str, Any], ...] = ()


_MASKS = {
    "no mask": _Mask(),
    "causal": _Mask(name="causal"),
    "causal, GQA": _Mask(2, "causal"),
    "causal, MQA": _Mask(1, "causal"),
    "window": _Mask(2, "causal", (("window_size", (32, 0)),)),
    "padding": _Mask(name="padding"),
}


def attention() -> Iterator[KernelCall]:
    for backend, dtypes in _BACKENDS.items():
        for text in dtypes:
            for name, mask in _MASKS.items():
                run = partial(_call_attention, backend=backend, dtype=DTYPES[text], mask=mask)
                shapes = str([_BATCH, _SEQUENCE, _HEADS, _FEATURES])
                yield KernelCall("Attention", f"DotProductAttention, {backend}", f"{text}, {name}", shapes, run)


def _call_attention(bench: Bench, backend: AttentionBackend, dtype: torch.dtype, mask: _Mask) -> Mapping[str, Any]:
    heads = (_HEADS, mask.groups, mask.groups)
    inputs = [bench.normal(_BATCH, _SEQUENCE, n, _FEATURES, dtype=dtype).requires_grad_() for n in heads]
    grad = bench.normal(_BATCH, _SEQUENCE, _HEADS * _FEATURES, dtype=dtype)
    is_padding = bench.padding([_SEQUENCE, _SEQUENCE - 37], _SEQUENCE)
    options = dict(mask.options)
    if mask.name == "padding":
        options["attention_mask"] = is_padding[:, None, None, :]
        grad = grad.masked_fill(is_padding[:, :, None], 0.0)
    with attention_backends(backend):
        module = bench.te.DotProductAttention(
            _HEADS,
            _FEATURES,
            num_gqa_groups=mask.groups,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type=mask.name,
        )
        context = module(*inputs, **options)
        gradients = torch.autograd.grad(context, inputs, grad)
    results = dict(zip(("context", "dq", "dk", "dv"), (context.detach(), *gradients), strict=True))
    if mask.name != "padding":
        return results
    return {
        name: x.masked_fill(is_padding.view(*is_padding.shape, *[1] * (x.dim() - 2)), 0.0)
        for name, x in results.items()
    }


# Kernels that only move numbers: transposes, packed sequences, the key-value cache.


_SEQUENCES, _LONGEST, _PACKED_HEADS, _PACKED_FEATURES = 3, 64, 4, 32
_LENGTHS = (64, 17, 40)
_CACHED, _NEW, _CACHE = (5, 0, 31), (1, 9, 4), 64


def layouts() -> Iterator[KernelCall]:
    yield KernelCall("Layouts", "fp8_transpose", "E4M3", "[256, 384]", _fp8_transpose)
    for text, dtype in HALF.items():
        run = partial(_swap_dimensions, dtype=dtype)
        yield KernelCall("Layouts", "swap_first_dims", text, "[64, 3, 128]", run)
        lengths = f"lengths {list(_LENGTHS)} of {_LONGEST}"
        run = partial(_pack_sequences, dtype=dtype)
        yield KernelCall("Layouts", "convert_bshd_to_thd, convert_thd_to_bshd", text, lengths, run)
        run = partial(_extend_cache, dtype=dtype)
        yield KernelCall("Layouts", "copy_to_kv_cache", text, f"{list(_NEW)} after {list(_CACHED)}", run)
        yield from _packed_over_ranks(text, dtype)


def _fp8_transpose(bench: Bench) -> Mapping[str, Any]:
    codes = bench.integers(256, 384, high=0x7F, dtype=torch.uint8)
    return {"transpose": bench.tex.fp8_transpose(codes, getattr(bench.tex.DType, E4M3), out=None)}


def _swap_dimensions(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    return {"swapped": bench.tex.swap_first_dims(bench.normal(64, 3, 128, dtype=dtype), out=None)}


def _accumulate_lengths(bench: Bench, lengths: tuple[int, ...]) -> torch.Tensor:
    return bench.fixed([sum(lengths[:i]) for i in range(len(lengths) + 1)], torch.int32)


def _pack_sequences(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    tokens, ends = (
        bench.normal(_SEQUENCES, _LONGEST, _PACKED_HEADS, _PACKED_FEATURES, dtype=dtype),
        _accumulate_lengths(bench, _LENGTHS),
    )
    packed = bench.tex.convert_bshd_to_thd(tokens, ends, sum(_LENGTHS))
    unpacked = bench.tex.convert_thd_to_bshd(packed, ends, _SEQUENCES, _LONGEST)
    is_padding = bench.padding(_LENGTHS, _LONGEST)
    return {"packed": packed, "unpacked": unpacked.masked_fill(is_padding[:, :, None, None], 0.0)}


def _extend_cache(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    """Add new tokens, packed, after those that each sequence already has in a cache without pages."""
    fresh = [bench.normal(sum(_NEW), _PACKED_HEADS, _PACKED_FEATURES, dtype=dtype) for _ in range(2)]
    caches = [bench.normal(_SEQUENCES, _CACHE, _PACKED_HEADS, _PACKED_FEATURES, dtype=dtype) for _ in range(2)]
    ends = tuple(old + new for old, new in zip(_CACHED, _NEW, strict=True))
    layout = bench.tex.NVTE_QKV_Format.NVTE_THD
    pages = bench.fixed(range(_SEQUENCES), torch.int32)
    bench.tex.copy_to_kv_cache(
        *(*fresh, *caches, pages, _accumulate_lengths(bench, _NEW), _accumulate_lengths(bench, ends), layout),
        *(_SEQUENCES, max(_NEW), _CACHE, 1, True),
    )
    return {"keys": caches[0], "values": caches[1]}


# Packed sequences under context parallelism: selecting a rank's tokens, and merging the results of its steps.


_CP_LENGTHS, _RANKS = (64, 16, 40), 2
_CP_PADDED = (64, 24, 40)
_DONE_WITH_HALVES = (("add", "none"), ("none", "add"), ("copy", "none"), ("copy", "zero"), ("add", "copy"))


def _packed_over_ranks(text: str, dtype: torch.dtype) -> Iterator[KernelCall]:
    lengths = f"lengths {list(_CP_LENGTHS)} on {_RANKS} ranks"
    moved = "thd_get_partitioned_indices, thd_sequence_order_to_cp_rank_order and back, thd_read_half_tensor"
    yield KernelCall("Layouts", moved, text, lengths, partial(_divide_over_ranks, dtype=dtype))
    yield KernelCall(
        "Layouts",
        "thd_copy_valid_tokens_from_per_split_to_rank_local",
        text,
        lengths,
        partial(_copy_valid, dtype=dtype),
    )
    yield KernelCall("Layouts", "thd_grad_correction", text, lengths, partial(_merge_gradients, dtype=dtype))
    for is_packed in (True, False):
        variant = f"{text}, {'packed' if is_packed else 'unpacked'} sums"
        merged = "thd_out_correction, thd_second_half_lse_correction, thd_read_second_half_lse"
        yield KernelCall("Layouts", merged, variant, lengths, partial(_merge_outputs, dtype=dtype, is_packed=is_packed))


def _draw_tokens(bench: Bench, dtype: torch.dtype, count: int = sum(_CP_LENGTHS)) -> torch.Tensor:
    return bench.normal(count, _PACKED_HEADS, _PACKED_FEATURES, dtype=dtype)


def _divide_over_ranks(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    tokens, ends, total = _draw_tokens(bench, dtype), _accumulate_lengths(bench, _CP_LENGTHS), sum(_CP_LENGTHS)
    by_rank = bench.tex.thd_sequence_order_to_cp_rank_order(tokens, ends, _RANKS, total)
    of_ranks = {
        f"tokens of rank {rank}": bench.tex.thd_get_partitioned_indices(ends, total, _RANKS, rank)
        for rank in range(_RANKS)
    }
    halves = {f"half {half}": bench.tex.thd_read_half_tensor(tokens, ends, half) for half in (0, 1)}
    back = bench.tex.thd_cp_rank_order_to_sequence_order(by_rank, ends, _RANKS, total)
    return {**of_ranks, **halves, "by rank": by_rank, "back": back}


def _copy_valid(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    into, tokens = (_draw_tokens(bench, dtype, sum(_CP_PADDED)) for _ in range(2))
    padded, ends = _accumulate_lengths(bench, _CP_PADDED), _accumulate_lengths(bench, _CP_LENGTHS)
    bench.tex.thd_copy_valid_tokens_from_per_split_to_rank_local(into, tokens, padded, ends)
    return {"copied": into}


def _merge_gradients(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    ends, merged = _accumulate_lengths(bench, _CP_LENGTHS), {}
    for first, second in _DONE_WITH_HALVES:
        is_half = "none" in (first, second) or "zero" in (first, second)
        gradient, step = (
            _draw_tokens(bench, dtype),
            _draw_tokens(bench, dtype, sum(_CP_LENGTHS) // (2 if is_half else 1)),
        )
        bench.tex.thd_grad_correction(gradient, step, ends, first, second)
        merged[f"{first}, {second}"] = gradient
    return merged


def _merge_outputs(bench: Bench, dtype: torch.dtype, is_packed: bool) -> Mapping[str, Any]:
    """Merge a step with whole sequences, then one with only their second halves."""
    ends, total, longest = _accumulate_lengths(bench, _CP_LENGTHS), sum(_CP_LENGTHS), max(_CP_LENGTHS)
    sums = [
        bench.normal(*((_PACKED_HEADS, tokens) if is_packed else (len(_CP_LENGTHS), _PACKED_HEADS, columns)))
        for tokens, columns in ((total, longest), (total, longest), (total // 2, longest // 2))
    ]
    output, whole, half = (_draw_tokens(bench, dtype, count) for count in (total, total, total // 2))
    both = torch.logaddexp(sums[0], sums[1])
    bench.tex.thd_out_correction(output, whole, sums[0], both, sums[1], ends, False, is_packed)
    seen = both.clone()
    bench.tex.thd_second_half_lse_correction(seen, sums[2], ends, is_packed)
    bench.tex.thd_out_correction(output, half, both, seen, sums[2], ends, True, is_packed)
    columns = total // 2 if is_packed else longest // 2
    second = bench.tex.thd_read_second_half_lse(seen, ends, is_packed, columns)
    return {"output": output, "sums": seen, "sums of second halves": second}
