"""A small Llama: log-probabilities of tokens in one pass of plain PyTorch, and decoded with TE's cache.

A trainer computes the first, the engine that samples the second. ``parity run examples/decoding`` says how far the two
may be apart, in the notes of its report.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

import parity
from parity.reference import LlamaLayer

LAYER = {
    "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "attention.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "attention.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "attention.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "attention.o_proj.weight": "self_attention.proj.weight",
    "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
    parity.stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
    "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}


class Llama(nn.Module):
    """Embeddings, layers, a norm and a head; what a layer is given besides is passed on."""

    def __init__(self, vocabulary: int, hidden: int, layers: list[nn.Module], norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(vocabulary, hidden), nn.ModuleList(layers)
        self.norm, self.head = norm, head

    def forward(self, ids: Tensor, **given: Any) -> Tensor:
        """Return the logits of each position."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, **given)
        return self.head(self.norm(x))


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each token but the first, given those before it."""
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@parity.pair(
    "decoded_llama",
    sizes=[dict(batch=8, seq=24, prompt=8, hidden=64, ffn=192, heads=4, groups=2, count=2, vocabulary=128)],
)
def decoded_llama(
    te: ModuleType, prompt: int, hidden: int, ffn: int, heads: int, groups: int, count: int, vocabulary: int, **_: Any
) -> parity.Pair:
    def layer(number: int) -> nn.Module:
        return te.TransformerLayer(
            *(hidden, ffn, heads),
            num_gqa_groups=groups,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="bshd",
            self_attn_mask_type="padding_causal",
            layer_number=number,  # each layer has its own keys and values in the cache
        )

    head_dim = hidden // heads
    rope = te.RotaryPositionEmbedding(head_dim)
    decode = parity.Decoding(kv_heads=groups, head_dim=head_dim, prompt=prompt)
    return parity.Pair(
        reference=Llama(
            *(vocabulary, hidden, [LlamaLayer(hidden, ffn, heads, groups) for _ in range(count)]),
            nn.RMSNorm(hidden, eps=1e-5),
            nn.Linear(hidden, vocabulary, bias=False),
        ),
        candidate=Llama(
            *(vocabulary, hidden, [layer(number) for number in range(1, count + 1)]),
            te.RMSNorm(hidden),
            te.Linear(hidden, vocabulary, bias=False),
        ),
        weights={
            **parity.under(LAYER, "layers.{i}."),
            **{name: name for name in ("tokens.weight", "norm.weight", "head.weight")},
        },
        inputs=lambda rng, batch, seq: rng.integers(batch, seq, high=vocabulary),
        call_reference=lambda model, ids: log_probs(model(ids), ids),
        call_candidate=lambda model, ids: log_probs(decode(model, ids, rotary_pos_emb=rope(ids.shape[1])), ids),
        evaluation=True,
    )
