"""Kernels that move numbers and compute none: transposes, packed sequences, the cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import E4M3, HALF, Bench, KernelCall

_BATCH, _LONGEST, _HEADS, _FEATURES = 3, 64, 4, 32
_LENGTHS = (64, 17, 40)
_CACHED, _NEW, _CACHE = (5, 0, 31), (1, 9, 4), 64


def calls() -> Iterator[KernelCall]:
    yield KernelCall("Layouts", "fp8_transpose", "E4M3", "[256, 384]", _fp8_transpose)
    for text, dtype in HALF.items():
        run = partial(_swap, dtype=dtype)
        yield KernelCall("Layouts", "swap_first_dims", text, "[64, 3, 128]", run)
        lengths = f"lengths {list(_LENGTHS)} of {_LONGEST}"
        run = partial(_pack, dtype=dtype)
        yield KernelCall("Layouts", "convert_bshd_to_thd, convert_thd_to_bshd", text, lengths, run)
        run = partial(_cache, dtype=dtype)
        yield KernelCall("Layouts", "copy_to_kv_cache", text, f"{list(_NEW)} after {list(_CACHED)}", run)


def _fp8_transpose(bench: Bench) -> Mapping[str, Any]:
    codes = bench.integers(256, 384, high=0x7F, dtype=torch.uint8)
    return {"transpose": bench.tex.fp8_transpose(codes, getattr(bench.tex.DType, E4M3), out=None)}


def _swap(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    return {"swapped": bench.tex.swap_first_dims(bench.normal(64, 3, 128, dtype=dtype), out=None)}


def _cumulative(bench: Bench, lengths: tuple[int, ...]) -> torch.Tensor:
    return bench.fixed([sum(lengths[:i]) for i in range(len(lengths) + 1)], torch.int32)


def _pack(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    tokens, ends = bench.normal(_BATCH, _LONGEST, _HEADS, _FEATURES, dtype=dtype), _cumulative(bench, _LENGTHS)
    packed = bench.tex.convert_bshd_to_thd(tokens, ends, sum(_LENGTHS))
    unpacked = bench.tex.convert_thd_to_bshd(packed, ends, _BATCH, _LONGEST)
    is_padding = bench.padding(_LENGTHS, _LONGEST)
    return {"packed": packed, "unpacked": unpacked.masked_fill(is_padding[:, :, None, None], 0.0)}


def _cache(bench: Bench, dtype: torch.dtype) -> Mapping[str, Any]:
    """New tokens, packed, go behind those that each sequence has in a cache without pages."""
    fresh = [bench.normal(sum(_NEW), _HEADS, _FEATURES, dtype=dtype) for _ in range(2)]
    caches = [bench.normal(_BATCH, _CACHE, _HEADS, _FEATURES, dtype=dtype) for _ in range(2)]
    ends = tuple(old + new for old, new in zip(_CACHED, _NEW, strict=True))
    layout = bench.tex.NVTE_QKV_Format.NVTE_THD
    pages = bench.fixed(range(_BATCH), torch.int32)
    bench.tex.copy_to_kv_cache(
        *(*fresh, *caches, pages, _cumulative(bench, _NEW), _cumulative(bench, ends), layout),
        *(_BATCH, max(_NEW), _CACHE, 1, True),
    )
    return {"keys": caches[0], "values": caches[1]}
