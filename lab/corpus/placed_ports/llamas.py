"""Decoders like Llama, with grouped keys and values, and like Granite, with one key head and four multipliers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.placed import (
    NOWHERE,
    OWN,
    At,
    GatedMLP,
    LanguageModel,
    RMSNorm,
    Rotary,
    ScaleGradient,
    apply_rope,
    build_layers,
    causal_mask,
    exchange,
    map_layers,
    merge_heads,
    place,
    rope_angles,
    rotate_heads,
    scale_weights,
    split_heads,
)
from lab.corpus.small import Host
from parity.case.weight_map import reorder, stack

VOCABULARY, LAYERS = 80, 3

# Llama, whose port has TE's TransformerLayer.

WIDTH, HEADS, GROUPS, HEAD_DIM, FFN = 96, 6, 2, 16, 192


class LlamaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, GROUPS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, GROUPS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), HEAD_DIM) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        return self.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(WIDTH, 1e-6), RMSNorm(WIDTH, 1e-6)
        self.attn, self.mlp = LlamaAttention(), GatedMLP(WIDTH, FFN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.input_norm(x), cos, sin)
        return x + self.mlp(self.post_norm(x))


class TELlama(nn.Module):
    def __init__(self, te: Any, at: At = NOWHERE, doubled: int | None = None, **options: Any) -> None:
        super().__init__()
        usual = dict(
            num_gqa_groups=GROUPS,
            layernorm_epsilon=1e-6,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            attn_input_format="bshd",
        )
        self.tokens, self.doubled = nn.Embedding(VOCABULARY, WIDTH), doubled
        self.layers = build_layers(LAYERS, partial(te.TransformerLayer, WIDTH, FFN, HEADS), at, usual | options)
        self.norm, self.head = te.RMSNorm(WIDTH, eps=1e-6), te.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        angles = rope_angles(x, HEAD_DIM)
        for number, layer in enumerate(self.layers):
            x = layer(x, rotary_pos_emb=angles)
            x = ScaleGradient.apply(x, 2.0) if number == self.doubled else x
        return self.head(self.norm(x))


GATE_UP = stack("mlp.gate_proj.weight", "mlp.up_proj.weight")
LLAMA_LAYER: dict[Any, Any] = {
    "input_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "attn.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "attn.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "attn.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "attn.o_proj.weight": "self_attention.proj.weight",
    "post_norm.weight": "layernorm_mlp.layer_norm_weight",
    GATE_UP: "layernorm_mlp.fc1_weight",
    "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}


def map_llama(layer: dict[Any, Any] = LLAMA_LAYER, at: Any = NOWHERE) -> dict[Any, Any]:
    return OWN | map_layers(layer, LAYERS, at)


def rename_keys(layer: dict[Any, Any], keys: dict[Any, Any]) -> dict[Any, Any]:
    """Return a map with other left sides."""
    return {keys.get(left, left): right for left, right in layer.items()}


LLAMA = Host(
    "placed_llama",
    lambda: LanguageModel(
        VOCABULARY, (LlamaLayer() for _ in range(LAYERS)), RMSNorm(WIDTH, 1e-6), rotary=Rotary(HEAD_DIM)
    ),
    TELlama,
    lambda rng: rng.integers(2, 24, high=VOCABULARY),
    weights=map_llama(),
)
UP_GATE = {GATE_UP: stack("mlp.up_proj.weight", "mlp.gate_proj.weight")}
KEY, VALUE = "attn.k_proj.weight", "attn.v_proj.weight"
# Queries whose groups alternate, as if keys were repeated as a whole and not each in turn.
ALTERNATING = {f"attn.{name}_proj.weight": reorder(f"attn.{name}_proj.weight", order, dim=dim)
               for name, order, dim in (("q", (0, 3, 1, 4, 2, 5), 0), ("o", (0, 3, 1, 4, 2, 5), 1))}  # fmt: skip


# Granite, whose port has a fused norm with each projection, and the multipliers in PyTorch.

HIDDEN, INNER, SEQ = 64, 128, 32
EMBEDDING, SCORES, BRANCH, LOGITS = 12.0, 0.125, 0.22, 6.0


class GraniteAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HEAD_DIM, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), HEAD_DIM) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        weights = torch.matmul(q, k.transpose(2, 3)) * SCORES + mask
        return self.o_proj(merge_heads(torch.matmul(F.softmax(weights, dim=-1), v)))


class GraniteLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.attn, self.mlp = GraniteAttention(), GatedMLP(HIDDEN, INNER)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, mask) * BRANCH
        return x + self.mlp(self.norm2(x)) * BRANCH


class Granite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rotary = nn.Embedding(VOCABULARY, HIDDEN), Rotary(HEAD_DIM)
        self.layers = nn.ModuleList(GraniteLayer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN, eps=1e-5), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        scale_weights(self, gain=1.5, embedding=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * EMBEDDING
        cos, sin = self.rotary(x)
        mask = torch.zeros_like(x[0, :, :1]).masked_fill(causal_mask(x), -math.inf)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.head(self.norm(x)) / LOGITS


class TEGraniteLayer(nn.Module):
    def __init__(
        self,
        te: Any,
        scores: float = SCORES,
        branches: tuple[float, float] = (BRANCH, BRANCH),
        mlp_gradient: float = 1.0,
    ) -> None:
        super().__init__()
        self.te, self.branches, self.mlp_gradient = te, branches, mlp_gradient
        self.qkv = te.LayerNormLinear(HIDDEN, HIDDEN + 2 * HEAD_DIM, eps=1e-5, normalization="RMSNorm", bias=False)
        self.core = te.DotProductAttention(
            HIDDEN // HEAD_DIM,
            HEAD_DIM,
            num_gqa_groups=1,
            attention_dropout=0.0,
            qkv_format="bshd",
            softmax_scale=scores,
        )
        self.out = te.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = te.LayerNormMLP(HIDDEN, INNER, eps=1e-5, normalization="RMSNorm", activation="swiglu", bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, HEAD_DIM)) for part in self.qkv(x).split([HIDDEN, HEAD_DIM, HEAD_DIM], dim=-1)
        )
        q, k = rotate_heads(self.te, q, angles), rotate_heads(self.te, k, angles)
        x = x + self.branches[0] * self.out(self.core(q, k, v.contiguous(), attn_mask_type="causal"))
        branch = self.branches[1] * self.mlp(x)
        return x + (ScaleGradient.apply(branch, self.mlp_gradient) if self.mlp_gradient != 1.0 else branch)


class TEGranite(nn.Module):
    def __init__(
        self,
        te: Any,
        at: At = NOWHERE,
        logits: float = LOGITS,
        looked_up: Any = lambda table: table,
        **options: Any,
    ) -> None:
        super().__init__()
        self.logits, self.looked_up = logits, looked_up
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = build_layers(LAYERS, partial(TEGraniteLayer, te), at, options)
        self.norm, self.head = te.RMSNorm(HIDDEN, eps=1e-5), te.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.looked_up(self.tokens.weight)) * EMBEDDING
        angles = rope_angles(x, HEAD_DIM)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x)) / self.logits


GRANITE_LAYER: dict[Any, Any] = {
    "norm1.weight": "qkv.layer_norm_weight",
    stack(*(f"attn.{name}_proj.weight" for name in "qkv")): "qkv.weight",
    "attn.o_proj.weight": "out.weight",
    "norm2.weight": "mlp.layer_norm_weight",
    GATE_UP: "mlp.fc1_weight",
    "mlp.down_proj.weight": "mlp.fc2_weight",
}
GRANITE = Host(
    "placed_granite",
    Granite,
    TEGranite,
    lambda rng: rng.integers(2, SEQ, high=VOCABULARY),
    weights={"tokens.weight": "tokens.weight", "norm.weight": "norm.weight", **map_layers(GRANITE_LAYER, LAYERS)},
)

PORTS = (
    place(LLAMA, "rotation of neighbours in one layer", "rope-layout", "layers.{i}.attn", "mul cat neg add", 1,
          rotary_pos_interleaved=True),
    place(LLAMA, "window of one layer", "window", "layers.{i}.attn", "scaled_dot_product_attention", 2,
          window_size=(12, 0)),
    place(LLAMA, "eps of one layer", "norm-eps", "layers.{i}.(input|post)_norm", "add rsqrt", 2,
          layernorm_epsilon=1e-2),
    place(LLAMA, "gate and up of one layer", "gate-up-swapped", "layers.{i}.mlp(|.gate_proj|.up_proj)",
          "silu mul linear", 1, weights=map_llama(at={1: rename_keys(LLAMA_LAYER, UP_GATE)})),
    place(LLAMA, "groups alternate", "gqa-head-order", "layers.{i}.attn(|.q_proj|.o_proj)", "repeat_interleave linear",
          weights=map_llama(rename_keys(LLAMA_LAYER, ALTERNATING))),
    place(LLAMA, "keys and values of one layer", "key-value-swapped", "layers.{i}.attn(|.k_proj|.v_proj)",
          "linear scaled_dot_product_attention", 2, weights=map_llama(at={2: exchange(LLAMA_LAYER, KEY, VALUE)})),
    place(LLAMA, "gradient of the stream doubled after one layer", "gradient-scale", "layers.1", "add", backward=True,
          doubled=1),
    place(GRANITE, "one MLP without its multiplier", ("factor", "residual-placement"), "layers.{i}", "mul add", 1,
          branches=(BRANCH, 1.0)),
    place(GRANITE, "usual scale of scores", "softmax-scale", "layers.{i}.attn", "mul", scores=HEAD_DIM**-0.5),
    place(GRANITE, "multiplier of one branch rounded", ("factor", "residual-placement"), "layers.{i}", "mul add", 0,
          branches=(0.219, BRANCH)),
    place(GRANITE, "logits divided by the root", ("factor", "output-scale"), "", "div", logits=LOGITS**0.5),
    place(GRANITE, "lookup of a tied table without gradient", ("gradient-path-missing", "embeddings-not-tied"),
          "tokens", "embedding", backward=True, looked_up=Tensor.detach),
    place(GRANITE, "half the gradient of one MLP", "gradient-scale", "layers.{i}", "mul add", 2, backward=True,
          mlp_gradient=0.5),
)  # fmt: skip
