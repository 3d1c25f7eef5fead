"""Attention as flash kernels compute it, on sequences of one length, a block of queries at a time.

Forward and backward follow Dao 2023 (FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithms 1 and 2) with the
precisions of cuDNN's graph in TransformerEngine 2.20.2 (``common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu``: data
of the I/O dtype, intermediates and sums FP32):

=====================================  ================================================================================
scores                                 FP32 sums of products of the operands, scaled and biased in FP32
``exp(score - largest score)``         FP32; rounded to the I/O dtype for the product with V, not for the sum of a row
output                                 the product divided by the sum of the row, rounded once
backward: P                            FP32 ``exp(score - lse)``; rounded for the product with dO
backward: dS, scaled                   FP32 ``P (dP - sum(dO O)) scale``; rounded for the products with Q and K
gradients                              summed in FP32, rounded once
=====================================  ================================================================================

A flash kernel subtracts the largest score of the keys it has seen so far; here all keys of a row are seen at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.cpu.attention import masks
from parity.cpu.attention.masks import Band

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
class Gradients:
    """FP32 gradients, shaped as the inputs; ``bias`` and ``sink`` are None where there is none."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sink: Tensor | None


@dataclass(frozen=True)
class _Block:
    rows: range
    columns: range


def forward(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax(scale q k^T + bias) v``.

    Args:
        query: ``[batch, heads, queries, features]``, BF16 or FP16.
        key: ``[batch, groups, keys, features]``; heads are shared out to groups in order.
        value: ``[batch, groups, keys, value features]``.

    Returns:
        The output ``[batch, heads, queries, value features]`` in the dtype of the query; the log of the sum of
        ``exp(score)``, the sink's included, and the largest score, both ``[batch, heads, queries, 1]`` FP32 and
        minus infinity where a query attends to nothing. The output is 0 there.
    """
    batch, heads, queries, _ = query.shape
    groups, keys = key.shape[1:3]
    output = query.new_empty(batch, heads, queries, value.shape[-1])
    lse = torch.empty(batch, heads, queries, 1, dtype=torch.float32)
    largest = torch.empty_like(lse)
    key, value = _in_fp32(key), _in_fp32(value)
    generator = _generator(attention)
    for block in _blocks(attention, batch * heads, queries, keys):
        rows = slice(block.rows.start, block.rows.stop)
        if not block.columns:
            output[:, :, rows] = 0
            lse[:, :, rows] = _sink_of(attention) if attention.sink is not None else -math.inf
            largest[:, :, rows] = -math.inf
            continue
        scores = _scores(query[:, :, rows], key, attention, block, queries)
        top = scores.amax(-1, keepdim=True)
        largest[:, :, rows] = top
        if attention.sink is not None:
            top = torch.maximum(top, _sink_of(attention))
        shift = top.masked_fill(top == -math.inf, 0.0)
        weights = scores.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True)
        if attention.sink is not None:
            total += (_sink_of(attention) - shift).exp_()
        lse[:, :, rows] = total.log().add_(shift)
        _drop(weights, attention, generator)
        weights = weights.to(query.dtype).float()
        product = _grouped(weights, groups) @ value[:, :, block.columns.start : block.columns.stop]
        output[:, :, rows] = product.view(batch, heads, len(block.rows), -1).div_(total.masked_fill_(total == 0, 1.0))
    return output, lse, largest


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    output_grad: Tensor,
    lse: Tensor,
    attention: Attention,
) -> Gradients:
    """The gradients of ``forward``, from its inputs, its output and its log-sum-exp.

    Args:
        output_grad: shaped and typed as the output.
    """
    batch, heads, queries, _ = query.shape
    dtype, groups, keys = query.dtype, key.shape[1], key.shape[2]
    key, value = _in_fp32(key), _in_fp32(value)
    gradients = _zeros(query, key, value, attention)
    generator = _generator(attention)
    for block in _blocks(attention, batch * heads, queries, keys):
        rows = slice(block.rows.start, block.rows.stop)
        columns = slice(block.columns.start, block.columns.stop)
        incoming = _in_fp32(output_grad[:, :, rows])
        inner = (incoming * output[:, :, rows]).sum(-1, keepdim=True)
        row_lse = lse[:, :, rows].masked_fill(lse[:, :, rows] == -math.inf, math.inf)
        if attention.sink is not None and gradients.sink is not None:
            gradients.sink.sub_(((_sink_of(attention) - row_lse).exp_() * inner).sum((0, 2, 3)))
        if not block.columns:
            continue
        probabilities = _scores(query[:, :, rows], key, attention, block, queries).sub_(row_lse).exp_()
        incoming = _grouped(incoming, groups)
        probability_grad = (incoming @ value[:, :, columns].mT).view_as(probabilities)
        kept = _drop(probability_grad, attention, generator)
        dropped = probabilities if kept is None else probabilities * kept
        gradients.value[:, :, columns] += _grouped(dropped.to(dtype).float(), groups).mT @ incoming
        score_grad = probability_grad.sub_(inner).mul_(probabilities)
        if gradients.bias is not None:
            _add_bias_grad(gradients.bias, score_grad, block)
        score_grad = _grouped(score_grad.mul_(attention.scale).to(dtype).float(), groups)
        gradients.query[:, :, rows] = (score_grad @ key[:, :, columns]).view(batch, heads, len(block.rows), -1)
        gradients.key[:, :, columns] += score_grad.mT @ _grouped(_in_fp32(query[:, :, rows]), groups)
    return gradients


def _blocks(attention: Attention, rows_at_once: int, queries: int, keys: int) -> Iterator[_Block]:
    """Blocks of queries with the keys that they may see, each with about ``_SCORES_IN_A_BLOCK`` scores."""
    size = max(16, _SCORES_IN_A_BLOCK // max(1, rows_at_once * keys))
    for start in range(0, queries, size):
        rows = range(start, min(start + size, queries))
        yield _Block(rows, masks.visible_keys(attention.band, rows, queries, keys))


def _scores(query: Tensor, key: Tensor, attention: Attention, block: _Block, queries: int) -> Tensor:
    """``[batch, heads, rows, columns]`` FP32: scaled, biased, minus infinity where a key is hidden.

    Args:
        query: the rows of the block.
        key: all keys, FP32.
    """
    batch, heads, rows, _ = query.shape
    columns = slice(block.columns.start, block.columns.stop)
    product = _grouped(_in_fp32(query), key.shape[1]) @ key[:, :, columns].mT
    scores = product.view(batch, heads, rows, -1).mul_(attention.scale)
    if attention.bias is not None:
        scores += _part_of_bias(attention.bias, block)
    if attention.alibi:
        scores += masks.alibi(heads, block.rows, block.columns)
    hidden = masks.hidden_keys(attention.band, block.rows, block.columns, queries, key.shape[2])
    return scores if hidden is None else scores.masked_fill_(hidden, -math.inf)


def _part_of_bias(bias: Tensor, block: _Block) -> Tensor:
    if bias.shape[2] > 1:
        bias = bias[:, :, block.rows.start : block.rows.stop]
    return bias[..., block.columns.start : block.columns.stop]


def _add_bias_grad(bias_grad: Tensor, score_grad: Tensor, block: _Block) -> None:
    part = _part_of_bias(bias_grad, block)
    part += score_grad.sum_to_size(part.shape)


def _in_fp32(tensor: Tensor) -> Tensor:
    """A contiguous FP32 copy, or the tensor itself if it is that already."""
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """``[batch, heads, rows, n]`` as ``[batch, groups, heads of a group * rows, n]``."""
    return tensor.reshape(tensor.shape[0], groups, -1, tensor.shape[-1])


def _sink_of(attention: Attention) -> Tensor:
    assert attention.sink is not None
    return attention.sink.view(1, -1, 1, 1)


def _generator(attention: Attention) -> torch.Generator:
    return torch.Generator().manual_seed(attention.seed)


def _drop(weights: Tensor, attention: Attention, generator: torch.Generator) -> Tensor | None:
    """Drop entries of ``weights`` in place; returns the factor of each, or None if none is dropped."""
    if attention.dropout == 0.0:
        return None
    kept = torch.empty_like(weights).bernoulli_(1 - attention.dropout, generator=generator)
    kept *= 1 / (1 - attention.dropout)
    weights *= kept
    return kept


def _zeros(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Gradients:
    bias, sink = attention.bias, attention.sink
    return Gradients(
        query=torch.zeros(query.shape),
        key=torch.zeros(key.shape),
        value=torch.zeros(value.shape),
        bias=None if bias is None else torch.zeros(bias.shape),
        sink=None if sink is None else torch.zeros(sink.shape),
    )
