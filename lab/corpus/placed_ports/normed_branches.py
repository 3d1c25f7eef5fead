"""Decoders that norm what a branch returns: like Gemma 2, with softcaps and windows, and like OLMo 2."""

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
from parity.case.weight_map import stack

VOCABULARY, HEAD_DIM = 96, 16

# Gemma 2: every second layer has a window, scores and logits have a softcap, and norms add 1 to their gain. The port's
# attention is written out as well.

HIDDEN, FFN, HEADS, GROUPS, WINDOW = 64, 128, 4, 2, 8
SCALE, SCORES_CAP, LOGITS_CAP = 24**-0.5, 20.0, 6.0
GATED = partial(F.gelu, approximate="tanh")


class GemmaAttention(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, GROUPS * HEAD_DIM, bias=False) for _ in range(2))
        self.o_proj, self.window = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False), window

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), HEAD_DIM) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * SCALE
        scores = torch.tanh(scores / SCORES_CAP) * SCORES_CAP
        scores = scores.masked_fill(causal_mask(x, self.window), -math.inf)
        return self.o_proj(merge_heads(torch.matmul(scores.softmax(dim=-1), v)))


class GemmaLayer(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.input_norm, self.post_attn_norm, self.pre_mlp_norm, self.post_mlp_norm = (
            RMSNorm(HIDDEN, 1e-6, shift=1.0) for _ in range(4)
        )
        self.attn, self.mlp = GemmaAttention(window), GatedMLP(HIDDEN, FFN, GATED)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.post_attn_norm(self.attn(self.input_norm(x), cos, sin))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Gemma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rotary = nn.Embedding(VOCABULARY, HIDDEN), Rotary(HEAD_DIM)
        self.layers = nn.ModuleList(GemmaLayer(None if number % 2 else WINDOW) for number in range(4))
        self.norm, self.head = RMSNorm(HIDDEN, 1e-6, shift=1.0), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        scale_weights(self, gain=1.25, embedding=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * HIDDEN**0.5
        cos, sin = self.rotary(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return LOGITS_CAP * torch.tanh(self.head(self.norm(x)) / LOGITS_CAP)


class TEGemmaLayer(nn.Module):
    def __init__(
        self,
        te: Any,
        window: int | None,
        scale: float = SCALE,
        cap: float | None = SCORES_CAP,
        activation: str = "tanh",
        gain_of_one: bool = True,
    ) -> None:
        super().__init__()
        self.te, self.window, self.scale, self.cap, self.activation = te, window, scale, cap, activation
        norm = dict(eps=1e-6, normalization="RMSNorm", zero_centered_gamma=True)
        self.qkv = te.LayerNormLinear(HIDDEN, (HEADS + 2 * GROUPS) * HEAD_DIM, bias=False, **norm)
        self.out = te.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.attn_norm = te.RMSNorm(HIDDEN, eps=1e-6, zero_centered_gamma=gain_of_one)
        self.gate_up = te.LayerNormLinear(HIDDEN, 2 * FFN, bias=False, **norm)
        self.down = te.Linear(FFN, HIDDEN, bias=False)
        self.mlp_norm = te.RMSNorm(HIDDEN, eps=1e-6, zero_centered_gamma=True)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn_norm(self.out(self.attend(x, angles)))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.mlp_norm(self.down(F.gelu(gate, approximate=self.activation) * up))

    def attend(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, HEAD_DIM))
            for part in self.qkv(x).split([HEADS * HEAD_DIM, GROUPS * HEAD_DIM, GROUPS * HEAD_DIM], dim=-1)
        )
        q = rotate_heads(self.te, q, angles).unflatten(2, (GROUPS, -1))
        k = rotate_heads(self.te, k, angles)
        scores = torch.einsum("bqgnd,bkgd->bgnqk", q, k).float() * self.scale
        scores = scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)
        scores = scores.masked_fill(causal_mask(x, self.window), -math.inf)
        context = torch.einsum("bgnqk,bkgd->bqgnd", scores.softmax(-1).to(v.dtype), v)
        return context.flatten(2)


class StraightThroughCap(torch.autograd.Function):
    """A softcap whose backward pass ignores it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class TEGemma(nn.Module):
    def __init__(
        self, te: Any, at: At = NOWHERE, windows_first: bool = True, straight_through: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.straight_through, self.tokens = straight_through, nn.Embedding(VOCABULARY, HIDDEN)
        windows = {number: WINDOW if (number % 2 == 0) == windows_first else None for number in range(4)}
        at = {number: {"window": window, **at.get(number, {})} for number, window in windows.items()}
        self.layers = build_layers(4, partial(TEGemmaLayer, te), at, options)
        self.norm = te.RMSNorm(HIDDEN, eps=1e-6, zero_centered_gamma=True)
        self.head = te.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * HIDDEN**0.5
        angles = rope_angles(x, HEAD_DIM)
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.head(self.norm(x))
        if self.straight_through:
            return StraightThroughCap.apply(logits, LOGITS_CAP)
        return torch.tanh(logits / LOGITS_CAP) * LOGITS_CAP


GEMMA_LAYER: dict[Any, Any] = {
    "input_norm.weight": "qkv.layer_norm_weight",
    stack(*(f"attn.{name}_proj.weight" for name in "qkv")): "qkv.weight",
    "attn.o_proj.weight": "out.weight",
    "post_attn_norm.weight": "attn_norm.weight",
    "pre_mlp_norm.weight": "gate_up.layer_norm_weight",
    stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "gate_up.weight",
    "mlp.down_proj.weight": "down.weight",
    "post_mlp_norm.weight": "mlp_norm.weight",
}
GEMMA = Host(
    "placed_gemma",
    Gemma,
    TEGemma,
    lambda rng: rng.integers(2, 24, high=VOCABULARY),
    weights=OWN | map_layers(GEMMA_LAYER, 4),
)


# OLMo 2, which norms the results of its branches, and queries and keys of all heads together.

WIDTH, INNER, LAYERS = 96, 160, 3


class OlmoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        q, k, v = (split_heads(each, HEAD_DIM) for each in (q, k, self.v_proj(x)))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return self.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class OlmoLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = OlmoAttention(), GatedMLP(WIDTH, INNER)
        self.attn_norm, self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn_norm(self.attn(x, cos, sin))
        return x + self.mlp_norm(self.mlp(x))


def build_olmo() -> nn.Module:
    model = LanguageModel(
        VOCABULARY, (OlmoLayer() for _ in range(LAYERS)), nn.RMSNorm(WIDTH, eps=1e-6), rotary=Rotary(HEAD_DIM)
    )
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


class TEOlmoLayer(nn.Module):
    def __init__(
        self,
        te: Any,
        base: float = 10_000.0,
        norms: str = "before rotation",
        mlp_order: str = "norm of the branch",
        gate_detached: bool = False,
    ) -> None:
        super().__init__()
        self.te, self.base, self.norms, self.mlp_order = te, base, norms, mlp_order
        self.gate_detached = gate_detached
        self.qkv, self.out = te.Linear(WIDTH, 3 * WIDTH, bias=False), te.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm, self.k_norm, self.attn_norm, self.mlp_norm = (te.RMSNorm(WIDTH, eps=1e-6) for _ in range(4))
        self.core = te.DotProductAttention(WIDTH // HEAD_DIM, HEAD_DIM, attention_dropout=0.0, qkv_format="bshd")
        self.gate_up, self.down = te.Linear(WIDTH, 2 * INNER, bias=False), te.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn_norm(self.attend(x))
        if self.mlp_order == "norm of the sum":
            return self.mlp_norm(x + self.mlp(x))
        return x + (self.mlp(self.mlp_norm(x)) if self.mlp_order == "norm of the input" else self.mlp_norm(self.mlp(x)))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        angles = rope_angles(x, HEAD_DIM, self.base)
        q, k = self.norm_and_rotate(q, self.q_norm, angles), self.norm_and_rotate(k, self.k_norm, angles)
        attended: Tensor = self.core(q, k, v.unflatten(-1, (-1, HEAD_DIM)).contiguous(), attn_mask_type="causal")
        return self.out(attended)

    def norm_and_rotate(self, x: Tensor, norm: Any, angles: Tensor) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, HEAD_DIM))

        match self.norms:
            case "before rotation":
                return rotate_heads(self.te, split(norm(x.contiguous())), angles)
            case "after rotation":
                return split(norm(rotate_heads(self.te, split(x), angles).flatten(2)))
            case _:  # of each head
                normed = F.rms_norm(split(x), (HEAD_DIM,), eps=1e-6) * split(norm.weight)
                return rotate_heads(self.te, normed, angles)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate.detach() if self.gate_detached else gate) * up)


def build_te_olmo(te: Any, at: At = NOWHERE, **options: Any) -> nn.Module:
    layers = build_layers(LAYERS, partial(TEOlmoLayer, te), at, options)
    return LanguageModel(VOCABULARY, layers, te.RMSNorm(WIDTH, eps=1e-6), te.Linear)


Q_NORM, K_NORM = "attn.q_norm.weight", "attn.k_norm.weight"
OLMO_LAYER: dict[Any, Any] = {
    stack(*(f"attn.{name}_proj.weight" for name in "qkv")): "qkv.weight",
    "attn.o_proj.weight": "out.weight",
    Q_NORM: "q_norm.weight",
    K_NORM: "k_norm.weight",
    "attn_norm.weight": "attn_norm.weight",
    stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "gate_up.weight",
    "mlp.down_proj.weight": "down.weight",
    "mlp_norm.weight": "mlp_norm.weight",
}
OLMO = Host(
    "placed_olmo",
    build_olmo,
    build_te_olmo,
    lambda rng: rng.integers(3, 16, high=VOCABULARY),
    weights=OWN | map_layers(OLMO_LAYER, LAYERS),
)

PORTS = (
    place(GEMMA, "scores of one layer not capped", "softcap", "layers.{i}.attn", "div tanh mul", 3, cap=None),
    place(GEMMA, "windows in the other layers", "window", "layers.{i}.attn", "masked_fill tril or",
          windows_first=False),
    place(GEMMA, "window of one layer one too long", "window", "layers.{i}.attn", "masked_fill tril or", 0,
          window=WINDOW + 1),
    place(GEMMA, "one norm's gain without its 1", "gamma-shift", "layers.{i}.post_attn_norm", "add mul", 1,
          gain_of_one=False),
    place(GEMMA, "scale of the head's width in one layer", "softmax-scale", "layers.{i}.attn", "mul", 2,
          scale=HEAD_DIM**-0.5),
    place(GEMMA, "rounded scale in one layer", "softmax-scale", "layers.{i}.attn", "mul", 1, scale=0.2),
    place(GEMMA, "exact GELU in one layer", "activation", "layers.{i}.mlp", "gelu", 2, activation="none"),
    place(GEMMA, "softcap without a gradient of its own", "gradient-scale", "", "mul tanh div", backward=True,
          straight_through=True),
    place(OLMO, "queries and keys normed after rotation", "norm-order", "layers.{i}.attn(|.q_norm|.k_norm)",
          "rms_norm mul add cat neg", norms="after rotation"),
    place(OLMO, "norms of each head in one layer", "norm-groups", "layers.{i}.attn.(q|k)_norm", "rms_norm", 1,
          norms="of each head"),
    place(OLMO, "one norm of the MLP's input", ("norm-order", "post-norm"), "layers.{i}.mlp(_norm|.gate_proj|.up_proj)",
          "rms_norm linear", 2, mlp_order="norm of the input"),
    place(OLMO, "one norm of the sum", "post-norm", "layers.{i}(|.mlp_norm)", "rms_norm add", 0,
          mlp_order="norm of the sum"),
    place(OLMO, "base of one layer", "rope-base", "layers.{i}.attn", "mul add", 1, base=160_000.0),
    place(OLMO, "norms of queries and keys exchanged in one layer", "parameters-exchanged",
          "layers.{i}.attn.(q|k)_norm", "rms_norm", 2,
          weights=OWN | map_layers(OLMO_LAYER, LAYERS, {2: exchange(OLMO_LAYER, Q_NORM, K_NORM)})),
    place(OLMO, "gate of one layer detached", "gradient-path-missing", "layers.{i}.mlp(|.gate_proj)", "silu linear", 1,
          backward=True, gate_detached=True),
)  # fmt: skip
