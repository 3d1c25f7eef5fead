"""The two levels of NVFP4's scales: one for the tensor, from its amax, and one for each block.

Follows ``common/cast/nvfp4/core_nvfp4.cuh`` of TransformerEngine 2.20.2. Encoding scales multiply values before they
are cast to E2M1; decoding scales undo them, and a block's is what is stored, in E4M3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.cpu.quantized import float4, float8

E4M3 = torch.float8_e4m3fn
LARGEST_FP32 = torch.finfo(torch.float32).max


def e4m3_limit(of: Any) -> float:
    """The largest block scale of a TE quantizer or tensor: 448, or 256 to leave room for 4over6."""
    return float(getattr(of, "nvfp4_e4m3_max", getattr(of, "_nvfp4_e4m3_max", 448)))


def global_scale(amax: Tensor, limit: float) -> Tensor:
    """What maps an amax to the largest code times the largest block scale (``limit``), FP32.

    1 where the amax is 0 or infinite, and at most the largest FP32.
    """
    scale = torch.full_like(amax, limit * float4.LIMIT).div(amax).clamp(max=LARGEST_FP32)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def encoding_scale(decoding: Tensor, scale: Tensor) -> Tensor:
    """What multiplies the values of each block before they are cast, at most the largest FP32.

    Args:
        decoding: E4M3 bytes, one a block.
        scale: as of ``global_scale``, broadcast to the blocks.
    """
    return (float8.decode(decoding, E4M3) * scale.reciprocal()).reciprocal_().clamp_(max=LARGEST_FP32)
