"""Define the calls of GEMMs, single and grouped, and of the casts that make their operands.

GEMMs are called through TE's ``general_gemm``, which has the same parameters in all versions. Operands of quantized
GEMMs are cast by the kernels under test themselves. The calls of casts show how far these agree.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from parity.measuring.kernel_table.bench import DTYPES, E4M3, E5M2, HALF, QUANTIZERS, Bench, KernelCall

# GEMMs: each dtype and layout, the epilogues, and each quantized format.


_TOKENS, _INNER, _OUTER = 256, 512, 384
_BF16 = torch.bfloat16
# For each layout: what TE uses it for, and the shapes of A and B.
_LAYOUTS = {
    "TN": ("forward", (_OUTER, _INNER), (_TOKENS, _INNER)),
    "NN": ("input gradient", (_OUTER, _INNER), (_TOKENS, _OUTER)),
    "NT": ("weight gradient", (_TOKENS, _INNER), (_TOKENS, _OUTER)),
}
# For each name in the table: the quantizers of weights and of activations and gradients, and the codes of gradients.
_QUANTIZERS_OF = {
    "fp8_delayed": ("fp8_delayed", "fp8_delayed", E5M2),
    "fp8_current": ("fp8_current", "fp8_current", E5M2),
    "fp8_block": ("fp8_block 128x128", "fp8_block 1x128", E4M3),
    "mxfp8": ("mxfp8", "mxfp8", E4M3),
    "nvfp4": ("nvfp4 16x16", "nvfp4", E4M3),
}


def gemms() -> Iterator[KernelCall]:
    for text, dtype in {"FP32 (TF32)": torch.float32, **HALF}.items():
        for layout, (use, _, _) in _LAYOUTS.items():
            yield _define_gemm(f"{text}, {use}", layout, partial(_call_plain_gemm, dtype=dtype, layout=layout))
    for text, dtype in HALF.items():
        yield _define_gemm(f"{text}, bias", "TN", partial(_call_gemm_with_bias, dtype=dtype, gelu=False))
        yield _define_gemm(f"{text}, bias and GELU", "TN", partial(_call_gemm_with_bias, dtype=dtype, gelu=True))
        yield _define_gemm(f"{text}, gradient of GELU", "NN", partial(_gelu_gradient, dtype=dtype))
        yield _define_gemm(f"{text}, bias gradient", "NT", partial(_gemm_with_bias_gradient, dtype=dtype))
        yield _define_gemm(f"{text}, added to FP32", "NT", partial(_call_accumulating_gemm, dtype=dtype))
    for name, (weights, _, _) in _QUANTIZERS_OF.items():
        for layout, (use, _, _) in _LAYOUTS.items():
            for split in (False, True) if "block" not in name and name.startswith("fp8") else (True,):
                sums = "split accumulator" if split else "no split accumulator"
                run = partial(_call_quantized_gemm, name=name, layout=layout, split=split)
                yield _define_gemm(f"{name}, {use}, {sums}", layout, run, quantizer=weights)


def _define_gemm(variant: str, layout: str, run: Any, quantizer: str | None = None) -> KernelCall:
    _, a, b = _LAYOUTS[layout]
    return KernelCall("GEMM", "generic_gemm", variant, f"{layout} {list(a)} {list(b)}", run, quantizer)


def _general_gemm(a: Any, b: Any, **options: Any) -> Mapping[str, Any]:
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    result, bias_gradient, gelu_input, *_ = gemm(a, b, **options)
    return {"D": result, "bias gradient": bias_gradient, "GELU input": gelu_input}


def _draw_operands(bench: Bench, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    _, a, b = _LAYOUTS[layout]
    return bench.normal(*a, dtype=dtype, scale=0.1), bench.normal(*b, dtype=dtype)


def _call_plain_gemm(bench: Bench, dtype: torch.dtype, layout: str) -> Mapping[str, Any]:
    a, b = _draw_operands(bench, layout, dtype)
    return _general_gemm(a, b, out_dtype=dtype, layout=layout, grad=layout != "TN")


def _call_gemm_with_bias(bench: Bench, dtype: torch.dtype, gelu: bool) -> Mapping[str, Any]:
    a, b = _draw_operands(bench, "TN", dtype)
    return _general_gemm(a, b, out_dtype=dtype, bias=bench.normal(_OUTER, dtype=dtype), gelu=gelu)


def _gelu_gradient(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    a, b = _draw_operands(bench, "NN", dtype)
    gelu_input = bench.normal(_TOKENS, _INNER, dtype=dtype)
    return _general_gemm(a, b, out_dtype=dtype, layout="NN", grad=True, gelu=True, gelu_in=gelu_input)


def _gemm_with_bias_gradient(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    a, b = _draw_operands(bench, "NT", dtype)
    bias = torch.empty(_OUTER, dtype=dtype, device=bench.device)
    return _general_gemm(a, b, out_dtype=dtype, layout="NT", grad=True, bias=bias)


def _call_accumulating_gemm(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    a, b = _draw_operands(bench, "NT", dtype)
    out = bench.normal(_OUTER, _INNER)
    return _general_gemm(a, b, out_dtype=torch.float32, layout="NT", grad=True, out=out, accumulate=True)


def _call_quantized_gemm(bench: Bench, name: str, layout: str, split: bool) -> Mapping[str, Any]:
    weights, others, gradients = _QUANTIZERS_OF[name]
    a, b = _draw_operands(bench, layout, _BF16)
    a = bench.quantizer(others if layout == "NT" else weights)(a)
    b = bench.quantizer(others, E4M3 if layout == "TN" else gradients)(b)
    return _general_gemm(a, b, out_dtype=_BF16, layout=layout, grad=layout != "TN", use_split_accumulator=split)


# Several products or casts in one call, as needed by the experts of a mixture.


_SPLITS, _GROUPED_INNER, _GROUPED_OUTER = (128, 256, 128), 256, 384
_GROUPED_SHAPES = f"{list(_SPLITS)} rows, {_GROUPED_INNER} to {_GROUPED_OUTER}"
_GEMM_DTYPES = {"FP32 (TF32)": torch.float32, **HALF}
_RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block 1x128": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def grouped_products() -> Iterator[KernelCall]:
    for text, dtype in _GEMM_DTYPES.items():
        run = partial(_grouped_linear, dtype=dtype, recipe=None)
        yield KernelCall("Grouped kernels", "GroupedLinear", text, _GROUPED_SHAPES, run)
    for quantizer, recipe in _RECIPES.items():
        run = partial(_grouped_linear, dtype=torch.bfloat16, recipe=recipe)
        yield KernelCall("Grouped kernels", "GroupedLinear", quantizer, _GROUPED_SHAPES, run, quantizer)
        run = partial(_split_quantize, name=quantizer)
        yield KernelCall("Grouped kernels", "split_quantize", f"BF16 to {quantizer}", _GROUPED_SHAPES, run, quantizer)


def _grouped_linear(bench: Bench, dtype: torch.dtype, recipe: str | None) -> Mapping[str, Any]:
    count = len(_SPLITS)
    module = bench.te.GroupedLinear(
        count, _GROUPED_INNER, _GROUPED_OUTER, bias=False, params_dtype=dtype, device=bench.device
    )
    weights = [getattr(module, f"weight{i}") for i in range(count)]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(bench.normal(_GROUPED_OUTER, _GROUPED_INNER, dtype=dtype, scale=0.1))
    x = bench.normal(sum(_SPLITS), _GROUPED_INNER, dtype=dtype).requires_grad_()
    grad = bench.normal(sum(_SPLITS), _GROUPED_OUTER, dtype=dtype)
    recipes = importlib.import_module("transformer_engine.common.recipe")
    with bench.te.autocast(enabled=True, recipe=getattr(recipes, recipe)()) if recipe else nullcontext():
        y = module(x, list(_SPLITS))
    y.backward(grad)
    return {"output": y.detach(), "dx": x.grad, "dweight": torch.stack([weight.grad for weight in weights])}


def _split_quantize(bench: Bench, name: str) -> Mapping[str, Any]:
    x = bench.wide(sum(_SPLITS), _GROUPED_INNER, dtype=torch.bfloat16)
    parts = bench.tex.split_quantize(x, list(_SPLITS), [bench.quantizer(name) for _ in _SPLITS])
    return {f"part {i}": part for i, part in enumerate(parts)}


# Casts to FP8 and FP4 and back, amaxes, and the step of delayed scaling between two iterations.
#
# Shapes are multiples of 512, so that no scales are padding, which a kernel may leave unwritten.


_ROWS, _COLUMNS = 512, 1024
_CAST_SHAPES = f"[{_ROWS}, {_COLUMNS}]"
_CODES = {"E4M3": E4M3, "E5M2": E5M2}
_TENSORS, _HISTORY = 6, 16


def casts() -> Iterator[KernelCall]:
    for name in QUANTIZERS:
        for code_text, codes in ({"E2M1": E4M3} if name.startswith("nvfp4") else _CODES).items():
            # TE's Hadamard transform only reads BF16.
            for text, dtype in ({"BF16": torch.bfloat16} if "Hadamard" in name else DTYPES).items():
                variant = f"{text} to {name} {code_text}"
                run = partial(_quantize_matrix, name=name, codes=codes, dtype=dtype)
                yield KernelCall("Casts", "quantize", variant, _CAST_SHAPES, run, name)
            run = partial(_dequantize_matrix, name=name, codes=codes)
            yield KernelCall("Casts", "dequantize", f"{name} {code_text} to FP32", _CAST_SHAPES, run, name)
    for name in ("fp8_delayed", "fp8_current", "mxfp8"):
        run = partial(_quantize_with_bias_gradient, name=name)
        yield KernelCall("Casts", "bgrad_quantize", f"BF16 to {name} E5M2", _CAST_SHAPES, run, name)
    for text, dtype in DTYPES.items():
        yield KernelCall("Scales", "compute_amax", text, _CAST_SHAPES, partial(_compute_amax, dtype=dtype))
    for algorithm in ("max", "most_recent"):
        for code_text, codes in _CODES.items():
            run = partial(_scale_update, algorithm=algorithm, codes=codes)
            kernel = "fused_amax_and_scale_update_after_reduction"
            yield KernelCall("Scales", kernel, f"{algorithm}, {code_text}", f"history [{_HISTORY}, {_TENSORS}]", run)


def _quantize_matrix(bench: Bench, name: str, codes: str, dtype: torch.dtype) -> Mapping[str, Any]:
    quantizer = bench.quantizer(name, codes)
    result = {"": quantizer(bench.wide(_ROWS, _COLUMNS, dtype=dtype))}
    return result | {"amax": quantizer.amax} if name == "fp8_delayed" else result


def _dequantize_matrix(bench: Bench, name: str, codes: str) -> Mapping[str, Any]:
    quantized = bench.quantizer(name, codes)(bench.wide(_ROWS, _COLUMNS, dtype=torch.bfloat16))
    return {"values": quantized.dequantize(dtype=torch.float32)}


def _quantize_with_bias_gradient(bench: Bench, name: str) -> Mapping[str, Any]:
    grad = bench.wide(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    bias_gradient, quantized = bench.tex.bgrad_quantize(grad, bench.quantizer(name, E5M2))
    return {"bias gradient": bias_gradient, "gradient": quantized}


def _compute_amax(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    amax = torch.zeros(1, device=bench.device)
    bench.tex.compute_amax(bench.wide(_ROWS, _COLUMNS, dtype=dtype), amax)
    return {"amax": amax}


def _scale_update(bench: Bench, algorithm: str, codes: str) -> Mapping[str, Any]:
    """Update scales. One tensor has an amax of 0, as if it had not been used."""
    history, reduced = bench.wide(_HISTORY, _TENSORS).abs(), bench.wide(_TENSORS).abs()
    history[0, -1] = reduced[-1] = 0.0
    scale = bench.wide(_TENSORS).abs()
    update = bench.tex.fused_amax_and_scale_update_after_reduction
    update(reduced, [history], [scale], algorithm, getattr(bench.tex.DType, codes), 0.0)
    return {"amax history": history, "scale": scale}


# Casts of a part of a weight, as made by an optimizer whose master weights are sharded.


_WEIGHT_ROWS, _WEIGHT_COLUMNS, _BLOCK = 256, 384, 128
_BEGIN, _END = 1000, 70001  # neither is the end of a row, block or vector
_SHARD_SHAPES = f"elements {_BEGIN} to {_END} of [{_WEIGHT_ROWS}, {_WEIGHT_COLUMNS}]"
_SHARD_QUANTIZER = "fp8_block 128x128"
_SHARD_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


def casts_of_shards() -> Iterator[KernelCall]:
    for text, dtype in _SHARD_DTYPES.items():
        run = partial(_amax_of_shard, dtype=dtype)
        yield KernelCall("Shards", "fp8_block_scaling_compute_partial_amax", text, _SHARD_SHAPES, run, _SHARD_QUANTIZER)
        for code_text, codes in (("E4M3", E4M3), ("E5M2", E5M2)):
            run = partial(_cast_shard, dtype=dtype, codes=codes)
            variant = f"{text} to {code_text}"
            yield KernelCall("Shards", "fp8_block_scaling_partial_cast", variant, _SHARD_SHAPES, run, _SHARD_QUANTIZER)


def _draw_shard(bench: Bench, dtype: torch.dtype) -> torch.Tensor:
    return bench.wide(_WEIGHT_ROWS * _WEIGHT_COLUMNS, dtype=dtype)[_BEGIN:_END].contiguous()


def _amax_of_shard(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    amax = torch.zeros(_WEIGHT_ROWS // _BLOCK, _WEIGHT_COLUMNS // _BLOCK, device=bench.device)
    bench.tex.fp8_block_scaling_compute_partial_amax(
        _draw_shard(bench, dtype), amax, _WEIGHT_ROWS, _WEIGHT_COLUMNS, _BEGIN, _BLOCK
    )
    return {"amax": amax}


def _cast_shard(bench: Bench, dtype: torch.dtype, codes: str) -> Mapping[str, Any]:
    part = _draw_shard(bench, dtype)
    scale = bench.wide(_WEIGHT_ROWS // _BLOCK, _WEIGHT_COLUMNS // _BLOCK).abs()
    out = torch.zeros(part.numel(), dtype=torch.uint8, device=bench.device)
    code = getattr(bench.tex.DType, codes)
    bench.tex.fp8_block_scaling_partial_cast(part, out, scale, _WEIGHT_ROWS, _WEIGHT_COLUMNS, _BEGIN, _BLOCK, code)
    return {"codes": out.view(torch.float8_e4m3fn if codes == E4M3 else torch.float8_e5m2)}
