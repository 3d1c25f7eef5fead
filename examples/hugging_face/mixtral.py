"""The mixture of experts of Mixtral against TE's grouped layers, with a router that stays a plain layer.

transformers keeps the experts' weights stacked, ``[experts, out, in]``; TE's GroupedLinear has a weight for each.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import parity


class Mixture(nn.Module):
    """Tokens sorted by expert, two grouped products, and back; FP8 wants each expert's tokens padded."""

    def __init__(self, te: ModuleType, hidden: int, ffn: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.te, self.experts, self.chosen = te, experts, chosen
        self.router = nn.Linear(hidden, experts, bias=False)
        self.fc1 = te.GroupedLinear(experts, hidden, 2 * ffn, bias=False)
        self.fc2 = te.GroupedLinear(experts, ffn, hidden, bias=False)
        self.pad, self.unpad = te.Fp8Padding(experts, align_size=32), te.Fp8Unpadding(experts, align_size=32)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = torch.topk(self.router(tokens).float().softmax(-1), self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        rows, places = self.te.moe_permute(tokens, chosen.int(), num_out_tokens=chosen.numel(), map_type="index")
        counts = torch.bincount(chosen.flatten(), minlength=self.experts).tolist()
        padded, padded_counts = self.pad(rows, counts)
        gate, up = self.fc1(padded, padded_counts).chunk(2, -1)
        rows = self.unpad(self.fc2(F.silu(gate) * up, padded_counts), counts)
        merged: Tensor = self.te.moe_unpermute(rows, places, weights, map_type="index")
        return merged.view_as(x)


def reference(config: MixtralConfig) -> nn.Module:
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():  # which transformers leaves to the model around it
        nn.init.normal_(parameter, std=0.05)
    nn.init.normal_(block.gate.weight, std=0.5)
    return block


@parity.pair("hugging_face_mixtral", sizes=[dict(batch=2, seq=64, hidden=128, ffn=256, experts=4, chosen=2)])
def mixtral(te: ModuleType, hidden: int, ffn: int, experts: int, chosen: int, **_: Any) -> parity.Pair:
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=ffn, num_local_experts=experts, num_experts_per_tok=chosen
    )
    return parity.Pair(
        reference=reference(config),
        candidate=Mixture(te, hidden, ffn, experts, chosen),
        weights={
            "gate.weight": "router.weight",
            "experts.gate_up_proj": parity.experts(*(f"fc1.weight{i}" for i in range(experts))),
            "experts.down_proj": parity.experts(*(f"fc2.weight{i}" for i in range(experts))),
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )
