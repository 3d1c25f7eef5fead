"""DeepSeek-V3's router: groups of experts are chosen first, and the others' scores are masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity

HIDDEN, EXPERTS, GROUPS, CHOSEN_GROUPS, CHOSEN = 32, 8, 4, 2, 3


class Mixture(nn.Module):
    """Chooses by sigmoids with a bias, weights by sigmoids without it."""

    def __init__(
        self,
        linear: Any,
        score: str = "sigmoid",
        of_choice: float = 1.0,
        weighs_biased: bool = False,
        logit: bool = False,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.register_buffer("bias", torch.linspace(-0.3, 0.3, EXPERTS))
        self.score, self.of_choice, self.weighs_biased, self.logit = score, of_choice, weighs_biased, logit

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        biased = (logits + self.bias).sigmoid() if self.logit else scores + self.of_choice * self.bias
        groups = biased.unflatten(-1, (GROUPS, -1))
        chosen = groups.topk(2, -1).values.sum(-1).topk(CHOSEN_GROUPS, -1).indices
        hidden = torch.ones_like(groups[..., 0]).scatter(-1, chosen, 0.0)[..., None].expand_as(groups).flatten(-2)
        experts = biased.masked_fill(hidden.bool(), -torch.inf).topk(CHOSEN, -1).indices
        weights = (biased if self.weighs_biased else scores).gather(-1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        share = torch.zeros_like(scores).scatter(-1, experts, weights)
        return sum(share[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def compared(**port: Any) -> parity.Result:
    def factory(te: Any) -> parity.Pair:
        reference = Mixture(nn.Linear)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, Mixture(te.Linear, **port), lambda rng: rng.normal(2, 24, HIDDEN), names)

    (result,) = parity.compare(parity.Case("mixture", factory, sizes=({},)), ["fp32"])
    return result


def test_the_same_router_passes():
    assert compared().passed


@pytest.mark.parametrize(
    ("port", "title", "message"),
    [
        (dict(score="softmax"), "routing-weights", "scored by a softmax"),
        (dict(of_choice=0.0), "routing-bias", "chosen without it"),
        (dict(of_choice=-1.0), "routing-bias", "it is subtracted"),
        (dict(weighs_biased=True), "routing-bias", "the weights come from scores with the bias"),
        (dict(logit=True), "routing-bias", "added to the logits"),
    ],
)
def test_other_scores_or_biases_are_told(port, title, message):
    first = compared(**port).findings[0]
    assert (first.title, message in first.message) == (title, True)
