"""Attention by TE's unfused and by cuDNN's fused kernels, forward and backward, through ``DotProductAttention``.

What a padded query gets means nothing and is taken as 0 on both sides. Flash-attention is a package of its own, of
which there are no CPU kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import DTYPES, Bench, KernelCall
from parity.te.attention_backend import AttentionBackend, attention_backends

_BATCH, _SEQUENCE, _HEADS, _FEATURES = 2, 128, 8, 64
_BACKENDS: dict[AttentionBackend, tuple[str, ...]] = {"unfused": ("FP32", "BF16", "FP16"), "fused": ("BF16", "FP16")}


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
                run = partial(_attend, backend=backend, dtype=DTYPES[text], mask=mask)
                shapes = str([_BATCH, _SEQUENCE, _HEADS, _FEATURES])
                yield KernelCall("Attention", f"DotProductAttention, {backend}", f"{text}, {name}", shapes, run)


def _attend(bench: Bench, backend: AttentionBackend, dtype: torch.dtype, mask: _Mask) -> Mapping[str, Any]:
    heads = (_HEADS, mask.groups, mask.groups)
    inputs = [bench.normal(_BATCH, _SEQUENCE, n, _FEATURES, dtype=dtype).requires_grad_() for n in heads]
    grad = bench.normal(_BATCH, _SEQUENCE, _HEADS * _FEATURES, dtype=dtype)
    is_padding = bench.padding([_SEQUENCE, _SEQUENCE - 37], _SEQUENCE)
    options = dict(mask.options)
    if mask.name == "padding":
        options["attention_mask"] = is_padding[:, None, None, :]
        grad = grad.masked_fill(is_padding[:, :, None], 0.0)
    with attention_backends(backend):
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
