"""Attention by TE's unfused and by cuDNN's fused kernels, forward and backward, through ``DotProductAttention``.

What a padded query gets means nothing and is taken as 0 on both sides. Flash-attention is a package of its own, of
which there are no CPU kernels.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from parity.kernel_table.bench import Bench
from parity.kernel_table.call import KernelCall

_BATCH, _SEQUENCE, _HEADS, _FEATURES = 2, 128, 8, 64
_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}
_BACKENDS = {"unfused": ("FP32", "BF16", "FP16"), "fused": ("BF16", "FP16")}


@dataclass(frozen=True)
class _Mask:
    """What TE is told; ``options`` go into its call."""

    groups: int = _HEADS
    name: str = "no_mask"
    options: tuple[tuple[str, Any], ...] = ()


_MASKS = {
    "no mask": _Mask(),
    "causal": _Mask(name="causal"),
    "causal, GQA": _Mask(2, "causal"),
    "causal, MQA": _Mask(1, "causal"),
    "window": _Mask(2, "causal", (("window_size", (32, 0)),)),
    "padding": _Mask(name="padding"),
}


def calls() -> Iterator[KernelCall]:
    for backend, dtypes in _BACKENDS.items():
        for text in dtypes:
            for name, mask in _MASKS.items():
                run = partial(_attend, backend=backend, dtype=_DTYPES[text], mask=mask)
                shapes = str([_BATCH, _SEQUENCE, _HEADS, _FEATURES])
                yield KernelCall("Attention", f"DotProductAttention, {backend}", f"{text}, {name}", shapes, run)


def _attend(bench: Bench, backend: str, dtype: torch.dtype, mask: _Mask) -> Mapping[str, Any]:
    heads = (_HEADS, mask.groups, mask.groups)
    inputs = [bench.normal(_BATCH, _SEQUENCE, n, _FEATURES, dtype=dtype).requires_grad_() for n in heads]
    grad = bench.normal(_BATCH, _SEQUENCE, _HEADS * _FEATURES, dtype=dtype)
    is_padding = bench.fixed([_SEQUENCE, _SEQUENCE - 37], torch.int64)[:, None] <= torch.arange(
        _SEQUENCE, device=bench.device
    )
    options = dict(mask.options)
    if mask.name == "padding":
        options["attention_mask"] = is_padding[:, None, None, :]
        grad = grad.masked_fill(is_padding[:, :, None], 0.0)
    with _only(backend):
        module = bench.te.DotProductAttention(
            _HEADS,
            _FEATURES,
            num_gqa_groups=mask.groups,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type=mask.name,
        )
        context = module(*inputs, **options)
        gradients = torch.autograd.grad(context, inputs, grad)
    results = dict(zip(("context", "dq", "dk", "dv"), (context.detach(), *gradients), strict=True))
    if mask.name != "padding":
        return results
    return {
        name: x.masked_fill(is_padding.view(*is_padding.shape, *[1] * (x.dim() - 2)), 0.0)
        for name, x in results.items()
    }


@contextmanager
def _only(backend: str) -> Iterator[None]:
    """TE chooses among the backends that the environment allows, and keeps its choice until told to choose again."""
    allowed = {f"NVTE_{name.upper()}_ATTN": str(int(name == backend)) for name in ("flash", "fused", "unfused")}
    with mock.patch.dict(os.environ, allowed):
        _choose_again()
        yield
    _choose_again()


def _choose_again() -> None:
    package = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention")
    for module in (package, package.dot_product_attention):
        if hasattr(module, "_attention_backends"):
            module._attention_backends["backend_selection_requires_update"] = True
