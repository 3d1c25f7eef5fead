"""A decoder layer of Phi, whose attention and MLP read one norm side by side, against TE's, which has two.

GPT-J, Falcon and Cohere are alike; GPT-NeoX has two norms itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.phi.configuration_phi import PhiConfig
from transformers.models.phi.modeling_phi import PhiDecoderLayer, PhiRotaryEmbedding

import parity

ATTENTION, MLP = "self_attention.layernorm_qkv", "layernorm_mlp"


class Reference(nn.Module):
    """The layer with its rotary embedding."""

    def __init__(self, config: PhiConfig) -> None:
        super().__init__()
        self.layer = PhiDecoderLayer(config, 0)
        self.rope = PhiRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        output: Tensor = self.layer(x, position_embeddings=self.rope(x, positions), attention_mask=None)
        return output


def weights() -> dict[Any, Any]:
    entries: dict[Any, Any] = {}
    for kind in ("weight", "bias"):
        entries[f"layer.input_layernorm.{kind}"] = parity.copies(
            f"{ATTENTION}.layer_norm_{kind}", f"{MLP}.layer_norm_{kind}"
        )
        for name in ("query", "key", "value"):
            entries[f"layer.self_attn.{name[0]}_proj.{kind}"] = f"{ATTENTION}.{name}_{kind}"
        entries[f"layer.self_attn.dense.{kind}"] = f"self_attention.proj.{kind}"
        entries[f"layer.mlp.fc1.{kind}"] = f"{MLP}.fc1_{kind}"
        entries[f"layer.mlp.fc2.{kind}"] = f"{MLP}.fc2_{kind}"
    return entries


@parity.pair("hugging_face_phi", sizes=[dict(batch=2, seq=128, hidden=256, ffn=1024, heads=8)])
def phi(te: ModuleType, hidden: int, ffn: int, heads: int, **_: Any) -> parity.Pair:
    config = PhiConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        partial_rotary_factor=0.5,
        hidden_act="gelu_new",  # TE's "gelu" is the one by tanh
        resid_pdrop=0.0,
        attn_implementation="sdpa",
    )
    rope = te.RotaryPositionEmbedding(hidden // heads, rotary_percent=0.5)
    layer = te.TransformerLayer(
        hidden,
        ffn,
        heads,
        layernorm_epsilon=config.layer_norm_eps,
        parallel_attention_mlp=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
    )
    return parity.Pair(
        reference=Reference(config),
        candidate=layer,
        weights=weights(),
        call_candidate=lambda layer, x: layer(x, rotary_pos_emb=rope(x.shape[1]), self_attn_mask_type="causal"),
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )
