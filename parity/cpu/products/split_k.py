"""A sum over K in parts whose results have 16 bits: each is rounded, and added to the others in that dtype.

So cuBLASLt adds under ``CUBLASLT_REDUCTION_SCHEME_INPLACE`` and ``_OUTPUT_TYPE``. It does not say into how many parts
it splits K; here there are four, of at least 32 elements each, and fewer, or one, where K is short.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PARTS = 4
SHORTEST = 32
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def parts(inner: int, step: int = SHORTEST) -> list[slice]:
    """Ranges of ``inner`` elements, as equal as multiples of ``step`` allow; the last has what is left over."""
    steps = inner // step
    count = max(1, min(PARTS, steps))
    borders = [step * (steps * index // count) for index in range(count)]
    return [slice(begin, end) for begin, end in zip(borders, [*borders[1:], inner], strict=True)]


def added(partial: Callable[[slice], Tensor], inner: int, dtype: torch.dtype, step: int = SHORTEST) -> Tensor:
    """The sum of the parts in ``dtype``.

    Args:
        partial: makes one part's result, FP32.
        inner: K.
        dtype: to which each is rounded, and in which they are added one after the other.
        step: what a part's length is a multiple of.
    """
    first, *others = parts(inner, step)
    total = partial(first).to(dtype)
    for part in others:
        total = total + partial(part).to(dtype)
    return total
