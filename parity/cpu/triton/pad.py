"""Zeros around the scales of columnwise data.

Stands in for the wrapper of ``transformer_engine/pytorch/triton/pad.py`` (2.14.1 to 2.20.2), whose kernel is Triton's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["pad_columnwise_scale_inv"]


@torch.no_grad()
def pad_columnwise_scale_inv(inp: Tensor) -> Tensor:
    """A matrix with zeros below and to the right, up to multiples of 128 rows and 4 columns; any dtype."""
    rows, columns = inp.shape
    return pad(inp, (0, -columns % 4, 0, -rows % 128))
