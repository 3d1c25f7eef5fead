"""The random Hadamard transform that NVFP4 applies before it quantizes columnwise.

Follows ``NVFP4Quantizer`` of TransformerEngine 2.20.2 (``tensor/nvfp4_tensor.py`` for the matrix,
``csrc/quantizer.cpp`` for where it is applied). The transform is orthogonal: applied to both operands of a GEMM along
the inner dimension, it leaves the product as it is and spreads outliers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def transform(values: Tensor, matrix: Tensor) -> Tensor:
    """Each group of 16 neighbours in a row of ``[rows, n]`` times the 16 x 16 ``matrix``: BF16, rounded once.

    Raises:
        RuntimeError: for values that are not BF16, which TE's kernels refuse, and rows that are not full groups.
    """
    size = len(matrix)
    if values.dtype != torch.bfloat16 or values.shape[-1] % size:
        raise RuntimeError(
            f"the random Hadamard transform takes bfloat16 in groups of {size}, but got {values.dtype} "
            f"{list(values.shape)}"
        )
    return (values.reshape(-1, size).float() @ matrix.float()).to(torch.bfloat16).view(values.shape)
