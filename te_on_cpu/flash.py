"""Attention as flash kernels compute it in FP16 and BF16, forward and backward, a block of queries at a time.

Follows Dao 2023 (FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithms 1 and 2) with the precisions of cuDNN's
graph in TransformerEngine 2.20.2 (``common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu``: data of the I/O dtype,
intermediates and sums FP32):

=====================================  ===============================================================================
scores                                 FP32 sums of products of the operands, scaled, modified and biased in FP32
``exp(score - largest score)``         FP32; rounded to the I/O dtype for the product with V, not for a row's sum
output                                 the product divided by the sum of the row, rounded once
backward: P                            FP32 ``exp(score - lse)``; rounded for the product with dO
backward: dS, scaled                   FP32 ``P (dP - sum(dO O)) scale``; rounded for the products with Q and K
gradients                              summed in FP32, rounded once; with GQA and MQA those of K and V are rounded for
                                       each query head, summed over the group, and rounded again
=====================================  ===============================================================================

The two roundings of GQA are in the graph that NVIDIA/cudnn-frontend 1.23.0 builds (``node/
scaled_dot_product_flash_attention.h``: ``dV_fullhead`` and ``dK_fullhead`` have the data type of Q); cuDNN 9.19 on an
H200 also rounds twice. A flash kernel subtracts the largest score of the keys it has seen so far; here all keys of a
row are seen at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from te_on_cpu import attention_problem
from te_on_cpu.attention_problem import (
    Attention,
    GradientFormats,
    Gradients,
    Problem,
    in_fp32,
    in_gradients,
    new_gradients,
    new_output,
    new_statistics,
    part_of_bias,
    parts,
    times_keys,
)


def forward(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``softmax(scale q k^T + bias) v``.

    Args:
        query: ``[batch, heads, queries, features]``, BF16 or FP16.
        key: ``[batch, groups, keys, features]``; consecutive heads share a group.
        value: ``[batch, groups, keys, value features]``.

    Returns:
        The output ``[batch, heads, queries, value features]`` in the dtype of the query; the log of the sum of
        ``exp(score)``, including the sink's; and the largest score. The last two, FP32 ``[batch, heads, queries, 1]``,
        are minus infinity where a query attends to nothing. The output is 0 there.
    """
    batch, heads, queries, _ = query.shape
    output = query.new_empty(batch, heads, queries, value.shape[-1])
    lse = torch.empty(batch, heads, queries, 1, dtype=torch.float32)
    largest = torch.empty_like(lse)
    key, value = in_fp32(key), in_fp32(value)
    generator = attention_problem.generator_of(attention)
    for block in attention_problem.blocks(attention, query, key):
        rows, sink = block.of_queries, attention_problem.sink_of(attention, block)
        if not block.columns:
            output[rows] = 0
            lse[rows] = sink
            largest[rows] = -math.inf
            continue
        weights = attention_problem.of_block(query, key, attention, block)
        top = weights.amax(-1, keepdim=True)
        largest[rows] = top
        top = torch.maximum(top, sink)
        shift = top.masked_fill(top == -math.inf, 0.0)
        weights = weights.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True).add_((sink - shift).exp_())
        lse[rows] = total.log().add_(shift)
        attention_problem.drop(weights, attention, generator)
        product = times_keys(weights.copy_(weights.to(query.dtype)), value[block.of_keys])
        output[rows] = product.div_(total.masked_fill_(total == 0, 1.0))
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
    """Return the gradients of ``forward``, from its inputs, its output and its log-sum-exp.

    Args:
        output_grad: in the shape and dtype of the output.

    Returns:
        FP32 gradients; each head's gradients of keys and values were rounded before they were summed over a group.
    """
    batch, heads = query.shape[:2]
    dtype, groups = query.dtype, key.shape[1]
    key, value = in_fp32(key), in_fp32(value)
    gradients = attention_problem.zero_gradients(query, key, value, attention)
    key_grad, value_grad = (torch.zeros(batch, heads, *tensor.shape[2:]) for tensor in (key, value))
    generator = attention_problem.generator_of(attention)
    for block in attention_problem.blocks(attention, query, key):
        rows, columns = block.of_queries, block.of_keys_by_head
        incoming = in_fp32(output_grad[rows])
        inner = (incoming * output[rows]).sum(-1, keepdim=True)
        row_lse = lse[rows].masked_fill(lse[rows] == -math.inf, math.inf)
        if gradients.sink is not None:
            sink = attention_problem.sink_of(attention, block)
            gradients.sink[block.heads] -= ((sink - row_lse).exp_() * inner).sum((0, 2, 3))
        if not block.columns:
            continue
        probabilities = attention_problem.of_block(query, key, attention, block).sub_(row_lse).exp_()
        probability_grad = times_keys(incoming, value[block.of_keys].mT)
        kept = attention_problem.drop(probability_grad, attention, generator)
        dropped = probabilities if kept is None else probabilities * kept
        value_grad[columns] += dropped.to(dtype).float().mT @ incoming
        score_grad = probability_grad.sub_(inner).mul_(probabilities)
        if gradients.bias is not None:
            attention_problem.add_bias_grad(gradients.bias, score_grad, block)
        if attention.modify_grad is not None:
            score_grad = attention.modify_grad(score_grad, block)
        score_grad.copy_(score_grad.mul_(attention.scale).to(dtype))
        gradients.query[rows] = times_keys(score_grad, key[block.of_keys])
        key_grad[columns] += score_grad.mT @ in_fp32(query[rows])
    key_grad, value_grad = (_of_groups(of_heads.to(dtype), groups) for of_heads in (key_grad, value_grad))
    return replace(gradients, key=key_grad, value=value_grad)


def _of_groups(of_heads: Tensor, groups: int) -> Tensor:
    """Sum ``[batch, heads, keys, n]`` over the heads of each group in FP32."""
    return of_heads.float().unflatten(1, (groups, -1)).sum(2)


# Fused attention in FP16 and BF16, forward and backward, on all sequences of a batch.


@dataclass(frozen=True)
class Tensors:
    """Hold the tensors that the backward reads."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    output_grad: Tensor
    lse: Tensor


def forward_of_batch(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, max_seqlen_q: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return O, the log-sum-exp and the largest scores."""
    output = new_output(problem, query, value, query.dtype)
    lse = new_statistics(problem, query, max_seqlen_q)
    largest = lse.clone()
    for sequences, attention in parts(problem, query, key):
        part = forward(sequences.query.of(query), sequences.key.of(key), sequences.key.of(value), attention)
        places = (sequences.query.in_format(problem.output_format), sequences.per_query, sequences.per_query)
        for whole, place, result in zip((output, lse, largest), places, part, strict=True):
            place.of(whole).copy_(result)
    return output, lse, largest


def backward_of_batch(problem: Problem, tensors: Tensors, formats: GradientFormats) -> list[Tensor | None]:
    """Return the gradients of Q, K, V, the bias and the softmax offset."""
    qkv = (tensors.query, tensors.key, tensors.value)
    gradients = new_gradients(problem, formats.inputs, qkv, tensors.query.dtype)
    sink = problem.attention.sink
    bias_grad = None if problem.bias is None else torch.zeros(problem.bias.shape)
    sink_grad = None if sink is None else torch.zeros(1, sink.numel(), 1, 1)
    for sequences, attention in parts(problem, tensors.query, tensors.key):
        part = backward(
            sequences.query.of(tensors.query),
            sequences.key.of(tensors.key),
            sequences.key.of(tensors.value),
            sequences.query.in_format(problem.output_format).of(tensors.output),
            sequences.query.in_format(formats.output).of(tensors.output_grad),
            sequences.per_query.of(tensors.lse),
            attention,
        )
        views = in_gradients(gradients, formats.inputs, sequences)
        for view, gradient in zip(views, (part.query, part.key, part.value), strict=True):
            view.copy_(gradient)
        if bias_grad is not None and part.bias is not None:
            part_of_bias(bias_grad, sequences).add_(part.bias)
        if sink_grad is not None and part.sink is not None:
            sink_grad += part.sink.view(1, -1, 1, 1)
    return [*gradients, None if bias_grad is None else bias_grad.to(tensors.query.dtype), sink_grad]
