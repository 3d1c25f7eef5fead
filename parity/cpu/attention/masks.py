"""Which keys a query attends to, and ALiBi's distance penalty.

Follows how TransformerEngine 2.20.2 describes masks to cuDNN (``common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu``)
and to its users (``get_full_mask`` and ``get_alibi`` in ``attention/dot_product_attention/utils.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.cpu.enums import NVTE_Mask_Type


@dataclass(frozen=True)
class Band:
    """The keys that query i attends to: ``i + offset - left`` to ``i + offset + right``, both included.

    Attributes:
        left: keys before the diagonal; None for all.
        right: keys behind the diagonal; None for all.
        bottom_right: the diagonal ends at the last query and the last key (the offset is keys minus queries); else it
            starts at the first ones (the offset is 0).
    """

    left: int | None
    right: int | None
    bottom_right: bool


def band(mask_type: int, window: Sequence[int], bottom_right: bool) -> Band:
    """The band of an ``NVTE_Mask_Type`` and a sliding window ``(left, right)``, in which -1 stands for all keys."""
    left, right = (None if side == -1 else side for side in window)
    return Band(left, 0 if is_causal(mask_type) else right, bottom_right)


def is_causal(mask_type: int) -> bool:
    return "CAUSAL" in NVTE_Mask_Type(mask_type).name


def is_padding(mask_type: int) -> bool:
    """Whether the sequences of a batch have lengths of their own."""
    return "PADDING" in NVTE_Mask_Type(mask_type).name


def visible_keys(band: Band, rows: range, queries: int, keys: int) -> range:
    """The keys that at least one query of ``rows`` may attend to, out of ``queries`` and ``keys`` altogether."""
    offset = keys - queries if band.bottom_right else 0
    first = 0 if band.left is None else max(0, rows.start + offset - band.left)
    last = keys if band.right is None else min(keys, rows.stop + offset + band.right)
    return range(first, max(first, last))


def hidden_keys(band: Band, rows: range, columns: range, queries: int, keys: int) -> Tensor | None:
    """``[rows, columns]``, True where a query must not see a key; None if each sees all of these."""
    offset = keys - queries if band.bottom_right else 0
    left_is_free = band.left is None or columns.start >= rows.stop - 1 + offset - band.left
    right_is_free = band.right is None or columns.stop - 1 <= rows.start + offset + band.right
    if left_is_free and right_is_free:
        return None
    distance = torch.arange(columns.start, columns.stop) - torch.arange(rows.start, rows.stop)[:, None] - offset
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if band.left is not None:
        hidden |= distance < -band.left
    if band.right is not None:
        hidden |= distance > band.right
    return hidden


def alibi_slopes(heads: int) -> Tensor:
    """``[heads]`` FP32: ``2^(-8 i / n)`` for i = 1..n, with every other step of a finer series for heads beyond a power
    of two n (Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409, and their published code)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = torch.pow(2.0 ** (-8.0 / power), torch.arange(1, power + 1))
    finer = torch.pow(2.0 ** (-4.0 / power), torch.arange(1, 2 * (heads - power) + 1, 2))
    return torch.cat([slopes, finer]).float()


def alibi(heads: int, rows: range, columns: range) -> Tensor:
    """``[heads, rows, columns]`` FP32: minus slope times the distance between query and key, counted from the first
    query and the first key (TE's table of biases: fused attention aligns ALiBi top left)."""
    distance = torch.arange(columns.start, columns.stop) - torch.arange(rows.start, rows.stop)[:, None]
    return distance.abs().neg() * alibi_slopes(heads)[:, None, None]
