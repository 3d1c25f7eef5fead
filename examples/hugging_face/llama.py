"""A decoder layer of Llama, as transformers has it, against TE's TransformerLayer.

Mistral, Qwen 2 and Phi-3 are alike. Qwen 3 normalises queries and keys: qk_norm_type="RMSNorm" with
qk_norm_before_rope=True.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import parity


class Reference(nn.Module):
    """The layer with its rotary embedding, which the model around it computes once for all layers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layer = LlamaDecoderLayer(config, 0)
        self.rope = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        output: Tensor = self.layer(x, position_embeddings=self.rope(x, positions), attention_mask=None)
        return output


WEIGHTS = {
    "layer.input_layernorm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "layer.self_attn.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "layer.self_attn.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "layer.self_attn.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "layer.self_attn.o_proj.weight": "self_attention.proj.weight",
    "layer.post_attention_layernorm.weight": "layernorm_mlp.layer_norm_weight",
    parity.stack("layer.mlp.gate_proj.weight", "layer.mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
    "layer.mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}


@parity.pair("hugging_face_llama", sizes=[dict(batch=2, seq=128, hidden=256, ffn=768, heads=8, groups=2)])
def llama(te: ModuleType, hidden: int, ffn: int, heads: int, groups: int, **_: Any) -> parity.Pair:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        attn_implementation="sdpa",
    )
    rope = te.RotaryPositionEmbedding(hidden // heads)  # no submodule: .to(bfloat16) would round its frequencies
    layer = te.TransformerLayer(
        hidden,
        ffn,
        heads,
        num_gqa_groups=groups,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
    )
    return parity.Pair(
        reference=Reference(config),
        candidate=layer,
        weights=WEIGHTS,
        call_candidate=lambda layer, x: layer(x, rotary_pos_emb=rope(x.shape[1]), self_attn_mask_type="causal"),
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )
