"""Mixtures of experts: their router's scores, weights and biases, the number of experts chosen, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.port import Port
from lab.corpus.small import Host, normal, twins
from parity.case.weight_map import experts, stack

HIDDEN = 64

# Mixtral's experts with stacked weights, against TE's grouped layers.

FFN, EXPERTS, TOKENS = 96, 4, 64
BIAS = torch.tensor([0.3, -0.2, 0.1, -0.3])
SCALE = 2.5  # of the weights, as in DeepSeek's models
Router = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # maps logits and a count to weights and chosen experts


def normalised(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = not_normalised(logits, k)
    return weights / weights.sum(-1, keepdim=True), chosen


def not_normalised(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return logits.softmax(-1).topk(k, -1)


def of_chosen(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    chosen, places = logits.topk(k, -1)
    return chosen.softmax(-1), places


def scaled(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = not_normalised(logits, k)
    return SCALE * weights / weights.sum(-1, keepdim=True), chosen


def biased(choice: float = 1.0, weight: float = 0.0, logit: float = 0.0, score: Any = torch.sigmoid) -> Router:
    """Return a router that adds multiples of the bias to the scores for its choice and weights, or to the logits."""

    def weigh(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        bias, scores = BIAS.to(logits.dtype), score(logits)
        chosen = ((logits if logit else scores) + (logit or choice) * bias).topk(k, -1).indices
        weights = (scores + weight * bias).gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    return weigh


def without_weights(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = not_normalised(logits, k)
    return torch.ones_like(weights), chosen


def sigmoids(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = logits.sigmoid().topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


def sigmoids_alone(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return logits.sigmoid().topk(k, -1)


def choice_sorted(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = normalised(logits, k)
    return weights, chosen.sort(-1).values


def squared(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = not_normalised(logits, k)
    return weights.square(), chosen


def twice_scaled(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = scaled(logits, k)
    return weights.square(), chosen


class Mixture(nn.Module):
    """Experts with stacked weights, as in Mixtral."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router, self.weigh = nn.Linear(HIDDEN, EXPERTS, bias=False), router
        nn.init.normal_(self.router.weight)
        self.gate_up = nn.Parameter(0.1 * torch.randn(EXPERTS, 2 * FFN, HIDDEN))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, HIDDEN, FFN))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.weigh(self.router(x), 2)
        result = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            result = result.index_add(0, token, y * weights[token, place, None])
        return result


class GroupedMixture(nn.Module):
    """TE's grouped layers behind a router.

    ``split`` makes the port's splits from the right ones; ``at_the_gate`` multiplies by the weights before the
    activation, too.
    """

    def __init__(self, te: Any, router: Router, k: int = 2, split: Any = list, at_the_gate: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.fc1 = te.GroupedLinear(EXPERTS, HIDDEN, 2 * FFN, bias=False)
        self.fc2 = te.GroupedLinear(EXPERTS, FFN, HIDDEN, bias=False)
        self.te, self.weigh, self.k, self.split, self.at_the_gate = te, router, k, split, at_the_gate

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.weigh(self.router(x), self.k)
        rows, places = self.te.moe_permute(x, chosen.int(), num_out_tokens=chosen.numel(), map_type="index")
        splits = self.split(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist())
        gate, up = self.fc1(rows, splits).chunk(2, -1)
        if self.at_the_gate:
            gate = weights.flatten()[chosen.flatten().argsort(stable=True), None] * gate
        y = self.fc2(F.silu(gate) * up, splits)
        return self.te.moe_unpermute(y, places, weights.float(), map_type="index")


def stacked(gate_ups: Iterable[int] = range(EXPERTS), downs: Iterable[int] = range(EXPERTS)) -> dict[Any, Any]:
    """Return the weight map with the experts of each layer in this order."""
    return {
        "router.weight": "router.weight",
        "gate_up": experts(*(f"fc1.weight{i}" for i in gate_ups)),
        "down": experts(*(f"fc2.weight{i}" for i in downs)),
    }


def mixture(name: str, router: Router, tokens: int = TOKENS) -> Host:
    return Host(
        name,
        Mixture,
        GroupedMixture,
        normal((tokens, HIDDEN)),
        dict(router=router),
        stacked(),
    )


MIXTURE = mixture("mixture", normalised)
OF_MANY_TOKENS = mixture("mixture_of_many_tokens", normalised, 512)
NOT_NORMALISED = mixture("mixture_not_normalised", not_normalised)
OF_CHOSEN = mixture("mixture_with_a_softmax_of_the_chosen", of_chosen)
SCALED = mixture("mixture_with_scaled_weights", scaled)
BIASED = mixture("mixture_with_biased_choice", biased())
TURNED = (1, 2, 3, 0)


class Dense(nn.Module):
    """Experts that compute all tokens, behind a router that stays in PyTorch."""

    def __init__(self, linear: Any, k: int = 2) -> None:
        super().__init__()
        self.router, self.k = nn.Linear(HIDDEN, EXPERTS, bias=False), k
        self.up = nn.ModuleList(linear(HIDDEN, HIDDEN, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(linear(HIDDEN, HIDDEN, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Any:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        made = (down(F.silu(up(x))) for up, down in zip(self.up, self.down, strict=True))
        return sum(y * (weights * (chosen == expert)).sum(-1, keepdim=True) for expert, y in enumerate(made))


DENSE = twins(Dense, normal((64, HIDDEN)), "dense_mixture")


# Experts in a list of modules, where the map fills one of two layers in another order.

WIDTH, INNER = 32, 48


class ListOfExperts(nn.Module):
    """Experts in a list of modules, each with two layers of its own for its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        each = zip(x.chunk(EXPERTS), self.up, self.down, strict=True)
        return torch.cat([down(F.relu(up(rows))) for rows, up, down in each])


class GroupedExperts(nn.Module):
    def __init__(self, te: Any) -> None:
        super().__init__()
        self.fc1 = te.GroupedLinear(EXPERTS, WIDTH, INNER, bias=False)
        self.fc2 = te.GroupedLinear(EXPERTS, INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        splits = [len(x) // EXPERTS] * EXPERTS
        return self.fc2(F.relu(self.fc1(x, splits)), splits)


def listed(ups: Iterable[int] = range(EXPERTS), downs: Iterable[int] = range(EXPERTS)) -> dict[Any, Any]:
    """Return the weight map with the experts of each layer in this order."""
    return {f"up.{i}.weight": f"fc1.weight{place}" for i, place in enumerate(ups)} | {
        f"down.{i}.weight": f"fc2.weight{place}" for i, place in enumerate(downs)
    }


LIST = Host("list_of_experts", ListOfExperts, GroupedExperts, normal((EXPERTS * 16, WIDTH)), weights=listed())


# Mixtral's experts and its auxiliary loss, against TE's fused router and loss.

OF_SIX, INNER_OF_SIX, ROWS = 80, 112, 96


class GatedExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(OF_SIX, INNER_OF_SIX, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER_OF_SIX, OF_SIX, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class WithLoss(nn.Module):
    """Mixtral's experts with its auxiliary loss, which reads the probabilities of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(OF_SIX, 6, bias=False)
        nn.init.normal_(self.router.weight, std=0.5)
        self.experts = nn.ModuleList(GatedExpert() for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            result = result.index_add(0, token, expert(x[token]) * weights[token, place, None])
        share = F.one_hot(chosen, 6).sum(1).to(x.dtype).mean(0) / 2
        return result, 0.02 * 6 * (share * probabilities.mean(0)).sum()


class FusedRouter(nn.Module):
    """TE's fused router; ``score`` makes the scores of its choice, and ``detach`` keeps the loss from the router."""

    def __init__(self, te: Any, score: str = "softmax", detach: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(OF_SIX, 6, bias=False)
        self.fc1 = te.GroupedLinear(6, OF_SIX, 2 * INNER_OF_SIX, bias=False)
        self.fc2 = te.GroupedLinear(6, INNER_OF_SIX, OF_SIX, bias=False)
        self.te, self.score, self.detach = te, score, detach

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from transformer_engine.pytorch import router

        logits = self.router(x)
        weights, routing = router.fused_topk_with_score_function(logits, 2, False, None, None, None, self.score, None)
        rows, places = self.te.moe_permute(x, routing, num_out_tokens=2 * len(x), map_type="mask")
        splits = routing.sum(0)
        gate, up = self.fc1(rows, splits.tolist()).chunk(2, -1)
        rows = self.fc2(F.silu(gate) * up, splits.tolist())
        result = self.te.moe_unpermute(rows, places, weights, restore_shape=x.shape, map_type="mask")
        _, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
        scores = scores.detach() if self.detach else scores
        loss = router.fused_moe_aux_loss(scores, splits.int(), len(x), 6, 2, 0.02)
        return result.to(x.dtype), loss


FUSED = Host(
    "fused_router",
    WithLoss,
    FusedRouter,
    normal((ROWS, OF_SIX)),
    weights={"router.weight": "router.weight"}
    | {stack(f"experts.{i}.gate.weight", f"experts.{i}.up.weight"): f"fc1.weight{i}" for i in range(6)}
    | {f"experts.{i}.down.weight": f"fc2.weight{i}" for i in range(6)},
)


# DeepSeek-V3's router, which first chooses groups of experts and masks the scores of the others.

OF_EIGHT, GROUPS, CHOSEN_GROUPS, CHOSEN = 32, 4, 2, 3


class InGroups(nn.Module):
    """A mixture that chooses by sigmoids with a bias, and weights by sigmoids without it."""

    bias: Tensor

    def __init__(
        self,
        linear: Any,
        score: str = "sigmoid",
        of_choice: float = 1.0,
        weighs_biased: bool = False,
        logit: bool = False,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(OF_EIGHT, 8, bias=False)
        self.experts = nn.ModuleList(linear(OF_EIGHT, OF_EIGHT) for _ in range(8))
        self.register_buffer("bias", torch.linspace(-0.3, 0.3, 8))
        self.score, self.of_choice, self.weighs_biased, self.logit = score, of_choice, weighs_biased, logit

    def forward(self, x: Tensor) -> Any:
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


IN_GROUPS = twins(InGroups, normal((2, 24, OF_EIGHT)))


# Gates and ups that alternate within each expert, as in GPT-OSS.


class InTurns(nn.Module):
    """Experts in a loop, each with its own tokens; gates and ups alternate, or are halves."""

    def __init__(self, linear: Any, halves: bool = False) -> None:
        super().__init__()
        self.first = linear(HIDDEN, HIDDEN)
        self.experts = nn.Parameter(0.1 * torch.randn(3, HIDDEN, 2 * FFN))
        self.halves = halves

    def forward(self, x: Tensor) -> Tensor:
        of_experts = self.first(x).split([24, 0, 40])
        return torch.cat([self.gated(some @ one) for some, one in zip(of_experts, self.experts, strict=True)])

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1) if self.halves else (both[..., ::2], both[..., 1::2])
        return gate.sigmoid() * up


IN_TURNS = twins(InTurns, normal((TOKENS, HIDDEN)))

PORTS: tuple[Port, ...] = (
    *(host.right() for host in (MIXTURE, NOT_NORMALISED, OF_CHOSEN, SCALED, BIASED, LIST, IN_GROUPS, IN_TURNS)),
    OF_CHOSEN.right(router=normalised, precisions=("fp32",)),
    # In FP32 the gradient that one token gets from the loss is what is left of terms that cancel: a false alarm.
    FUSED.right(precisions=("bf16", "fp16")),
    MIXTURE.wrong("routing-weights", "divide the chosen experts' weights by their sum", router=not_normalised),
    MIXTURE.wrong("routing-weights", "the port scores them by a sigmoid", router=sigmoids),
    MIXTURE.wrong("routing-weights", "the port sorts the experts by number", router=choice_sorted),
    MIXTURE.wrong("routing-weights", "the port sums it unweighted", router=without_weights, others=True),
    NOT_NORMALISED.wrong("routing-weights", "the port divides them by their sum", router=normalised),
    NOT_NORMALISED.wrong("routing-weights", "and the chosen experts' weights are normalised", router=sigmoids),
    NOT_NORMALISED.wrong("routing-weights", router=squared),
    OF_CHOSEN.wrong("routing-weights", router=not_normalised),
    OF_CHOSEN.wrong("routing-weights", router=sigmoids_alone, precisions=("fp32",)),
    SCALED.wrong("routing-weights", router=twice_scaled),
    BIASED.wrong("routing-weights", router=biased(score=lambda logits: logits.softmax(-1)), name="chosen by softmax"),
    BIASED.wrong("routing-bias", router=biased(choice=0.0), name="no bias"),
    BIASED.wrong("routing-bias", router=biased(choice=-1.0), name="bias subtracted"),
    BIASED.wrong("routing-bias", router=biased(weight=1.0), name="biased weights", precisions=("fp32",)),
    BIASED.wrong("routing-bias", router=biased(logit=1.0), name="biased logits"),
    MIXTURE.wrong("expert-splits", split=sorted),
    MIXTURE.wrong("expert-splits", split=lambda splits: [2 * TOKENS // EXPERTS] * EXPERTS, name="equal splits"),
    MIXTURE.wrong("top-k", k=1),
    MIXTURE.wrong("top-k", k=3),
    OF_MANY_TOKENS.wrong("top-k", "the port sends it to one fewer.", k=1, precisions=("bf16",)),
    # The router's weight is not quantized, and no scale of it is blamed.
    DENSE.wrong("top-k", "one fewer", k=1, precisions=("fp8_current",)),
    MIXTURE.wrong("experts-permuted", weights=stacked(TURNED, TURNED), name="experts turned"),
    MIXTURE.wrong("experts-permuted", weights=stacked(TURNED), name="gates and ups turned"),
    LIST.wrong("experts-permuted", "experts of fc1 in the reference's", weights=listed(TURNED), name="ups turned"),
    LIST.wrong("experts-permuted", "experts of fc2 in the reference's", weights=listed(downs=TURNED), name="downs"),
    FUSED.wrong("routing-weights", "for the choice alone, the port scores them by a sigmoid", score="sigmoid"),
    IN_GROUPS.wrong("routing-weights", "the port scores them by a softmax", score="softmax"),
    IN_GROUPS.wrong("routing-bias", "chooses experts without it", of_choice=0.0),
    IN_GROUPS.wrong("routing-bias", "the port subtracts it", of_choice=-1.0),
    IN_GROUPS.wrong("routing-bias", "the weights come from scores with the bias", weighs_biased=True),
    IN_GROUPS.wrong("routing-bias", "adds it to the logits", logit=True),
    IN_TURNS.wrong("operation", f"it takes {FFN} consecutive elements of dimension 1", halves=True),
)
