"""The plain tensors that a kernel's results consist of, on the CPU; the dtype of each is the format of its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.cpu.quantized import float8, formats

_SCALE_DTYPES = {"MXFP8Tensor": torch.float8_e8m0fnu, "NVFP4Tensor": torch.float8_e4m3fn}


def unpack(results: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every buffer of every result, by name.

    FP8 codes and scales have their own dtype; FP4 codes, of which torch's kernels know nothing, are int8 numbers from
    -7 to 7 in the order of the values that they stand for, one for each value.

    Args:
        results: plain tensors, TE quantized tensors, or None, by name.
    """
    buffers = ((f"{name} {part}".strip(), buffer) for name, value in results.items() for part, buffer in _parts(value))
    return {name: buffer.detach().cpu().contiguous() for name, buffer in buffers}


def _parts(value: Any) -> Iterator[tuple[str, Tensor]]:
    if value is None:
        return
    entry = formats.of_tensor(value)
    if entry is not None:
        yield from _block_scaled(entry, value)
    elif float8.is_float8_tensor(value):
        codes = float8.fp8_dtype(value)
        if value._data is not None:
            yield "codes", value._data.view(codes)
        if value._transpose is not None and not value._transpose_invalid:
            yield "transpose", value._transpose.view(codes)
        yield "scale_inv", value._scale_inv
    else:
        yield "", value


def _block_scaled(entry: formats.Format, value: Any) -> Iterator[tuple[str, Tensor]]:
    for name in entry.buffers:
        buffer = getattr(value, f"_{name}")
        if buffer is None:
            continue
        if name.endswith("data"):
            is_fp4 = entry.tensor == "NVFP4Tensor"
            yield name.replace("data", "codes"), _fp4(buffer) if is_fp4 else buffer.view(float8.fp8_dtype(value))
        elif name.endswith("scale_inv") and entry.tensor in _SCALE_DTYPES:
            yield name, buffer.view(_SCALE_DTYPES[entry.tensor])
        else:
            yield name, buffer


def _fp4(packed: Tensor) -> Tensor:
    """Two codes a byte, the first in the lower half: a sign, and 3 bits that grow with the magnitude."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
    return torch.where(codes < 8, codes, 8 - codes)
