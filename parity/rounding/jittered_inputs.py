"""Inputs of a jittered pass in FP32, with the noise that anything has which is stored there.

A norm of the inputs rounds their mean and its root to FP32 before it stores anything, and in another order of sums they
are others; where the mean outweighs what varies, one such rounding decides a whole row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parity.rounding.freedom import Freedom
from parity.rounding.parts import Rounding

_STEP = torch.finfo(torch.float32).eps


def jittered(inputs: Any, rounding: Rounding, freedom: Freedom) -> Any:
    """Inputs, or cotangents, in FP32 with noise of up to two roundoffs; as they are in a pass that has none.

    Whole numbers stay, since floating-point flags and positions are compared with such.
    """
    if freedom.jitter is None or rounding.storage is not torch.float32:
        return inputs
    noise = torch.Generator().manual_seed(freedom.jitter)

    def jitter(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        uniform = 2.0 * torch.rand(x.shape, generator=noise).to(x.device) - 1.0
        return torch.where(x == x.round(), x, x * (1.0 + _STEP * uniform)).detach().requires_grad_(x.requires_grad)

    return tree_map_only(Tensor, jitter, inputs)
