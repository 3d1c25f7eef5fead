"""Fused attention in FP16 and BF16, forward and backward, on all sequences of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parity.cpu.attention import flash
from parity.cpu.attention.problem import (
    GradientFormats,
    Problem,
    in_gradients,
    new_gradients,
    new_output,
    new_statistics,
    part_of_bias,
    parts,
)


@dataclass(frozen=True)
class Tensors:
    """What the backward reads."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    output_grad: Tensor
    lse: Tensor


def forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, max_seqlen_q: int
) -> tuple[Tensor, Tensor, Tensor]:
    """O, the log-sum-exp and the largest scores."""
    output = new_output(problem, query, value, query.dtype)
    lse = new_statistics(problem, query, max_seqlen_q)
    largest = lse.clone()
    for sequences, attention in parts(problem, query, key):
        part = flash.forward(sequences.query.of(query), sequences.key.of(key), sequences.key.of(value), attention)
        places = (sequences.query.in_format(problem.output_format), sequences.per_query, sequences.per_query)
        for whole, place, result in zip((output, lse, largest), places, part, strict=True):
            place.of(whole).copy_(result)
    return output, lse, largest


def backward(problem: Problem, tensors: Tensors, formats: GradientFormats) -> list[Tensor | None]:
    """The gradients of Q, K, V, the bias and the softmax offset."""
    qkv = (tensors.query, tensors.key, tensors.value)
    gradients = new_gradients(problem, formats.inputs, qkv, tensors.query.dtype)
    sink = problem.attention.sink
    bias_grad = None if problem.bias is None else torch.zeros(problem.bias.shape)
    sink_grad = None if sink is None else torch.zeros(1, sink.numel(), 1, 1)
    for sequences, attention in parts(problem, tensors.query, tensors.key):
        part = flash.backward(
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
