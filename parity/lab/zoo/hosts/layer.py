"""Whole transformer layers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from parity import reference
from parity.case.case import Pair
from parity.case.weight_map import WeightMap, copies, stack
from parity.lab.zoo.hosts.case import host
from parity.lab.zoo.planting import construct

SMALL = dict(batch=2, seq=32, hidden=64, ffn=128, heads=4)
LARGE = dict(batch=2, seq=128, hidden=256, ffn=512, heads=8)

GPT_WEIGHTS: WeightMap = {
    f"{left}.{kind}": f"{right}_{kind}" if separator else f"{right}.{kind}"
    for kind in ("weight", "bias")
    for left, right, separator in (
        ("attention_norm", "self_attention.layernorm_qkv.layer_norm", True),
        ("attention.q_proj", "self_attention.layernorm_qkv.query", True),
        ("attention.k_proj", "self_attention.layernorm_qkv.key", True),
        ("attention.v_proj", "self_attention.layernorm_qkv.value", True),
        ("attention.o_proj", "self_attention.proj", False),
        ("mlp.norm", "layernorm_mlp.layer_norm", True),
        ("mlp.up_proj", "layernorm_mlp.fc1", True),
        ("mlp.down_proj", "layernorm_mlp.fc2", True),
    )
}
LLAMA_WEIGHTS: WeightMap = {
    "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "attention.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "attention.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "attention.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "attention.o_proj.weight": "self_attention.proj.weight",
    "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
    stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
    "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}
PARALLEL_WEIGHTS: WeightMap = {
    **{left: right for left, right in GPT_WEIGHTS.items() if str(left).startswith("attention.")},
    **{
        f"norm.{kind}": copies(f"self_attention.layernorm_qkv.layer_norm_{kind}", f"layernorm_mlp.layer_norm_{kind}")
        for kind in ("weight", "bias")
    },
    **{f"up_proj.{kind}": f"layernorm_mlp.fc1_{kind}" for kind in ("weight", "bias")},
    **{f"down_proj.{kind}": f"layernorm_mlp.fc2_{kind}" for kind in ("weight", "bias")},
}


class ParallelLayer(nn.Module):
    """Attention and MLP side by side, which read one norm, as in GPT-J."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = reference.Attention(hidden, heads, heads, bias=True, rope=False)
        self.up_proj, self.down_proj = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        normed = self.norm(x)
        return x + self.attention(normed) + self.down_proj(F.gelu(self.up_proj(normed), approximate="tanh"))


@host("gpt_layer", SMALL, LARGE)
def gpt_layer(te: ModuleType, hidden: int, ffn: int, heads: int, **_: Any) -> Pair:
    return Pair(
        reference=reference.GPTLayer(hidden, ffn, heads),
        candidate=_te_layer(te, hidden, ffn, heads),
        weights=GPT_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("parallel_layer", SMALL, LARGE)
def parallel_layer(te: ModuleType, hidden: int, ffn: int, heads: int, **_: Any) -> Pair:
    return Pair(
        reference=ParallelLayer(hidden, ffn, heads),
        candidate=_te_layer(te, hidden, ffn, heads, parallel_attention_mlp=True),
        weights=PARALLEL_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("llama_layer", SMALL | dict(groups=2), LARGE | dict(groups=2))
def llama_layer(te: ModuleType, hidden: int, ffn: int, heads: int, groups: int, **_: Any) -> Pair:
    rope = te.RotaryPositionEmbedding(hidden // heads)

    def call_candidate(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, rotary_pos_emb=rope(x.shape[1]))

    return Pair(
        reference=reference.LlamaLayer(hidden, ffn, heads, groups),
        candidate=te_llama_layer(te, hidden, ffn, heads, groups),
        weights=LLAMA_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
        call_candidate=call_candidate,
    )


def te_llama_layer(te: ModuleType, hidden: int, ffn: int, heads: int, groups: int) -> nn.Module:
    """TE's layer as a Llama has it, batch first, without dropout; its call takes the RoPE."""
    return _te_layer(
        te, hidden, ffn, heads, num_gqa_groups=groups, normalization="RMSNorm", activation="swiglu", bias=False
    )


def _te_layer(te: ModuleType, hidden: int, ffn: int, heads: int, **others: Any) -> nn.Module:
    no_dropout = dict(hidden_dropout=0.0, attention_dropout=0.0)
    return construct(te.TransformerLayer, hidden, ffn, heads, attn_input_format="bshd", **no_dropout, **others)


HOSTS = (gpt_layer, parallel_layer, llama_layer)
