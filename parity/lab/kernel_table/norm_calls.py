"""LayerNorm and RMSNorm, forward and backward; the backward pass takes the statistics of the same kernels' forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import DTYPES, Bench, KernelCall

_ROWS, _COLUMNS, _EPSILON = 256, 1024, 1e-5
_SHAPES = f"[{_ROWS}, {_COLUMNS}]"


def calls() -> Iterator[KernelCall]:
    for norm in ("layernorm", "rmsnorm"):
        for text, dtype in DTYPES.items():
            for centered in (False, True):
                variant = f"{text}, gamma - 1" if centered else text
                forward = partial(_forward, norm=norm, dtype=dtype, centered=centered, quantizer=None)
                backward = partial(_backward, norm=norm, dtype=dtype, centered=centered)
                yield KernelCall("Norms", f"{norm}_fwd", variant, _SHAPES, forward)
                yield KernelCall("Norms", f"{norm}_bwd", variant, _SHAPES, backward)
        if norm == "rmsnorm":
            for text, dtype in DTYPES.items():
                yield KernelCall("Norms", "rmsnorm_bwd_add", text, _SHAPES, partial(_backward_and_add, dtype=dtype))
        for quantizer in ("fp8_delayed", "fp8_current", "mxfp8"):
            run = partial(_forward, norm=norm, dtype=torch.bfloat16, centered=False, quantizer=quantizer)
            yield KernelCall("Norms", f"{norm}_fwd", f"BF16 to {quantizer}", _SHAPES, run, quantizer)


def _forward(bench: Bench, norm: str, dtype: torch.dtype, centered: bool, quantizer: str | None) -> Mapping[str, Any]:
    x, gamma, beta, _ = _inputs(bench, dtype)
    caster = bench.quantizer(quantizer) if quantizer else None
    results = _normalize(bench, norm, (x, gamma, beta), caster, dtype, centered)
    return dict(zip(("z", "mu", "rsigma"), results, strict=True))


def _backward(bench: Bench, norm: str, dtype: torch.dtype, centered: bool) -> Mapping[str, Any]:
    x, gamma, beta, dz = _inputs(bench, dtype)
    _, mu, rsigma = _normalize(bench, norm, (x, gamma, beta), None, dtype, centered)
    statistics = (mu, rsigma) if norm == "layernorm" else (rsigma,)
    results = getattr(bench.tex, f"{norm}_bwd")(dz, x, *statistics, gamma, 0, centered)
    return dict(zip(("dx", "dgamma", "dbeta"), results, strict=False))


def _backward_and_add(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    x, gamma, beta, dz = _inputs(bench, dtype)
    _, _, rsigma = _normalize(bench, "rmsnorm", (x, gamma, beta), None, dtype, False)
    residual = bench.normal(_ROWS, _COLUMNS, dtype=dtype)
    results = bench.tex.rmsnorm_bwd_add(dz, x, residual, rsigma, gamma, 0, False)
    return dict(zip(("dx", "dgamma"), results, strict=True))


def _inputs(bench: Bench, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, dz = (bench.normal(_ROWS, _COLUMNS, dtype=dtype, scale=2.0) for _ in range(2))
    gamma, beta = (bench.normal(_COLUMNS, dtype=dtype) for _ in range(2))
    return x, gamma, beta, dz


def _normalize(
    bench: Bench, norm: str, inputs: tuple[torch.Tensor, ...], quantizer: Any, dtype: torch.dtype, centered: bool
) -> Any:
    taken = inputs if norm == "layernorm" else inputs[:2]
    kernel = getattr(bench.tex, f"{norm}_fwd")
    return kernel(*taken, _EPSILON, None, quantizer, bench.dtype(dtype), 0, centered)
