"""Scores of attention, a block of queries at a time, and which keys a query attends to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.cpu.enums import NVTE_Mask_Type

# Which keys a query attends to, and ALiBi's distance penalty.
#
# Follows how TransformerEngine 2.20.2 describes masks to cuDNN
# (``common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu``) and to its users (``get_full_mask`` and ``get_alibi`` in
# ``attention/dot_product_attention/utils.py``).


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


def band_of(mask_type: int, window: Sequence[int], bottom_right: bool) -> Band:
    """The band of an ``NVTE_Mask_Type`` and a sliding window ``(left, right)``, in which -1 stands for all keys."""
    left, right = (None if side == -1 else side for side in window)
    return Band(left, 0 if is_causal(mask_type) else right, bottom_right)


def is_causal(mask_type: int) -> bool:
    return "CAUSAL" in NVTE_Mask_Type(mask_type).name


def is_padding(mask_type: int) -> bool:
    """Return whether the sequences of a batch have lengths of their own."""
    return "PADDING" in NVTE_Mask_Type(mask_type).name


def visible_keys(band: Band, rows: range, queries: int, keys: int) -> range:
    """Return the keys that at least one query of ``rows`` may attend to, out of ``queries`` and ``keys`` altogether."""
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


# Scores of attention, a block of queries at a time: what the kernels for each precision have in common.


# Scores in memory at a time, FP32: few enough for the caches, enough to keep the matrix products busy.
_SCORES_IN_A_BLOCK = 1 << 20


@dataclass(frozen=True)
class Attention:
    """What turns scores into probabilities.

    Attributes:
        scale: factor of ``q k``.
        band: which keys a query attends to.
        alibi: whether ALiBi's penalty is added.
        bias: added to the scaled scores, ``[batch or 1, heads or 1, queries or 1, keys]``; None for nothing.
        sink: one more score for each head, of a key without a value, ``[heads]`` FP32; None for none.
        dropout: the probability with which a probability becomes 0, the others growing by ``1 / (1 - dropout)``.
        seed: of the dropout mask; the same in forward and backward.
    """

    scale: float
    band: Band
    alibi: bool = False
    bias: Tensor | None = None
    sink: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Block:
    """Some queries and the keys that at least one of them may see."""

    rows: range
    columns: range

    @property
    def row_slice(self) -> slice:
        return slice(self.rows.start, self.rows.stop)

    @property
    def column_slice(self) -> slice:
        return slice(self.columns.start, self.columns.stop)


@dataclass(frozen=True)
class Gradients:
    """FP32 gradients, shaped as the inputs; ``bias`` and ``sink`` are None where there is none."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sink: Tensor | None


def blocks(attention: Attention, query: Tensor, key: Tensor) -> Iterator[Block]:
    """Blocks of queries with the keys that they may see, each with about ``_SCORES_IN_A_BLOCK`` scores."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    size = max(16, _SCORES_IN_A_BLOCK // max(1, batch * heads * keys))
    for start in range(0, queries, size):
        rows = range(start, min(start + size, queries))
        yield Block(rows, visible_keys(attention.band, rows, queries, keys))


def of_block(query: Tensor, key: Tensor, attention: Attention, block: Block) -> Tensor:
    """``[batch, heads, rows, columns]`` FP32: scaled, biased, minus infinity where a key is hidden.

    Args:
        query: all queries.
        key: all keys, FP32.
    """
    batch, heads, queries, _ = query.shape
    rows = in_fp32(query[:, :, block.row_slice])
    product = grouped(rows, key.shape[1]) @ key[:, :, block.column_slice].mT
    scores = product.view(batch, heads, len(block.rows), -1).mul_(attention.scale)
    if attention.bias is not None:
        scores += _part_of_bias(attention.bias, block)
    if attention.alibi:
        scores += alibi(heads, block.rows, block.columns)
    hidden = hidden_keys(attention.band, block.rows, block.columns, queries, key.shape[2])
    return scores if hidden is None else scores.masked_fill_(hidden, -math.inf)


def add_bias_grad(bias_grad: Tensor, score_grad: Tensor, block: Block) -> None:
    """Add the gradient of a block's scores to that of the bias, summed over what the bias is shared by."""
    part = _part_of_bias(bias_grad, block)
    part += score_grad.sum_to_size(part.shape)


def _part_of_bias(bias: Tensor, block: Block) -> Tensor:
    if bias.shape[2] > 1:
        bias = bias[:, :, block.row_slice]
    return bias[..., block.column_slice]


def in_fp32(tensor: Tensor) -> Tensor:
    """Return a contiguous FP32 copy, or the tensor itself if it is that already."""
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


def grouped(tensor: Tensor, groups: int) -> Tensor:
    """``[batch, heads, rows, n]`` as ``[batch, groups, heads of a group * rows, n]``."""
    return tensor.reshape(tensor.shape[0], groups, -1, tensor.shape[-1])


def sink_of(attention: Attention) -> Tensor:
    """``[1, heads, 1, 1]``; minus infinity, which changes nothing, where there is none."""
    if attention.sink is None:
        return torch.full((1, 1, 1, 1), -math.inf)
    return attention.sink.view(1, -1, 1, 1)


def generator_of(attention: Attention) -> torch.Generator:
    """Of the dropout masks, block by block."""
    return torch.Generator().manual_seed(attention.seed)


def drop(weights: Tensor, attention: Attention, masks_from: torch.Generator) -> Tensor | None:
    """Drop entries of ``weights`` in place; returns the factor of each, or None if none is dropped."""
    if attention.dropout == 0.0:
        return None
    kept = torch.empty_like(weights).bernoulli_(1 - attention.dropout, generator=masks_from)
    kept *= 1 / (1 - attention.dropout)
    weights *= kept
    return kept


def zero_gradients(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Gradients:
    """FP32 zeros to add up gradients in."""
    return Gradients(
        query=torch.zeros(query.shape),
        key=torch.zeros(key.shape),
        value=torch.zeros(value.shape),
        bias=None if attention.bias is None else torch.zeros(attention.bias.shape),
        sink=None if attention.sink is None else torch.zeros(attention.sink.shape),
    )
