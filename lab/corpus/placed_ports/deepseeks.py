"""Decoders with a mixture beside a shared expert, as in Qwen's and DeepSeek's, and with multi-head latent attention."""

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
from parity.case.weight_map import stack

VOCABULARY, WIDTH, HEADS, HEAD_DIM = 96, 64, 4, 16

# A mixture of four experts, whose weights are not renormalised, and a shared expert with a gate of its own.

EXPERTS, FFN, SHARED = 4, 64, 96


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), HEAD_DIM) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class SparseMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared_gate = nn.Linear(WIDTH, EXPERTS, bias=False), nn.Linear(WIDTH, 1, bias=False)
        self.experts = nn.ModuleList(GatedMLP(WIDTH, FFN) for _ in range(EXPERTS))
        self.shared = GatedMLP(WIDTH, SHARED)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = torch.topk(F.softmax(self.router(rows), dim=-1), 2, dim=-1)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            result = result.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        shared = torch.sigmoid(self.shared_gate(rows)) * self.shared(rows)
        return (result + shared).view_as(x)


class SparseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.attn, self.mlp = Attention(), SparseMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TESparseLayer(nn.Module):
    """Every expert computes every token, so that the rows of each are a multiple of 16 for FP8."""

    def __init__(
        self,
        te: Any,
        chosen: int = 2,
        renormalised: bool = False,
        shared: str = "gated",
        read_weights: Any = lambda weights: weights,
    ) -> None:
        super().__init__()
        self.chosen, self.renormalised, self.shared, self.read_weights = chosen, renormalised, shared, read_weights
        self.attn = te.MultiheadAttention(
            WIDTH,
            HEADS,
            attention_dropout=0.0,
            layernorm_epsilon=1e-6,
            attn_mask_type="causal",
            input_layernorm=True,
            normalization="RMSNorm",
            bias=False,
            qkv_format="bshd",
        )
        self.norm = te.RMSNorm(WIDTH, eps=1e-6)
        self.router, self.shared_gate = nn.Linear(WIDTH, EXPERTS, bias=False), nn.Linear(WIDTH, 1, bias=False)
        self.fc1 = te.GroupedLinear(EXPERTS, WIDTH, 2 * FFN, bias=False)
        self.fc2 = te.GroupedLinear(EXPERTS, FFN, WIDTH, bias=False)
        self.shared_up, self.shared_down = (
            te.Linear(WIDTH, 2 * SHARED, bias=False),
            te.Linear(SHARED, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(self.norm(x).flatten(0, 1)).view_as(x)

    def mlp(self, rows: Tensor) -> Tensor:
        shares = self.router(rows).float().softmax(-1)
        hidden = torch.ones_like(shares, dtype=torch.bool).scatter(-1, shares.topk(self.chosen).indices, False)
        weights = self.read_weights(shares.masked_fill(hidden, 0.0))
        weights = weights / weights.sum(-1, keepdim=True) if self.renormalised else weights
        splits = [len(rows)] * EXPERTS
        gate, up = self.fc1(rows.repeat(EXPERTS, 1), splits).chunk(2, -1)
        made = self.fc2(F.silu(gate) * up, splits).unflatten(0, (EXPERTS, -1))
        result = (made * weights.to(made.dtype).T[..., None]).sum(0)
        if self.shared == "left out":
            return result
        gate, up = self.shared_up(rows).chunk(2, -1)
        shared = self.shared_down(F.silu(gate) * up)
        return result + (shared * self.shared_gate(rows).sigmoid() if self.shared == "gated" else shared)


def build_te_sparse(te: Any, at: At = NOWHERE, **options: Any) -> nn.Module:
    layers = build_layers(2, partial(TESparseLayer, te), at, options)
    return LanguageModel(VOCABULARY, layers, te.RMSNorm(WIDTH, eps=1e-6), te.Linear)


def map_sparse_layer(downs: tuple[int, ...] = (0, 1, 2, 3)) -> dict[Any, Any]:
    """Return a layer's map, with the experts of the port's second layer filled from these."""
    layer: dict[Any, Any] = {
        "norm1.weight": "attn.layernorm_qkv.layer_norm_weight",
        "attn.q_proj.weight": "attn.layernorm_qkv.query_weight",
        "attn.k_proj.weight": "attn.layernorm_qkv.key_weight",
        "attn.v_proj.weight": "attn.layernorm_qkv.value_weight",
        "attn.o_proj.weight": "attn.proj.weight",
        "norm2.weight": "norm.weight",
        "mlp.router.weight": "router.weight",
        "mlp.shared_gate.weight": "shared_gate.weight",
        stack("mlp.shared.gate_proj.weight", "mlp.shared.up_proj.weight"): "shared_up.weight",
        "mlp.shared.down_proj.weight": "shared_down.weight",
    }
    for number, down in enumerate(downs):
        expert = f"mlp.experts.{number}"
        layer[stack(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")] = f"fc1.weight{number}"
        layer[f"mlp.experts.{down}.down_proj.weight"] = f"fc2.weight{number}"
    return layer


SPARSE = Host(
    "placed_sparse",
    lambda: LanguageModel(VOCABULARY, (SparseLayer() for _ in range(2)), nn.RMSNorm(WIDTH, eps=1e-6)),
    build_te_sparse,
    lambda rng: rng.integers(2, 24, high=VOCABULARY),
    weights=OWN | map_layers(map_sparse_layer(), 2),
)


# Multi-head latent attention: keys and values come from a normed latent, and all heads share one rotated key.

LATENT, NOPE, ROPE, INNER, LAYERS = 32, 16, 16, 128, 3


class LatentAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(LATENT, eps=1e-6)
        self.kv_b = nn.Linear(LATENT, HEADS * (NOPE + HEAD_DIM), bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_nope, q_pe = split_heads(self.q_proj(x), NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        latent, k_pe = self.kv_a(x).split([LATENT, ROPE], dim=-1)
        k_nope, v = split_heads(self.kv_b(self.kv_norm(latent)), NOPE + HEAD_DIM).split([NOPE, HEAD_DIM], dim=-1)
        q_pe, k_pe = apply_rope(q_pe, cos, sin), apply_rope(k_pe[:, None], cos, sin)
        q = torch.cat((q_nope, q_pe), dim=-1)
        k = torch.cat((k_nope, k_pe.expand(-1, HEADS, -1, -1)), dim=-1)
        return self.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class LatentLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.attn, self.mlp = LatentAttention(), GatedMLP(WIDTH, INNER)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class TELatentLayer(nn.Module):
    def __init__(
        self,
        te: Any,
        scale: float = (NOPE + ROPE) ** -0.5,
        eps: float = 1e-6,
        latent_norm: str = "latent",
        rotated_first: bool = False,
        key_rotated: bool = True,
        key_detached: bool = False,
    ) -> None:
        super().__init__()
        self.te, self.latent_norm, self.rotated_first = te, latent_norm, rotated_first
        self.key_rotated, self.key_detached = key_rotated, key_detached
        norm = dict(eps=1e-6, normalization="RMSNorm", bias=False)
        self.norm = te.RMSNorm(WIDTH, eps=1e-6)
        self.q = te.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a = te.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_norm = te.RMSNorm(LATENT, eps=eps)
        self.kv_b = te.Linear(LATENT, HEADS * (NOPE + HEAD_DIM), bias=False)
        self.core = te.DotProductAttention(
            HEADS, (NOPE + ROPE, HEAD_DIM), attention_dropout=0.0, qkv_format="bshd", softmax_scale=scale
        )
        self.out = te.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = te.LayerNormMLP(WIDTH, INNER, activation="swiglu", **norm)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x), rope_angles(x, ROPE))
        return x + self.mlp(x)

    def attend(self, x: Tensor, angles: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1))
        q_nope, q_pe = q[..., :NOPE], q[..., NOPE:]
        q_nope, q_pe = (q_pe, q_nope) if self.rotated_first else (q_nope, q_pe)
        latent, k_pe = self.kv_a(x).split([LATENT, ROPE], -1)
        k_nope, v = self.kv_b(self.norm_latent(latent, k_pe)).unflatten(-1, (HEADS, -1)).split([NOPE, HEAD_DIM], -1)
        k_pe = k_pe[:, :, None].detach() if self.key_detached else k_pe[:, :, None]
        k_pe = rotate_heads(self.te, k_pe, angles) if self.key_rotated else k_pe
        q = torch.cat((q_nope, rotate_heads(self.te, q_pe, angles)), -1)
        k = torch.cat((k_nope, k_pe.expand(-1, -1, HEADS, -1)), -1)
        return self.out(self.core(q, k, v.contiguous(), attn_mask_type="causal"))

    def norm_latent(self, latent: Tensor, k_pe: Tensor) -> Tensor:
        match self.latent_norm:
            case "latent":
                return self.kv_norm(latent.contiguous())
            case "latent and key":
                both = F.rms_norm(torch.cat((latent, k_pe), -1), (LATENT + ROPE,), eps=1e-6)
                return both[..., :LATENT] * self.kv_norm.weight
            case _:  # none
                return latent


def build_te_latent(te: Any, at: At = NOWHERE, **options: Any) -> nn.Module:
    layers = build_layers(LAYERS, partial(TELatentLayer, te), at, options)
    return LanguageModel(VOCABULARY, layers, te.RMSNorm(WIDTH, eps=1e-6), te.Linear)


LATENT_LAYER: dict[Any, Any] = {
    "norm1.weight": "norm.weight",
    **{f"attn.{name}.weight": f"{name}.weight" for name in ("kv_a", "kv_norm", "kv_b")},
    "attn.q_proj.weight": "q.weight",
    "attn.o_proj.weight": "out.weight",
    "norm2.weight": "mlp.layer_norm_weight",
    stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "mlp.fc1_weight",
    "mlp.down_proj.weight": "mlp.fc2_weight",
}
LATENT_MODEL = Host(
    "placed_latent_attention",
    lambda: LanguageModel(
        VOCABULARY, (LatentLayer() for _ in range(LAYERS)), nn.RMSNorm(WIDTH, eps=1e-6), rotary=Rotary(ROPE)
    ),
    build_te_latent,
    lambda rng: rng.integers(2, 32, high=VOCABULARY),
    weights=OWN | map_layers(LATENT_LAYER, LAYERS),
)

PORTS = (
    place(SPARSE, "weights of one layer renormalised", "routing-weights", "layers.{i}.mlp",
          "softmax topk mul index_add", 1, renormalised=True),
    place(SPARSE, "shared expert not gated", ("operation", "factor"), "layers.{i}.mlp(|.shared_gate)",
          "sigmoid mul linear", shared="plain"),
    place(SPARSE, "one layer without its shared expert", "branch-missing", "layers.{i}.mlp", "sigmoid add", 0,
          shared="left out"),
    place(SPARSE, "one expert a token in one layer", "top-k", "layers.{i}.mlp", "topk where eq index_add", 1, chosen=1),
    place(SPARSE, "experts of one layer in another order", "experts-permuted",
          "layers.{i}.mlp.experts.[0-3].down_proj", "linear", 0,
          weights=OWN | map_layers(map_sparse_layer(), 2, {0: map_sparse_layer((3, 0, 1, 2))})),
    place(SPARSE, "routing weights without gradient", "gradient-path-missing", "layers.{i}.mlp(|.router)",
          "linear softmax topk mul", backward=True, read_weights=Tensor.detach),
    place(LATENT_MODEL, "scale of the part without rotation", "softmax-scale", "layers.{i}.attn",
          "scaled_dot_product_attention", scale=NOPE**-0.5),
    place(LATENT_MODEL, "rounded scale in one layer", "softmax-scale", "layers.{i}.attn",
          "scaled_dot_product_attention", 2, scale=0.18),
    place(LATENT_MODEL, "first channels of queries rotated in one layer", ("rope-partial", "operation"),
          "layers.{i}.attn", "split cat mul add neg", 1, rotated_first=True),
    place(LATENT_MODEL, "latent of one layer not normed", "norm-missing", "layers.{i}.attn.kv_norm", "rms_norm", 2,
          latent_norm="none"),
    place(LATENT_MODEL, "latent normed together with the key", "norm-groups", "layers.{i}.attn.kv_norm", "rms_norm",
          latent_norm="latent and key"),
    place(LATENT_MODEL, "eps of one latent's norm", "norm-eps", "layers.{i}.attn.kv_norm", "rms_norm", 1, eps=1e-3),
    place(LATENT_MODEL, "shared key of one layer not rotated", "rope-one-side", "layers.{i}.attn", "mul add cat neg", 0,
          key_rotated=False),
    place(LATENT_MODEL, "shared key of one layer detached", "gradient-path-missing", "layers.{i}.attn(|.kv_a)",
          "split getitem linear", 2, backward=True, key_detached=True),
)  # fmt: skip
