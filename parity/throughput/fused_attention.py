"""The attention that a plain module is timed with: PyTorch's fused one, as whoever cares for speed would have written.

The references of ``parity.reference`` write attention out, or where it is long compute it in blocks, to be read and to
be exact; as a baseline of speed they would flatter every port.
"""

from __future__ import annotations

import functools
import math

import torch.nn.functional as F
from torch import Tensor, nn

from parity.golden.band import Band
from parity.reference import CoreAttention


def with_fused_attention(module: nn.Module) -> nn.Module:
    """The module itself, in which every ``CoreAttention`` now calls ``F.scaled_dot_product_attention``."""
    for part in module.modules():
        if isinstance(part, CoreAttention):
            part.forward = functools.partial(_attend, part)  # type: ignore[method-assign]
    return module


def _attend(
    core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, key_is_padding: Tensor | None = None
) -> Tensor:
    """Arguments and result as ``CoreAttention``'s; a mask is made only where the causal one is not enough."""
    is_causal = core.causal and core.window is None and key_is_padding is None
    mask = None
    if not is_causal and (core.causal or core.window is not None):
        band = Band(math.inf if core.window is None else core.window, 0 if core.causal else math.inf)
        mask = ~band.hidden(range(query.shape[1]), range(key.shape[1]), query.device)
    if key_is_padding is not None:
        seen = ~key_is_padding[:, None, None, :]
        mask = seen if mask is None else mask & seen
    has_groups = query.shape[2] != key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    context = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=has_groups)
    return context.transpose(1, 2).flatten(2)
