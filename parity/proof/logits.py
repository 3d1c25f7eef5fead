"""Say what the error of a model's logits means for the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Apart:
    """How far logits are from the reference's.

    Attributes:
        mean, largest: the Kullback-Leibler divergence of a token's probabilities from the reference's, in nats.
        agreement: the share of tokens with the same most likely next one.
        perplexity: by how much the perplexity on the ids is larger than the reference's; NaN for a single token.
    """

    mean: float
    largest: float
    agreement: float
    perplexity: float


@dataclass(frozen=True)
class Logits:
    """How far the candidate's logits are from the reference's, and how far the rounding model's are.

    Attributes:
        perplexity: the reference's perplexity on the ids.
        computed, expected: the candidate's and the rounding model's distance.
    """

    perplexity: float
    computed: Apart
    expected: Apart


def compare_logits(exact: Tensor, computed: Tensor, modelled: Tensor, ids: Tensor) -> Logits | None:
    """Compare logits ``[batch, seq, vocabulary]`` of ids ``[batch, seq]``; None if these are not such."""
    if ids.is_floating_point() or ids.dim() != 2 or exact.shape[:-1] != ids.shape or ids.max() >= exact.shape[-1]:
        return None
    golden = exact.double().log_softmax(-1)
    perplexity = _measure_perplexity(golden, ids)
    return Logits(perplexity, *(_measure_distance(golden, x, ids, perplexity) for x in (computed, modelled)))


def _measure_distance(golden: Tensor, logits: Tensor, ids: Tensor, perplexity: float) -> Apart:
    other = logits.double().log_softmax(-1)
    divergence = F.kl_div(other, golden, reduction="none", log_target=True).sum(-1)
    agree = (golden.argmax(-1) == other.argmax(-1)).double()
    return Apart(
        divergence.mean().item(),
        divergence.max().item(),
        agree.mean().item(),
        _measure_perplexity(other, ids) - perplexity,
    )


def _measure_perplexity(log_probabilities: Tensor, ids: Tensor) -> float:
    """Return the perplexity of each id after the first, given those before it."""
    of_next = log_probabilities[:, :-1].gather(-1, ids[:, 1:, None])
    return torch.exp(-of_next.mean()).item()
