"""Make the calls of TE's manifold hyper-connections, which are Triton kernels: forward, and back to each input."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.lab.kernel_table.bench import Bench, KernelCall

_SEQUENCE, _BATCH, _CHANNELS, _STREAMS = 64, 2, 96, 4
_TOKENS, _FEATURES = _SEQUENCE * _BATCH, _CHANNELS * _STREAMS
_MIXING = _STREAMS * (_STREAMS + 2)  # numbers that mix the streams of a token; TE pads them to _PADDED
_PADDED = 32
_SHAPES = f"{_TOKENS} tokens, {_STREAMS} streams of {_CHANNELS}"
_X_AND_WEIGHTS = {
    "FP32": (torch.float32, torch.float32),
    "BF16": (torch.bfloat16, torch.bfloat16),
    "BF16, FP32 weights": (torch.bfloat16, torch.float32),
}

Inputs = dict[str, Tensor]


def hyper_connections() -> Iterator[KernelCall]:
    """Yield calls of the five functions, with weights in the dtype of x, and with FP32 weights for x in BF16."""
    for text, (dtype, of_weights) in _X_AND_WEIGHTS.items():
        for suffix, use_tf32 in (("", True), (", without TF32", False)):
            for name, draw in (
                ("projection", _projection), ("aggregate", _aggregation), ("expand_combine", _expansion)
            ):  # fmt: skip
                inputs = partial(draw, dtype=dtype, of_weights=of_weights)
                yield _call(name, f"{text}{suffix}", inputs, use_tf32=use_tf32)
        inputs = partial(_projection, dtype=dtype, of_weights=of_weights, is_normed=True)
        yield _call("projection", f"{text}, norm weight", inputs)
        if dtype == of_weights:
            yield _call("scale", text, partial(_scaling, dtype=dtype))
            for suffix, recompute in (("", True), (", history kept", False)):
                yield _call("sinkhorn", f"{text}{suffix}", partial(_logits, dtype=dtype), recompute_hist=recompute)


def _call(name: str, variant: str, draw: Callable[[Bench], Inputs], **options: Any) -> KernelCall:
    if name != "projection":
        options["n"] = _STREAMS
    run = partial(_forward_and_backward, name=f"mhc_fused_{name}", draw=draw, options=options)
    return KernelCall("Hyper-connections", f"mhc_fused_{name}", variant, _SHAPES, run)


def _forward_and_backward(
    bench: Bench, name: str, draw: Callable[[Bench], Inputs], options: Mapping[str, Any]
) -> Mapping[str, Tensor]:
    inputs = {key: value.requires_grad_() for key, value in draw(bench).items()}
    made = getattr(importlib.import_module("transformer_engine.pytorch.triton.mhc"), name)(**inputs, **options)
    outputs = made if isinstance(made, tuple) else (made,)
    incoming = [bench.normal(*output.shape, dtype=output.dtype) for output in outputs]
    gradients = torch.autograd.grad(outputs, [*inputs.values()], incoming)
    results = {f"output {number}": output.detach() for number, output in enumerate(outputs)}
    return results | {f"gradient of {key}": gradient for key, gradient in zip(inputs, gradients, strict=True)}


def _projection(bench: Bench, dtype: torch.dtype, of_weights: torch.dtype, is_normed: bool = False) -> Inputs:
    inputs = {
        "x": bench.normal(_TOKENS, _FEATURES, dtype=dtype),
        "phi": bench.normal(_MIXING, _FEATURES, dtype=of_weights, scale=0.05),
    }
    return inputs | ({"norm_weight": bench.normal(_FEATURES, dtype=dtype)} if is_normed else {})


def _scaling(bench: Bench, dtype: torch.dtype) -> Inputs:
    return {
        "H": bench.normal(_TOKENS, _PADDED, dtype=dtype),
        "alpha": bench.normal(3, dtype=dtype),
        "beta": bench.normal(1, _MIXING, dtype=dtype),
        "ms": bench.normal(_TOKENS, dtype=dtype).abs() + 0.5,
    }


def _logits(bench: Bench, dtype: torch.dtype) -> Inputs:
    return {"H_res": bench.normal(_SEQUENCE, _BATCH, _STREAMS, _STREAMS, dtype=dtype, scale=2.0)}


def _aggregation(bench: Bench, dtype: torch.dtype, of_weights: torch.dtype) -> Inputs:
    return {"x": _streams(bench, dtype), "H_pre": bench.normal(_SEQUENCE, _BATCH, _STREAMS, dtype=of_weights)}


def _expansion(bench: Bench, dtype: torch.dtype, of_weights: torch.dtype) -> Inputs:
    return {
        "f": bench.normal(_SEQUENCE, _BATCH, _CHANNELS, dtype=dtype),
        "bias": bench.normal(_CHANNELS, dtype=dtype),
        "H_post": bench.normal(_SEQUENCE, _BATCH, _STREAMS, dtype=of_weights),
        "x": _streams(bench, dtype),
        "H_res": bench.normal(_SEQUENCE, _BATCH, _STREAMS, _STREAMS, dtype=of_weights),
    }


def _streams(bench: Bench, dtype: torch.dtype) -> Tensor:
    return bench.normal(_SEQUENCE, _BATCH, _CHANNELS, _STREAMS, dtype=dtype)
