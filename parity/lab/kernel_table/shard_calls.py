"""Casts of a part of a weight, as an optimizer whose master weights are sharded makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import E4M3, E5M2, Bench, KernelCall

_ROWS, _COLUMNS, _BLOCK = 256, 384, 128
_BEGIN, _END = 1000, 70001  # cut where no row, block or vector ends
_SHAPES = f"elements {_BEGIN} to {_END} of [{_ROWS}, {_COLUMNS}]"
_QUANTIZER = "fp8_block 128x128"
_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


def calls() -> Iterator[KernelCall]:
    for text, dtype in _DTYPES.items():
        run = partial(_amax, dtype=dtype)
        yield KernelCall("Shards", "fp8_block_scaling_compute_partial_amax", text, _SHAPES, run, _QUANTIZER)
        for code_text, codes in (("E4M3", E4M3), ("E5M2", E5M2)):
            run = partial(_cast, dtype=dtype, codes=codes)
            variant = f"{text} to {code_text}"
            yield KernelCall("Shards", "fp8_block_scaling_partial_cast", variant, _SHAPES, run, _QUANTIZER)


def _part(bench: Bench, dtype: torch.dtype) -> torch.Tensor:
    return bench.wide(_ROWS * _COLUMNS, dtype=dtype)[_BEGIN:_END].contiguous()


def _amax(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    amax = torch.zeros(_ROWS // _BLOCK, _COLUMNS // _BLOCK, device=bench.device)
    bench.tex.fp8_block_scaling_compute_partial_amax(_part(bench, dtype), amax, _ROWS, _COLUMNS, _BEGIN, _BLOCK)
    return {"amax": amax}


def _cast(bench: Bench, dtype: torch.dtype, codes: str) -> Mapping[str, Any]:
    part = _part(bench, dtype)
    scale = bench.wide(_ROWS // _BLOCK, _COLUMNS // _BLOCK).abs()
    out = torch.zeros(part.numel(), dtype=torch.uint8, device=bench.device)
    code = getattr(bench.tex.DType, codes)
    bench.tex.fp8_block_scaling_partial_cast(part, out, scale, _ROWS, _COLUMNS, _BEGIN, _BLOCK, code)
    return {"codes": out.view(torch.float8_e4m3fn if codes == E4M3 else torch.float8_e5m2)}
