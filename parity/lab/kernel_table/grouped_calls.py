"""Several products or casts by one call, as the experts of a mixture need them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import HALF, Bench, KernelCall

_SPLITS, _INNER, _OUTER = (128, 256, 128), 256, 384
_SHAPES = f"{list(_SPLITS)} rows, {_INNER} to {_OUTER}"
_DTYPES = {"FP32 (TF32)": torch.float32, **HALF}
_RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block 1x128": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def calls() -> Iterator[KernelCall]:
    for text, dtype in _DTYPES.items():
        run = partial(_grouped_linear, dtype=dtype, recipe=None)
        yield KernelCall("Grouped kernels", "GroupedLinear", text, _SHAPES, run)
    for quantizer, recipe in _RECIPES.items():
        run = partial(_grouped_linear, dtype=torch.bfloat16, recipe=recipe)
        yield KernelCall("Grouped kernels", "GroupedLinear", quantizer, _SHAPES, run, quantizer)
        run = partial(_split_quantize, name=quantizer)
        yield KernelCall("Grouped kernels", "split_quantize", f"BF16 to {quantizer}", _SHAPES, run, quantizer)


def _grouped_linear(bench: Bench, dtype: torch.dtype, recipe: str | None) -> Mapping[str, Any]:
    count = len(_SPLITS)
    module = bench.te.GroupedLinear(count, _INNER, _OUTER, bias=False, params_dtype=dtype, device=bench.device)
    weights = [getattr(module, f"weight{i}") for i in range(count)]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(bench.normal(_OUTER, _INNER, dtype=dtype, scale=0.1))
    x = bench.normal(sum(_SPLITS), _INNER, dtype=dtype).requires_grad_()
    grad = bench.normal(sum(_SPLITS), _OUTER, dtype=dtype)
    recipes = importlib.import_module("transformer_engine.common.recipe")
    with bench.te.autocast(enabled=True, recipe=getattr(recipes, recipe)()) if recipe else nullcontext():
        y = module(x, list(_SPLITS))
    y.backward(grad)
    return {"output": y.detach(), "dx": x.grad, "dweight": torch.stack([weight.grad for weight in weights])}


def _split_quantize(bench: Bench, name: str) -> Mapping[str, Any]:
    x = bench.wide(sum(_SPLITS), _INNER, dtype=torch.bfloat16)
    parts = bench.tex.split_quantize(x, list(_SPLITS), [bench.quantizer(name) for _ in _SPLITS])
    return {f"part {i}": part for i, part in enumerate(parts)}
