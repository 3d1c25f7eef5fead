"""Cross-entropy by TE's Triton kernels, which overwrite the logits by their gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from parity.lab.kernel_table.bench import Bench, KernelCall

_BATCH, _SEQUENCE, _VOCABULARY = 2, 64, 1000
_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}


def calls() -> Iterator[KernelCall]:
    for text, dtype in _DTYPES.items():
        for smoothing in (0.0, 0.1):
            run = partial(_cross_entropy, dtype=dtype, smoothing=smoothing)
            variant = f"{text}, label smoothing {smoothing}"
            shapes = str([_BATCH, _SEQUENCE, _VOCABULARY])
            yield KernelCall("Losses", "parallel_cross_entropy", variant, shapes, run)


def _cross_entropy(bench: Bench, dtype: torch.dtype, smoothing: float) -> Mapping[str, Any]:
    logits = bench.normal(_BATCH, _SEQUENCE, _VOCABULARY, dtype=dtype, scale=3.0).requires_grad_()
    target = bench.integers(_BATCH, _SEQUENCE, high=_VOCABULARY, dtype=torch.int64)
    loss = bench.te.parallel_cross_entropy(logits.clone(), target, smoothing, False, None)
    (gradient,) = torch.autograd.grad(loss, logits, bench.normal(*loss.shape, dtype=loss.dtype))
    return {"loss": loss.detach(), "gradient": gradient}
