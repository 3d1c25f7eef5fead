"""Mistakes with mixtures of experts: their router's weights, how many they are, and in which order they lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN, FFN, EXPERTS, TOKENS = 64, 96, 4, 64
BIAS = torch.tensor([0.3, -0.2, 0.1, -0.3])


class Mixture(nn.Module):
    """Of experts whose weights are stacked, as in Mixtral; each token's weights are divided by their sum, or not."""

    def __init__(self, normalised: bool = True, after: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight)
        self.gate_up = nn.Parameter(0.1 * torch.randn(EXPERTS, 2 * FFN, HIDDEN))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, HIDDEN, FFN))
        self.normalised, self.after, self.biased = normalised, after, biased
        self.register_buffer("bias", BIAS.clone())

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        if self.biased:
            scores = logits.sigmoid()
            experts = (scores + self.bias).topk(2, -1).indices
            weights = scores.gather(-1, experts)
            weights = weights / weights.sum(-1, keepdim=True)
        elif self.after:
            chosen, experts = logits.topk(2, -1)
            weights = chosen.softmax(-1)
        else:
            weights, experts = torch.topk(logits.softmax(-1), 2, dim=-1)
            if self.normalised:
                weights /= weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, place = torch.where(experts == expert)
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            result = result.index_add(0, token, y * weights[token, place, None])
        return result


def port(te, weigh, experts=2, split=None):
    """TE's grouped layers, with a router that scores by ``weigh``: from logits to weights and chosen experts.

    ``split`` makes splits from the right ones.
    """

    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
            self.fc1 = te.GroupedLinear(EXPERTS, HIDDEN, 2 * FFN, bias=False)
            self.fc2 = te.GroupedLinear(EXPERTS, FFN, HIDDEN, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = weigh(self.router(x), experts)
            rows, places = te.moe_permute(x, chosen.int(), num_out_tokens=chosen.numel(), map_type="index")
            splits = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
            splits = split(splits) if split else splits
            gate, up = self.fc1(rows, splits).chunk(2, -1)
            y = self.fc2(F.silu(gate) * up, splits)
            return te.moe_unpermute(y, places, weights.float(), map_type="index")

    return Port()


def of_all(logits, k):
    return logits.softmax(-1).topk(k, -1)


def normalised(logits, k):
    weights, chosen = of_all(logits, k)
    return weights / weights.sum(-1, keepdim=True), chosen


def missing(logits, k):
    weights, chosen = of_all(logits, k)
    return torch.ones_like(weights), chosen


def sigmoids(logits, k):
    weights, chosen = logits.sigmoid().topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


def biased(choice=1.0, weight=0.0, logit=0.0, score=torch.sigmoid):
    """Chooses and weights by sigmoids to which so many times the bias is added; ``logit`` adds to logits."""

    def weigh(logits, k):
        bias, scores = BIAS.to(logits.dtype), score(logits)
        chosen = ((logits if logit else scores) + (logit or choice) * bias).topk(k, -1).indices
        weights = (scores + weight * bias).gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    return weigh


def sorted_alone(logits, k):
    weights, chosen = normalised(logits, k)
    return weights, chosen.sort(-1).values


def found(weigh, experts=2, order=range(EXPERTS), gate_up_order=None, split=None, **reference):
    """Titles of the findings on a port that weights so, against the reference with these arguments."""

    def factory(te, **_):
        fc1 = [f"fc1.weight{i}" for i in (order if gate_up_order is None else gate_up_order)]
        return parity.Pair(
            reference=Mixture(**reference),
            candidate=port(te, weigh, experts, split),
            inputs=lambda rng, tokens: rng.normal(tokens, HIDDEN),
            weights={
                "router.weight": "router.weight",
                "gate_up": parity.experts(*fc1),
                "down": parity.experts(*(f"fc2.weight{i}" for i in order)),
            },
        )

    case = parity.Case("mixture", factory, sizes=(dict(tokens=TOKENS),))
    (result,) = parity.compare(case, ["fp32"])
    return [finding.title for finding in result.findings] if result.status == "failed" else [result.status]


@pytest.mark.parametrize(
    ("weigh", "reference"),
    [(normalised, {}), (of_all, dict(normalised=False)), (normalised, dict(after=True)), (biased(), dict(biased=True))],
)
def test_right_ports_of_stacked_experts_pass(weigh, reference):
    assert found(weigh, **reference) == ["passed"]


@pytest.mark.parametrize(
    ("weigh", "reference"),
    [
        (of_all, {}),
        (normalised, dict(normalised=False)),
        (of_all, dict(after=True)),
        (sigmoids, {}),
        (sorted_alone, {}),
        (lambda *x: (of_all(*x)[0].square(), of_all(*x)[1]), dict(normalised=False)),
        (biased(score=lambda logits: logits.softmax(-1)), dict(biased=True)),
    ],
)
def test_weights_that_are_made_otherwise_are_found(weigh, reference):
    assert found(weigh, **reference) == ["routing-weights"]


@pytest.mark.parametrize("weigh", [biased(choice=0.0), biased(choice=-1.0), biased(weight=1.0), biased(logit=1.0)])
def test_a_bias_that_is_added_otherwise_is_found(weigh):
    assert found(weigh, biased=True) == ["routing-bias"]


@pytest.mark.parametrize(
    "split", [sorted, lambda splits: splits[::-1], lambda splits: [2 * TOKENS // EXPERTS] * EXPERTS]
)
def test_splits_that_are_no_counts_of_the_experts_tokens_are_found(split):
    assert found(normalised, split=split) == ["expert-splits"]
    assert found(biased(), split=split, biased=True) == ["expert-splits"]


@pytest.mark.parametrize("reference", [{}, dict(normalised=False), dict(after=True)])
def test_weights_that_are_not_applied_are_found_with_the_router_that_gets_no_gradient(reference):
    assert found(missing, **reference) == ["routing-weights", "no-gradient"]


@pytest.mark.parametrize("experts", [1, 3])
def test_a_token_that_goes_to_another_number_of_experts_is_found(experts):
    assert found(normalised, experts) == ["top-k"]


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (3, 2, 1, 0), (1, 2, 3, 0)])
def test_experts_in_another_order_than_the_routers_are_found(order):
    assert found(normalised, order=order) == ["experts-permuted"]
    assert found(normalised, gate_up_order=order) == ["experts-permuted"]
