"""The 16-bit dtypes in which a port may hold, by mistake, what belongs in FP32."""

from __future__ import annotations

import torch


def low_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Those to look for in a port whose weights are of ``dtype``, the likeliest first.

    BF16 is looked for everywhere: autocast makes it of FP32, and code that was written for BF16 names it.
    """
    return (torch.float16, torch.bfloat16) if dtype is torch.float16 else (torch.bfloat16,)


def short(dtype: torch.dtype) -> str:
    """As precisions are named: ``bf16`` or ``fp16``."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
