"""A small Llama, trained on next tokens: plain PyTorch with AdamW against TE's layers with FusedAdam.

``parity train examples/training/llama.py --steps 20`` draws its losses, which reports/training.md shows.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import parity
from parity.case.weight_map import WeightMap
from parity.reference import LlamaLayer

SETTINGS: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class Llama(nn.Module):
    """Embeddings, layers, a norm and a head; returns the mean cross entropy of the next tokens."""

    def __init__(self, vocabulary: int, hidden: int, layers: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.tokens, self.layers, self.head = nn.Embedding(vocabulary, hidden), nn.ModuleList(layers), head
        self.extra: dict[str, Any] = {}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids[:, :-1])
        for layer in self.layers:
            x = layer(x, **self.extra)
        logits = self.head(x)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return cross_entropy(wide.flatten(0, 1), ids[:, 1:].flatten())


def te_layer(te: ModuleType, hidden: int, ffn: int, heads: int, groups: int) -> nn.Module:
    layer: nn.Module = te.TransformerLayer(
        hidden,
        ffn,
        heads,
        num_gqa_groups=groups,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        self_attn_mask_type="causal",
    )
    return layer


def weights_of(layer: int) -> WeightMap:
    ours, tes = f"layers.{layer}", f"layers.{layer}"
    return {
        f"{ours}.attention_norm.weight": f"{tes}.self_attention.layernorm_qkv.layer_norm_weight",
        f"{ours}.attention.q_proj.weight": f"{tes}.self_attention.layernorm_qkv.query_weight",
        f"{ours}.attention.k_proj.weight": f"{tes}.self_attention.layernorm_qkv.key_weight",
        f"{ours}.attention.v_proj.weight": f"{tes}.self_attention.layernorm_qkv.value_weight",
        f"{ours}.attention.o_proj.weight": f"{tes}.self_attention.proj.weight",
        f"{ours}.mlp.norm.weight": f"{tes}.layernorm_mlp.layer_norm_weight",
        parity.stack(f"{ours}.mlp.gate_proj.weight", f"{ours}.mlp.up_proj.weight"): f"{tes}.layernorm_mlp.fc1_weight",
        f"{ours}.mlp.down_proj.weight": f"{tes}.layernorm_mlp.fc2_weight",
    }


@parity.pair(
    "trained_llama",
    sizes=[dict(layers=4, batch=4, seq=32, hidden=128, ffn=256, heads=4, groups=2, vocabulary=128)],
    steps=3,
    switches=["resume"],
)
def trained_llama(
    te: ModuleType, layers: int, hidden: int, ffn: int, heads: int, groups: int, vocabulary: int, **_: Any
) -> parity.Pair:
    def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
        narrow = next(model.parameters()).dtype is not torch.float32
        made: torch.optim.Optimizer = te.optimizers.FusedAdam(model.parameters(), **SETTINGS, master_weights=narrow)
        return made

    head = nn.Sequential(nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, vocabulary, bias=False))
    reference = Llama(vocabulary, hidden, [LlamaLayer(hidden, ffn, heads, groups) for _ in range(layers)], head)
    te_head = te.LayerNormLinear(hidden, vocabulary, eps=1e-5, normalization="RMSNorm", bias=False)
    candidate = Llama(vocabulary, hidden, [te_layer(te, hidden, ffn, heads, groups) for _ in range(layers)], te_head)
    rope = te.RotaryPositionEmbedding(hidden // heads)

    def call_candidate(module: nn.Module, ids: Tensor) -> Tensor:
        module.extra = dict(rotary_pos_emb=rope(ids.shape[1] - 1))
        loss: Tensor = module(ids)
        return loss

    return parity.Pair(
        reference=reference,
        candidate=candidate,
        weights={
            "tokens.weight": "tokens.weight",
            **{left: right for i in range(layers) for left, right in weights_of(i).items()},
            "head.0.weight": "head.layer_norm_weight",
            "head.1.weight": "head.weight",
        },
        inputs=lambda rng, batch, seq: rng.integers(batch, seq + 1, high=vocabulary),
        call_candidate=call_candidate,
        training=parity.Training(
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), **SETTINGS),
            candidate_optimizer=fused_adam,
            clip=1.0,
        ),
    )
