"""Activations and their gradients, plain and gated, in each dtype; to FP8, and with a bias gradient, for some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import DTYPES, E5M2, Bench, KernelCall

_ROWS, _COLUMNS = 256, 512
_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "situglu")
_SCALED = {"srelu": 1, "swiglu": 2, "situglu": 2, "clamped_swiglu": 2}  # by name, how wide the input is
_TO_FP8 = ("gelu", "swiglu")
_WITH_BIAS = ("gelu", "silu", "relu", "qgelu", "srelu")


def calls() -> Iterator[KernelCall]:
    for text, dtype in DTYPES.items():
        for name in (*_PLAIN, *_GATED):
            yield _call(name, text, partial(_forward, name=name, dtype=dtype))
            yield _call(_gradient_of(name), text, partial(_backward, name=name, dtype=dtype))
        for name in _SCALED:
            yield _call(f"scaled_{name}", text, partial(_scaled, name=name, dtype=dtype))
    for quantizer in ("fp8_delayed", "fp8_current", "mxfp8"):
        for name in _TO_FP8:
            for kernel, run in ((name, _forward), (_gradient_of(name), _backward)):
                bound = partial(run, name=name, dtype=torch.bfloat16, quantizer=quantizer)
                yield _call(kernel, f"BF16 to {quantizer}", bound, quantizer)
        for name in _WITH_BIAS:
            run = partial(_with_bias, name=name, quantizer=quantizer)
            yield _call(f"dbias_d{name}", f"BF16 to {quantizer}", run, quantizer)


def _call(kernel: str, variant: str, run: Any, quantizer: str | None = None) -> KernelCall:
    return KernelCall("Activations", kernel, variant, f"{_ROWS} rows, {_COLUMNS} results each", run, quantizer)


def _gradient_of(name: str) -> str:
    return "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"


def _input(bench: Bench, name: str, dtype: torch.dtype) -> torch.Tensor:
    return bench.normal(_ROWS, 2 * _COLUMNS if name in _GATED else _COLUMNS, dtype=dtype, scale=3.0)


def _forward(bench: Bench, name: str, dtype: torch.dtype, quantizer: str | None = None) -> Mapping[str, Any]:
    caster = bench.quantizer(quantizer) if quantizer else None
    return {"result": getattr(bench.tex, name)(_input(bench, name, dtype), caster)}


def _backward(bench: Bench, name: str, dtype: torch.dtype, quantizer: str | None = None) -> Mapping[str, Any]:
    x, grad = _input(bench, name, dtype), bench.normal(_ROWS, _COLUMNS, dtype=dtype)
    caster = bench.quantizer(quantizer, E5M2) if quantizer else None
    return {"gradient": getattr(bench.tex, _gradient_of(name))(grad, x, caster)}


def _scaled(bench: Bench, name: str, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return each row's result times a number of its own, such as its router's probability; forward and backward."""
    x, grad = bench.normal(_ROWS, _SCALED[name] * _COLUMNS, dtype=dtype), bench.normal(_ROWS, _COLUMNS, dtype=dtype)
    scales = bench.normal(_ROWS).abs()
    result = getattr(bench.tex, f"scaled_{name}")(x, scales, None)
    gradient, scale_gradient = getattr(bench.tex, f"scaled_{_gradient_of(name)}")(grad, x, scales, None)
    return {"result": result, "gradient": gradient, "scale gradient": scale_gradient}


def _with_bias(bench: Bench, name: str, quantizer: str) -> Mapping[str, Any]:
    x, grad = _input(bench, name, torch.bfloat16), bench.normal(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    kernel = getattr(bench.tex, f"dbias_d{name}")
    bias_gradient, gradient = kernel(grad, x, bench.quantizer(quantizer, E5M2))
    return {"bias gradient": bias_gradient, "gradient": gradient}
