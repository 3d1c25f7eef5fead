"""The multi-head latent attention of DeepSeek-V3 against TE's linear layers and DotProductAttention.

Keys are wider than values, and only their last channels are rotated, by a key that all heads share.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import parity

QUERY_RANK, RANK, ROTATED, PLAIN, VALUE = 96, 64, 32, 64, 64


class Reference(nn.Module):
    """The attention, causal, with its rotary embedding."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.attention = DeepseekV3Attention(config, 0)
        self.rope = DeepseekV3RotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[1]
        later = torch.full((seq, seq), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        angles = self.rope(x, torch.arange(seq, device=x.device)[None])
        output: Tensor = self.attention(x, angles, later[None, None])[0]
        return output


class LatentAttention(nn.Module):
    """The same of TE's modules."""

    def __init__(self, te: ModuleType, hidden: int, heads: int, eps: float) -> None:
        super().__init__()
        normed = dict(bias=False, normalization="RMSNorm", eps=eps)
        self.heads = heads
        self.query_down = te.Linear(hidden, QUERY_RANK, bias=False)
        self.query_up = te.LayerNormLinear(QUERY_RANK, heads * (PLAIN + ROTATED), **normed)
        self.down = te.Linear(hidden, RANK + ROTATED, bias=False)
        self.up = te.LayerNormLinear(RANK, heads * (PLAIN + VALUE), **normed)
        self.core = te.DotProductAttention(heads, (PLAIN + ROTATED, VALUE), qkv_format="bshd", attention_dropout=0.0)
        self.out = te.Linear(heads * VALUE, hidden, bias=False)
        self.embedding = [te.RotaryPositionEmbedding(ROTATED, interleaved=True)]  # no submodule: it stays in FP32

    def forward(self, x: Tensor) -> Tensor:
        query = self.query_up(self.query_down(x)).unflatten(-1, (self.heads, -1))
        latent, shared_key = self.down(x).split([RANK, ROTATED], -1)
        key, value = self.up(latent.contiguous()).unflatten(-1, (self.heads, -1)).split([PLAIN, VALUE], -1)
        query, rotated_query = query.split([PLAIN, ROTATED], -1)
        query = torch.cat((query, self._rotated(rotated_query)), -1)
        rotated_key = self._rotated(shared_key.unsqueeze(2)).expand(-1, -1, self.heads, -1)
        context = self.core(query, torch.cat((key, rotated_key), -1), value.contiguous(), attn_mask_type="causal")
        output: Tensor = self.out(context)
        return output

    def _rotated(self, x: Tensor) -> Tensor:
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        angles = self.embedding[0](x.shape[1])
        rotated: Tensor = apply_rotary_pos_emb(x.contiguous(), angles, tensor_format="bshd", interleaved=True)
        return rotated


@parity.pair("hugging_face_deepseek", sizes=[dict(batch=2, seq=64, hidden=256, heads=4)])
def deepseek(te: ModuleType, hidden: int, heads: int, **_: Any) -> parity.Pair:
    config = DeepseekV3Config(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=QUERY_RANK,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=PLAIN,
        v_head_dim=VALUE,
        attn_implementation="eager",
    )
    return parity.Pair(
        reference=Reference(config),
        candidate=LatentAttention(te, hidden, heads, eps=1e-6),
        weights={
            "attention.q_a_proj.weight": "query_down.weight",
            "attention.q_a_layernorm.weight": "query_up.layer_norm_weight",
            "attention.q_b_proj.weight": "query_up.weight",
            "attention.kv_a_proj_with_mqa.weight": "down.weight",
            "attention.kv_a_layernorm.weight": "up.layer_norm_weight",
            "attention.kv_b_proj.weight": "up.weight",
            "attention.o_proj.weight": "out.weight",
        },
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )
