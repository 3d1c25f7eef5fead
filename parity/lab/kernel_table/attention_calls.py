"""The fused softmaxes and RoPE, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import DTYPES, HALF, Bench, KernelCall

_BATCH, _HEADS, _SEQUENCE, _FEATURES = 2, 4, 128, 64
_SCALE = 0.13
_SOFTMAXES = ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")
_SHAPES_OF_TOKENS = {"SBHD": (_SEQUENCE, _BATCH, _HEADS, _FEATURES), "BSHD": (_BATCH, _SEQUENCE, _HEADS, _FEATURES)}


def calls() -> Iterator[KernelCall]:
    for softmax in _SOFTMAXES:
        for text, dtype in HALF.items():
            for direction in ("forward", "backward"):
                run = partial(_softmax, softmax=softmax, dtype=dtype, direction=direction)
                shapes = str(list(_scores(softmax)))
                yield KernelCall("Softmax", f"{softmax}_softmax_{direction}", text, shapes, run)
    for direction in ("forward", "backward"):
        for text, dtype in DTYPES.items():
            for layout, shape in _SHAPES_OF_TOKENS.items():
                for interleaved in (False, True):
                    variant = f"{text}, {layout}, {'interleaved' if interleaved else 'halves'}"
                    run = partial(_rope, direction=direction, dtype=dtype, layout=layout, interleaved=interleaved)
                    yield KernelCall("RoPE", f"fused_rope_{direction}", variant, str(list(shape)), run)
        for text, dtype in DTYPES.items():
            for layout, shape in _SHAPES_OF_TOKENS.items():
                run = partial(_joint_rope, direction=direction, dtype=dtype, layout=layout)
                yield KernelCall("RoPE", f"fused_qkv_rope_{direction}", f"{text}, {layout}", str(list(shape)), run)


def _scores(softmax: str) -> tuple[int, ...]:
    square = (_SEQUENCE, _SEQUENCE)
    return (_BATCH * _HEADS, *square) if "upper_triang" in softmax else (_BATCH, _HEADS, *square)


def _softmax(bench: Bench, softmax: str, dtype: torch.dtype, direction: str) -> Mapping[str, Any]:
    """The backward pass takes probabilities of the same kernels' forward."""
    scores = bench.normal(*_scores(softmax), dtype=dtype, scale=4.0)
    mask = (bench.coin(_BATCH, 1, _SEQUENCE, _SEQUENCE),) if softmax == "scaled_masked" else ()
    probabilities = getattr(bench.tex, f"{softmax}_softmax_forward")(scores, *mask, _SCALE)
    if direction == "forward":
        return {"probabilities": probabilities}
    grad = bench.normal(*_scores(softmax), dtype=dtype)
    return {"gradient": getattr(bench.tex, f"{softmax}_softmax_backward")(grad, probabilities, _SCALE)}


def _rope(bench: Bench, direction: str, dtype: torch.dtype, layout: str, interleaved: bool) -> Mapping[str, Any]:
    tokens = bench.normal(*_SHAPES_OF_TOKENS[layout], dtype=dtype)
    tex_layout = getattr(bench.tex.NVTE_QKV_Format, f"NVTE_{layout}")
    kernel = getattr(bench.tex, f"fused_rope_{direction}")
    angles = bench.angles(_SEQUENCE, _FEATURES)
    return {"result": kernel(tokens, angles, None, tex_layout, interleaved, None, 1, 0)}


def _joint_rope(bench: Bench, direction: str, dtype: torch.dtype, layout: str) -> Mapping[str, Any]:
    """Two query heads, a key and a value in each group of the joint tensor."""
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
