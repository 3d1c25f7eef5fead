"""Casts to FP8 and FP4 and back, amaxes, and delayed scaling's step between two iterations.

Shapes are multiples of 512, so that no scale is padding, which a kernel may leave unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import DTYPES, E4M3, E5M2, QUANTIZERS, Bench, KernelCall

_ROWS, _COLUMNS = 512, 1024
_SHAPES = f"[{_ROWS}, {_COLUMNS}]"
_CODES = {"E4M3": E4M3, "E5M2": E5M2}
_TENSORS, _HISTORY = 6, 16


def calls() -> Iterator[KernelCall]:
    for name in QUANTIZERS:
        for code_text, codes in _codes(name).items():
            for text, dtype in _dtypes(name).items():
                variant = f"{text} to {name} {code_text}"
                run = partial(_quantize, name=name, codes=codes, dtype=dtype)
                yield KernelCall("Casts", "quantize", variant, _SHAPES, run, name)
            run = partial(_dequantize, name=name, codes=codes)
            yield KernelCall("Casts", "dequantize", f"{name} {code_text} to FP32", _SHAPES, run, name)
    for name in ("fp8_delayed", "fp8_current", "mxfp8"):
        run = partial(_bias_gradient, name=name)
        yield KernelCall("Casts", "bgrad_quantize", f"BF16 to {name} E5M2", _SHAPES, run, name)
    for text, dtype in DTYPES.items():
        yield KernelCall("Scales", "compute_amax", text, _SHAPES, partial(_amax, dtype=dtype))
    for algorithm in ("max", "most_recent"):
        for code_text, codes in _CODES.items():
            run = partial(_scale_update, algorithm=algorithm, codes=codes)
            kernel = "fused_amax_and_scale_update_after_reduction"
            yield KernelCall("Scales", kernel, f"{algorithm}, {code_text}", f"history [{_HISTORY}, {_TENSORS}]", run)


def _codes(quantizer: str) -> dict[str, str]:
    return {"E2M1": E4M3} if quantizer.startswith("nvfp4") else _CODES


def _dtypes(quantizer: str) -> dict[str, torch.dtype]:
    """TE's Hadamard transform reads BF16 only."""
    return {"BF16": torch.bfloat16} if "Hadamard" in quantizer else DTYPES


def _quantize(bench: Bench, name: str, codes: str, dtype: torch.dtype) -> Mapping[str, Any]:
    quantizer = bench.quantizer(name, codes)
    result = {"": quantizer(bench.wide(_ROWS, _COLUMNS, dtype=dtype))}
    return result | {"amax": quantizer.amax} if name == "fp8_delayed" else result


def _dequantize(bench: Bench, name: str, codes: str) -> Mapping[str, Any]:
    quantized = bench.quantizer(name, codes)(bench.wide(_ROWS, _COLUMNS, dtype=torch.bfloat16))
    return {"values": quantized.dequantize(dtype=torch.float32)}


def _bias_gradient(bench: Bench, name: str) -> Mapping[str, Any]:
    grad = bench.wide(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    bias_gradient, quantized = bench.tex.bgrad_quantize(grad, bench.quantizer(name, E5M2))
    return {"bias gradient": bias_gradient, "gradient": quantized}


def _amax(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    amax = torch.zeros(1, device=bench.device)
    bench.tex.compute_amax(bench.wide(_ROWS, _COLUMNS, dtype=dtype), amax)
    return {"amax": amax}


def _scale_update(bench: Bench, algorithm: str, codes: str) -> Mapping[str, Any]:
    """One tensor has taken no part: its amax is 0."""
    history, reduced = bench.wide(_HISTORY, _TENSORS).abs(), bench.wide(_TENSORS).abs()
    history[0, -1] = reduced[-1] = 0.0
    scale = bench.wide(_TENSORS).abs()
    update = bench.tex.fused_amax_and_scale_update_after_reduction
    update(reduced, [history], [scale], algorithm, getattr(bench.tex.DType, codes), 0.0)
    return {"amax history": history, "scale": scale}
