"""Decoders whose attention and MLP run in parallel: like Cohere's, with one norm, and like GPT-NeoX, with two."""

from __future__ import annotations

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
    Rotary,
    apply_rope,
    build_layers,
    map_layers,
    merge_heads,
    place,
    rope_angles,
    rotate_heads,
    split_heads,
)
from lab.corpus.small import Host
from parity.case.weight_map import constant, rearrange, rope_halves, stack

VOCABULARY, LAYERS, HEAD_DIM = 96, 3, 16

# Cohere, whose reference rotates neighbours, and whose port rotates halves of queries and keys in another order.

WIDTH, FFN = 80, 160


class CenteredNorm(nn.Module):
    """A layer norm without a bias."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        variance = centered.pow(2).mean(-1, keepdim=True)
        return self.weight * (centered * torch.rsqrt(variance + self.eps))


class CohereAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), HEAD_DIM) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return self.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = cos[:, : HEAD_DIM // 2], sin[:, : HEAD_DIM // 2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class CohereLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = CenteredNorm(WIDTH), CohereAttention(), GatedMLP(WIDTH, FFN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.attn(normed, cos, sin) + self.mlp(normed)


class TECohereLayer(nn.Module):
    def __init__(
        self,
        te: Any,
        norm: str = "LayerNorm",
        eps: float = 1e-5,
        query_start: int = 0,
        mlp_reads: str = "norm",
        adds_to: str = "stream",
    ) -> None:
        super().__init__()
        self.te, self.query_start, self.mlp_reads, self.adds_to = te, query_start, mlp_reads, adds_to
        self.norm = getattr(te, norm)(WIDTH, eps=eps)
        self.qkv, self.out = te.Linear(WIDTH, 3 * WIDTH, bias=False), te.Linear(WIDTH, WIDTH, bias=False)
        self.core = te.DotProductAttention(WIDTH // HEAD_DIM, HEAD_DIM, attention_dropout=0.0, qkv_format="bshd")
        self.gate_up, self.down = te.Linear(WIDTH, 2 * FFN, bias=False), te.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in self.qkv(normed).chunk(3, -1))
        q = rotate_heads(self.te, q, rope_angles(x, HEAD_DIM, start=self.query_start))
        k = rotate_heads(self.te, k, rope_angles(x, HEAD_DIM))
        attended = self.out(self.core(q, k, v.contiguous(), attn_mask_type="causal"))
        gate, up = self.gate_up(normed if self.mlp_reads == "norm" else normed + attended).chunk(2, -1)
        return (x if self.adds_to == "stream" else normed) + attended + self.down(F.silu(gate) * up)


def build_te_cohere(te: Any, at: At = NOWHERE, **options: Any) -> nn.Module:
    layers = build_layers(LAYERS, partial(TECohereLayer, te), at, options)
    return LanguageModel(VOCABULARY, layers, te.LayerNorm(WIDTH), te.Linear)


def map_cohere_layer(in_halves: bool = True, norm_bias: bool = True) -> dict[Any, Any]:
    """Return a layer's map; a port that forgets to reorder queries and keys rotates halves of the wrong channels."""
    q, k = (f"attn.{name}_proj.weight" for name in "qk")
    sides = (rope_halves(q, head_dim=HEAD_DIM), rope_halves(k, head_dim=HEAD_DIM)) if in_halves else (q, k)
    return {
        "norm.weight": "norm.weight",
        **({constant(0.0, WIDTH): "norm.bias"} if norm_bias else {}),
        stack(*sides, "attn.v_proj.weight"): "qkv.weight",
        "attn.o_proj.weight": "out.weight",
        stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "gate_up.weight",
        "mlp.down_proj.weight": "down.weight",
    }


def map_cohere(layer: dict[Any, Any], at: Any = NOWHERE) -> dict[Any, Any]:
    return OWN | {constant(0.0, WIDTH): "norm.bias"} | map_layers(layer, LAYERS, at)


COHERE = Host(
    "placed_cohere",
    lambda: LanguageModel(
        VOCABULARY, (CohereLayer() for _ in range(LAYERS)), CenteredNorm(WIDTH), rotary=Rotary(HEAD_DIM)
    ),
    build_te_cohere,
    lambda rng: rng.integers(2, 24, high=VOCABULARY),
    weights=map_cohere(map_cohere_layer()),
)


# GPT-NeoX, which rotates a quarter of each head, and whose queries, keys and values lie head by head in one weight.

HIDDEN, INNER, HEADS, ROTATED = 64, 256, 4, 4


class NeoXAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        fused = self.query_key_value(x).view(batch, seq, HEADS, 3 * HEAD_DIM).transpose(1, 2)
        q, k, v = fused.chunk(3, dim=-1)
        q, k = (torch.cat((apply_rope(each[..., :ROTATED], cos, sin), each[..., ROTATED:]), dim=-1) for each in (q, k))
        return self.dense(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class NeoXMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class NeoXLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp = NeoXAttention(), NeoXMLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.attn(self.input_norm(x), cos, sin)
        return self.mlp(self.post_norm(x)) + attended + x


class TENeoXLayer(nn.Module):
    def __init__(
        self,
        te: Any,
        rotated: int = ROTATED,
        parallel: bool = True,
        gelu: str = "none",
        forgets_bias: bool = False,
        mlp_detached: bool = False,
    ) -> None:
        super().__init__()
        self.te, self.rotated, self.parallel, self.gelu = te, rotated, parallel, gelu
        self.forgets_bias, self.mlp_detached = forgets_bias, mlp_detached
        self.qkv, self.out = te.LayerNormLinear(HIDDEN, 3 * HIDDEN), te.Linear(HIDDEN, HIDDEN, return_bias=True)
        self.core = te.DotProductAttention(HEADS, HEAD_DIM, attention_dropout=0.0, qkv_format="bshd")
        self.up, self.down = te.LayerNormLinear(HIDDEN, INNER), te.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        angles = rope_angles(x, self.rotated)
        q, k = rotate_heads(self.te, q, angles), rotate_heads(self.te, k, angles)
        attended, bias = self.out(self.core(q, k, v.contiguous(), attn_mask_type="causal"))
        attended = attended if self.forgets_bias else attended + bias
        read = x if self.parallel else x + attended
        up = self.up(read.detach() if self.mlp_detached else read)
        return self.down(F.gelu(up, approximate=self.gelu)) + attended + x


def build_te_neox(te: Any, at: At = NOWHERE, **options: Any) -> nn.Module:
    layers = build_layers(LAYERS, partial(TENeoXLayer, te), at, options)
    return LanguageModel(VOCABULARY, layers, te.LayerNorm(HIDDEN), te.Linear)


def map_neox(head_by_head: bool = False) -> dict[Any, Any]:
    """Return the map; a port that copies the fused weight as it is takes parts of heads for queries."""
    layer: dict[Any, Any] = {}
    for kind, rest in (("weight", " i"), ("bias", "")):
        fused = f"attn.query_key_value.{kind}"
        pattern = f"(h three d){rest} -> (three h d){rest}"
        layer[fused if head_by_head else rearrange(fused, pattern, h=HEADS, three=3)] = f"qkv.{kind}"
        layer[f"attn.dense.{kind}"] = f"out.{kind}"
        layer |= {f"input_norm.{kind}": f"qkv.layer_norm_{kind}", f"post_norm.{kind}": f"up.layer_norm_{kind}"}
        layer |= {f"mlp.{name}.{kind}": f"{name}.{kind}" for name in ("up", "down")}
    return OWN | {"norm.bias": "norm.bias"} | map_layers(layer, LAYERS)


NEOX = Host(
    "placed_neox",
    lambda: LanguageModel(
        VOCABULARY, (NeoXLayer() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN), rotary=Rotary(ROTATED)
    ),
    build_te_neox,
    lambda rng: rng.integers(2, 32, high=VOCABULARY),
    weights=map_neox(),
)
_ROTATION = "mul cat neg add getitem"

PORTS = (
    place(COHERE, "one MLP in sequence", "parallel-block", "layers.{i}.mlp.(gate|up)_proj", "linear", 1,
          mlp_reads="sum"),
    place(COHERE, "queries and keys not in halves", "rope-layout", "layers.{i}.attn(|.q_proj|.k_proj)",
          "mul sub add stack getitem linear", weights=map_cohere(map_cohere_layer(in_halves=False))),
    place(COHERE, "one norm not centred", "norm-kind", "layers.{i}.norm", "mean sub", 2, norm="RMSNorm",
          weights=map_cohere(map_cohere_layer(), {2: map_cohere_layer(norm_bias=False)})),
    place(COHERE, "queries two positions late", "rope-position", "layers.{i}.attn", "mul sub add stack",
          query_start=2),
    place(COHERE, "residual from the norm of one layer", "residual-placement", "layers.{i}", "add", 1,
          adds_to="norm"),
    place(COHERE, "eps of one inner norm", "norm-eps", "layers.{i}.norm", "add rsqrt", 2, eps=1e-3),
    place(NEOX, "tanh GELU in one layer", "activation", "layers.{i}.mlp", "gelu", 1, gelu="tanh"),
    place(NEOX, "half of each head rotated in one layer", "rope-partial", "layers.{i}.attn", _ROTATION, 2,
          rotated=2 * ROTATED),
    place(NEOX, "in sequence", "parallel-block", "layers.{i}.post_norm", "layer_norm", parallel=False),
    place(NEOX, "returned bias of one layer not added", "bias-dropped", "layers.{i}.attn.dense", "linear", 0,
          forgets_bias=True),
    place(NEOX, "fused weight copied head by head", "qkv-layout", "layers.{i}.attn(|.query_key_value)",
          "linear view chunk", weights=map_neox(head_by_head=True)),
    place(NEOX, "input of one MLP detached", "gradient-path-missing", "layers.{i}.post_norm", "layer_norm", 2,
          backward=True, mlp_detached=True),
)  # fmt: skip
