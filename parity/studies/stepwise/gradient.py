"""Gradients of ``stepwise_attention``'s two algorithms, with a number format for each intermediate result.

Baseline has its probabilities in memory; flash recomputes them tile by tile from the log-sum-exp (FlashAttention-2,
arXiv 2307.08691, algorithm 2). A gradient takes the format of what it is the gradient of: that of the scores' product
``dO V^T`` that of the scores, ``dS`` that of the probabilities, and what is summed over tiles that of the accumulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.studies.stepwise.attention import Attended, Steps, Tiles, scores_of, softmax, visits


@dataclass(frozen=True)
class Gradients:
    """Shaped as the inputs, in the carrier, rounded as ``Steps.output``."""

    query: Tensor
    key: Tensor
    value: Tensor


def baseline(query: Tensor, key: Tensor, value: Tensor, output_grad: Tensor, steps: Steps, causal: bool) -> Gradients:
    """From ``dO`` and what the forward pass read."""
    query, key, value, output_grad = (x.to(steps.carrier) for x in (query, key, value, output_grad))
    probabilities, _ = softmax(query, key, steps, 0 if causal else None)
    probability_grad = steps.round("scores", output_grad @ value.mT)
    inner = steps.round("sum", (probability_grad * probabilities).sum(-1, keepdim=True))
    score_grad = _score_grad(probabilities, probability_grad, inner, steps, query.shape[-1])
    return Gradients(
        query=steps.round("output", score_grad @ key),
        key=steps.round("output", score_grad.mT @ query),
        value=steps.round("output", probabilities.mT @ output_grad),
    )


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    output_grad: Tensor,
    steps: Steps,
    tiles: Tiles,
    causal: bool,
) -> Gradients:
    """From ``dO``, what the forward pass read and what it returned."""
    query, key, value, output_grad = (x.to(steps.carrier) for x in (query, key, value, output_grad))
    inner = steps.round("sum", (output_grad * attended.output).sum(-1, keepdim=True))
    sums = Gradients(*(torch.zeros_like(x) for x in (query, key, value)))
    for rows, columns in visits(query.shape[-2], key.shape[-2], tiles, causal):
        scores = scores_of(
            query[..., rows, :], key[..., columns, :], steps, rows.start if causal else None, columns.start
        )
        probabilities = scores.sub_(attended.lse[..., rows, :]).exp_()
        incoming = output_grad[..., rows, :]
        probability_grad = steps.round("scores", incoming @ value[..., columns, :].mT)
        score_grad = _score_grad(probabilities, probability_grad, inner[..., rows, :], steps, query.shape[-1])
        _add(sums.value, columns, steps.round("probabilities", probabilities).mT @ incoming, steps)
        _add(sums.query, rows, score_grad @ key[..., columns, :], steps)
        _add(sums.key, columns, score_grad.mT @ query[..., rows, :], steps)
    return Gradients(*(steps.round("output", x) for x in (sums.query, sums.key, sums.value)))


def _score_grad(probabilities: Tensor, probability_grad: Tensor, inner: Tensor, steps: Steps, head_dim: int) -> Tensor:
    """The gradient of ``q k^T``, before its scaling."""
    return steps.round("probabilities", probabilities * (probability_grad - inner) / math.sqrt(head_dim))


def _add(total: Tensor, part: slice, product: Tensor, steps: Steps) -> None:
    total[..., part, :] = steps.round("accumulator", total[..., part, :] + product)
