"""A mixture of SwiGLU experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.case import weight_map
from parity.case.case import Pair
from parity.lab.zoo.hosts.case import UNQUANTIZED, host
from parity.lab.zoo.planting import construct

SMALL = dict(tokens=64, hidden=64, ffn=96, experts=4)
LARGE = dict(tokens=256, hidden=256, ffn=384, experts=8)
CHOSEN = 2
Route = Callable[[Tensor, int], tuple[Tensor, Tensor]]
# Of the router's weights: at their initial ones all experts weigh about the same.
ROUTER_STD = 1.0


class Mixture(nn.Module):
    """Experts whose weights are stacked; the weights of the two that a token is sent to sum up to 1, as in Mixtral."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        nn.init.normal_(self.router.weight, std=ROUTER_STD)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, hidden).normal_(std=hidden**-0.5))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn).normal_(std=ffn**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        shares, chosen = route(self.router(x), CHOSEN)
        result = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(x[token], gate_up).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, down)
            result = result.index_add(0, token, y * shares[token, place, None])
        return result


class TEMixture(nn.Module):
    """The same with TE's grouped layers and permutation.

    Attributes:
        weights_of: from the router's logits ``[tokens, experts]`` to weights and experts ``[tokens, chosen]``.
    """

    def __init__(self, te: ModuleType, hidden: int, ffn: int, experts: int, chosen: int = CHOSEN) -> None:
        super().__init__()
        self.te, self.experts, self.chosen = te, experts, chosen
        self.router = nn.Linear(hidden, experts, bias=False)
        self.fc1 = te.GroupedLinear(experts, hidden, 2 * ffn, bias=False)
        self.fc2 = te.GroupedLinear(experts, ffn, hidden, bias=False)
        self.weights_of: Route = route

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same."""
        shares, chosen = self.weights_of(self.router(x), self.chosen)
        rows, places = self.te.moe_permute(x, chosen.int(), num_out_tokens=chosen.numel(), map_type="index")
        splits = torch.bincount(chosen.flatten(), minlength=self.experts).tolist()
        gate, up = self.fc1(rows, splits).chunk(2, dim=-1)
        y = self.fc2(F.silu(gate) * up, splits)
        return self.te.moe_unpermute(y, places, shares.float(), map_type="index")


def route(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Of the softmax of ``[tokens, experts]`` the largest, divided by their sum: weights and experts."""
    shares, experts = logits.softmax(dim=-1).topk(chosen, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True), experts


@host("mixture", SMALL, LARGE, precisions=UNQUANTIZED)
def mixture(te: ModuleType, hidden: int, ffn: int, experts: int, **_: Any) -> Pair:
    """FP8 would need as many tokens of each expert as its kernels' tiles hold."""
    return Pair(
        reference=Mixture(hidden, ffn, experts),
        candidate=construct(TEMixture, te, hidden, ffn, experts),
        weights=weights_in(range(experts)),
        inputs=lambda rng, tokens: rng.normal(tokens, hidden),
    )


def weights_in(order: Iterable[int]) -> weight_map.WeightMap:
    """Return the map that fills TE's experts in this order."""
    order = list(order)
    return {
        "router.weight": "router.weight",
        "gate_up": weight_map.experts(*(f"fc1.weight{expert}" for expert in order)),
        "down": weight_map.experts(*(f"fc2.weight{expert}" for expert in order)),
    }


HOSTS = (mixture,)
