"""GEMMs: each dtype and layout, the epilogues, and each quantized format.

They are asked for through TE's ``general_gemm``, which all versions have with the same parameters. Operands of
quantized GEMMs are cast by the kernels under test themselves; the section on casts says how far these agree.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import E4M3, E5M2, HALF, Bench, KernelCall

_TOKENS, _INNER, _OUTER = 256, 512, 384
_BF16 = torch.bfloat16
# By layout: what TE uses it for, and the shapes of A and B.
_LAYOUTS = {
    "TN": ("forward", (_OUTER, _INNER), (_TOKENS, _INNER)),
    "NN": ("input gradient", (_OUTER, _INNER), (_TOKENS, _OUTER)),
    "NT": ("weight gradient", (_TOKENS, _INNER), (_TOKENS, _OUTER)),
}
# By name in the table: quantizers of weights, of activations and gradients, and codes of gradients.
_FORMATS = {
    "fp8_delayed": ("fp8_delayed", "fp8_delayed", E5M2),
    "fp8_current": ("fp8_current", "fp8_current", E5M2),
    "fp8_block": ("fp8_block 128x128", "fp8_block 1x128", E4M3),
    "mxfp8": ("mxfp8", "mxfp8", E4M3),
    "nvfp4": ("nvfp4 16x16", "nvfp4", E4M3),
}


def calls() -> Iterator[KernelCall]:
    for text, dtype in {"FP32 (TF32)": torch.float32, **HALF}.items():
        for layout, (use, _, _) in _LAYOUTS.items():
            yield _call(f"{text}, {use}", layout, partial(_plain, dtype=dtype, layout=layout))
    for text, dtype in HALF.items():
        yield _call(f"{text}, bias", "TN", partial(_forward, dtype=dtype, gelu=False))
        yield _call(f"{text}, bias and GELU", "TN", partial(_forward, dtype=dtype, gelu=True))
        yield _call(f"{text}, gradient of GELU", "NN", partial(_gelu_gradient, dtype=dtype))
        yield _call(f"{text}, bias gradient", "NT", partial(_bias_gradient, dtype=dtype))
        yield _call(f"{text}, added to FP32", "NT", partial(_accumulated, dtype=dtype))
    for name, (weights, _, _) in _FORMATS.items():
        for layout, (use, _, _) in _LAYOUTS.items():
            for split in (False, True) if "block" not in name and name.startswith("fp8") else (True,):
                sums = "split accumulator" if split else "no split accumulator"
                run = partial(_quantized, name=name, layout=layout, split=split)
                yield _call(f"{name}, {use}, {sums}", layout, run, quantizer=weights)


def _call(variant: str, layout: str, run: Any, quantizer: str | None = None) -> KernelCall:
    _, a, b = _LAYOUTS[layout]
    return KernelCall("GEMM", "generic_gemm", variant, f"{layout} {list(a)} {list(b)}", run, quantizer)


def _general_gemm(a: Any, b: Any, **options: Any) -> Mapping[str, Any]:
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    result, bias_gradient, gelu_input, *_ = gemm(a, b, **options)
    return {"D": result, "bias gradient": bias_gradient, "GELU input": gelu_input}


def _operands(bench: Bench, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    _, a, b = _LAYOUTS[layout]
    return bench.normal(*a, dtype=dtype, scale=0.1), bench.normal(*b, dtype=dtype)


def _plain(bench: Bench, dtype: torch.dtype, layout: str) -> Mapping[str, Any]:
    a, b = _operands(bench, layout, dtype)
    return _general_gemm(a, b, out_dtype=dtype, layout=layout, grad=layout != "TN")


def _forward(bench: Bench, dtype: torch.dtype, gelu: bool) -> Mapping[str, Any]:
    a, b = _operands(bench, "TN", dtype)
    return _general_gemm(a, b, out_dtype=dtype, bias=bench.normal(_OUTER, dtype=dtype), gelu=gelu)


def _gelu_gradient(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    a, b = _operands(bench, "NN", dtype)
    gelu_input = bench.normal(_TOKENS, _INNER, dtype=dtype)
    return _general_gemm(a, b, out_dtype=dtype, layout="NN", grad=True, gelu=True, gelu_in=gelu_input)


def _bias_gradient(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    a, b = _operands(bench, "NT", dtype)
    bias = torch.empty(_OUTER, dtype=dtype, device=bench.device)
    return _general_gemm(a, b, out_dtype=dtype, layout="NT", grad=True, bias=bias)


def _accumulated(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    a, b = _operands(bench, "NT", dtype)
    out = bench.normal(_OUTER, _INNER)
    return _general_gemm(a, b, out_dtype=torch.float32, layout="NT", grad=True, out=out, accumulate=True)


def _quantized(bench: Bench, name: str, layout: str, split: bool) -> Mapping[str, Any]:
    weights, others, gradients = _FORMATS[name]
    a, b = _operands(bench, layout, _BF16)
    a = bench.quantizer(others if layout == "NT" else weights)(a)
    b = bench.quantizer(others, E4M3 if layout == "TN" else gradients)(b)
    return _general_gemm(a, b, out_dtype=_BF16, layout=layout, grad=layout != "TN", use_split_accumulator=split)
