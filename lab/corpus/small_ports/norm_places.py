"""Norms that only the port has, that it lacks, or that it has elsewhere: of queries, keys and branches, around sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.decoder import decoder
from lab.corpus.port import Port
from lab.corpus.small import Host, normal, twins
from parity.case.weight_map import constant, copies

# TE's LayerNormLinear in place of a linear layer without a norm.

HIDDEN, FFN, TOKENS, LAYERS = 48, 96, 40, 2


class Mlp(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def build_te_mlps(te: Any, norm: str = "") -> nn.Module:
    ups = (
        te.LayerNormLinear(HIDDEN, FFN, normalization=norm) if norm else te.Linear(HIDDEN, FFN) for _ in range(LAYERS)
    )
    return nn.Sequential(*(Mlp(up, te.Linear(FFN, HIDDEN)) for up in ups))


def map_mlps(**norms: float) -> dict[Any, Any]:
    """Return the map of the MLPs; each of the norms' parameters that are named is filled with this number."""
    same = [f"{i}.{layer}.{leaf}" for i in range(LAYERS) for layer in ("up", "down") for leaf in ("weight", "bias")]
    weights: dict[Any, Any] = {name: name for name in same}
    for leaf, value in norms.items():
        weights[constant(value, HIDDEN)] = copies(*(f"{i}.up.layer_norm_{leaf}" for i in range(LAYERS)))
    return weights


MLPS = Host(
    "mlps_without_norms",
    lambda: nn.Sequential(*(Mlp(nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)) for _ in range(LAYERS))),
    build_te_mlps,
    normal((TOKENS, HIDDEN), scale=3.0),
    weights=map_mlps(),
)


# Extra norms of queries and keys, of a branch, before a linear layer or after a sum, in some or all layers.

HEADS, SEQ = 4, 12


def normed(x: Tensor, kind: str) -> Tensor:
    if kind == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], eps=1e-5)
    return F.normalize(x, dim=-1, eps=1e-6) if kind == "L2" else F.rms_norm(x, x.shape[-1:], eps=1e-5)


class Layer(nn.Module):
    """A layer; ``norms`` holds the kind of each extra norm, by ``qk``, ``branch``, ``up`` and ``sum``."""

    def __init__(self, linear: Any, norm: Any, norms: Mapping[str, str]) -> None:
        super().__init__()
        self.norm, self.norms = norm(HIDDEN, eps=1e-5), norms
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = linear(HIDDEN, FFN, bias=False), linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.extra("qk", q), self.extra("qk", k)
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = scores.masked_fill(torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1), -math.inf)
        x = x + self.extra("branch", self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return self.extra("sum", x + self.down(F.gelu(self.up(self.extra("up", x)))))

    def extra(self, where: str, x: Tensor) -> Tensor:
        return normed(x, self.norms[where]) if where in self.norms else x


def layers(name: str, count: int) -> Host:
    """Return the host of some layers, whose port has extra norms in ``at``."""

    def build(linear: Any, norm: Any, at: tuple[int, ...] = (), **norms: str) -> nn.Module:
        return nn.Sequential(*(Layer(linear, norm, norms if i in at else {}) for i in range(count)))

    return Host(
        name,
        lambda: build(nn.Linear, nn.RMSNorm),
        lambda te, **extra: build(te.Linear, te.RMSNorm, **extra),
        normal((2, SEQ, HIDDEN), scale=3.0),
    )


TWO, THREE = layers("two_layers_without_norms", 2), layers("three_layers_without_norms", 3)
OF_HEADS = "qk_norm_type=None; in the port, they go through a "


# Norms of queries, keys or values that only the port has.

WIDTH, HEAD = 64, 32


class Attention(nn.Module):
    """Attention with or without norms of queries and keys; the port may have more of them."""

    def __init__(self, linear: Any, normed: bool = False, mistake: str = "") -> None:
        super().__init__()
        self.normed, self.mistake = normed, mistake
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        if normed:
            self.of_q, self.of_k = (nn.RMSNorm(HEAD, eps=1e-6) for _ in range(2))
            nn.init.uniform_(self.of_k.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, HEAD)).permute(2, 0, 3, 1, 4)
        if self.normed:
            q, k = self.of_q(q), self.of_k(k)
            v = self.of_k(v) if self.mistake == "keys' norm" else v
        if self.mistake == "all heads":
            q, k = (F.rms_norm(one.transpose(1, 2).flatten(2), (WIDTH,), eps=1e-5) for one in (q, k))
            q, k = (one.unflatten(-1, (2, HEAD)).transpose(1, 2) for one in (q, k))
        else:
            q, k, v = (
                F.rms_norm(one, (HEAD,), eps=1e-5) if name in self.mistake.split() else one
                for name, one in zip("qkv", (q, k, v), strict=True)
            )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


PLAIN = twins(Attention, normal((2, 16, WIDTH)), "attention_without_norms")
NORMED = twins(Attention, normal((2, 16, WIDTH)), "attention_with_norms", settings=dict(normed=True))


# A decoder's last norm in the wrong places, and sums with a norm's result instead of the stream.

WITH_LOSS = decoder("decoder_with_loss")
DECODER = decoder("decoder_of_two_layers", layers=2, loss=False)


# Norms after sums, as in the original transformer, and norms of branches, as in OLMo 2, each in the other's place.

WIDE = 112


class Block(nn.Module):
    """Two branches with norms ``before`` them, after the ``sum``, or of each ``branch``'s result, as in OLMo 2."""

    def __init__(self, linear: Any, norm: Any, where: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(HIDDEN, eps=1e-5), norm(HIDDEN, eps=1e-5)  # PyTorch's RMSNorm has another default
        self.mix, self.up, self.down = linear(HIDDEN, HIDDEN), linear(HIDDEN, WIDE), linear(WIDE, HIDDEN)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            x = x + self.mix(self.norm1(x))
            return x + self.down(self.up(self.norm2(x)).relu())
        if self.where == "branch":
            x = x + self.norm1(self.mix(x))
            return x + self.norm2(self.down(self.up(x).relu()))
        x = self.norm1(x + self.mix(x))
        return self.norm2(x + self.down(self.up(x).relu()))


def block(name: str, norm: str, where: str) -> Host:
    return Host(
        name,
        lambda where: Block(nn.Linear, getattr(nn, norm), where),
        lambda te, where: Block(te.Linear, getattr(te, norm), where),
        normal((TOKENS, HIDDEN)),
        dict(where=where),
    )


POST_NORM = block("block_with_norms_after_sums", "LayerNorm", "sum")
OF_BRANCHES = block("block_with_norms_of_branches", "RMSNorm", "branch")


# Norms of embeddings, and norms of tokens before pooling.


class Pooled(nn.Module):
    """Norm tokens, add a learned number, and pool them; a port may lack a norm."""

    def __init__(self, linear: Any, norm: Any, mistake: str) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mix, self.mistake = norm(HIDDEN), norm(HIDDEN), linear(HIDDEN, HIDDEN), mistake
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        x = 3.0 * x if self.mistake == "unnormed" else self.norm1(3.0 * x)
        x = x + self.shift
        x = x + self.mix(x)
        if self.mistake == "pooled":
            return torch.cat((self.norm2(x[:, 0]), self.norm2(x[:, 4:].mean(1))), -1)
        x = self.norm2(x)
        return torch.cat((x[:, 0], x[:, 4:].mean(1)), -1)


def pooled(name: str, mistake: str) -> Host:
    return Host(
        name,
        lambda mistake: Pooled(nn.Linear, nn.LayerNorm, mistake),
        lambda te, mistake: Pooled(te.Linear, te.LayerNorm, mistake),
        normal((2, TOKENS, HIDDEN)),
        dict(mistake=mistake),
    )


POOLED, POOLED_FIRST = pooled("norm_before_pooling", ""), pooled("norm_after_pooling", "pooled")


# PyTorch's encoder layer, whose norms come after the sums, left as it is or ported to TE's layer without moving them.

ATTENTION, MLP = "self_attention.", "layernorm_mlp."
NAMES = {
    "self_attn.in_proj_": f"{ATTENTION}layernorm_qkv.",
    "self_attn.out_proj.": f"{ATTENTION}proj.",
    "norm1.": f"{ATTENTION}layernorm_qkv.layer_norm_",
    "norm2.": f"{MLP}layer_norm_",
    "linear1.": f"{MLP}fc1_",
    "linear2.": f"{MLP}fc2_",
}


def build_encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(HIDDEN, 3, WIDE, dropout=0.0, batch_first=True)  # norm_first=False


def port_encoder_layer(te: Any, of_te: bool = False) -> nn.Module:
    options = dict(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="no_mask",
        activation="relu",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        attn_input_format="bshd",
    )
    return te.TransformerLayer(HIDDEN, WIDE, 3, **options) if of_te else build_encoder_layer()


ENCODER_LAYER = Host("encoder_layer", build_encoder_layer, port_encoder_layer, normal((2, TOKENS, HIDDEN)))
OF_TE = {left + kind: right + kind for kind in ("weight", "bias") for left, right in NAMES.items()}

PORTS: tuple[Port, ...] = (
    *(host.right() for host in (MLPS, TWO, PLAIN, NORMED, DECODER, POST_NORM, OF_BRANCHES, POOLED)),
    MLPS.wrong(
        "norm-missing",
        "a LayerNorm comes before",
        norm="LayerNorm",
        weights=map_mlps(weight=1.0, bias=0.0),
        name="LayerNormLinear",
    ),
    MLPS.wrong(
        "norm-missing",
        "a RMSNorm comes before",
        norm="RMSNorm",
        weights=map_mlps(weight=1.0),
        name="LayerNormLinear with RMSNorm",
    ),
    TWO.wrong("norm-missing", f"{OF_HEADS}RMSNorm.", at=(0, 1), qk="RMSNorm"),
    THREE.wrong("norm-missing", f"{OF_HEADS}LayerNorm in 0, 2.", at=(0, 2), qk="LayerNorm"),
    TWO.wrong("norm-missing", f"{OF_HEADS}L2Normalization in 0.", at=(0,), qk="L2"),
    TWO.wrong("norm-missing", "before the sum in 1 (sum 1).", at=(1,), branch="LayerNorm"),
    TWO.wrong("norm-missing", "comes after it in each layer (sum 2).", at=(0, 1), sum="LayerNorm"),
    TWO.wrong("norm-missing", "before the 1st 'linear' of 1.up, as the reference", at=(1,), up="RMSNorm"),
    THREE.wrong("norm-missing", "in 0.up, 2.up.", at=(0, 2), up="RMSNorm"),
    PLAIN.wrong("norm-missing", "attention has a RMSNorm of values.", mistake="v"),
    PLAIN.wrong("norm-missing", "attention has a RMSNorm of queries, keys and values.", mistake="q k v"),
    PLAIN.wrong("norm-missing", "attention has a RMSNorm of keys.", mistake="k"),
    PLAIN.wrong("norm-missing", "attention has a RMSNorm of queries and keys, all heads at once.", mistake="all heads"),
    NORMED.wrong("norm-missing", "in the port, they go through the norm of the keys.", mistake="keys' norm"),
    WITH_LOSS.wrong("norm-missing", final_norm=False, others=True),  # its weight gets no gradient
    DECODER.wrong("post-norm", "it is after each 2nd sum.", normed=1),
    DECODER.wrong("post-norm", "it is after each 2nd sum, and once more at the end.", normed=2),
    DECODER.wrong("residual-placement", "each layer's 1st sum", from_norm=True),
    POST_NORM.wrong("post-norm", "it is before the branch", where="before"),
    OF_BRANCHES.wrong("post-norm", "each norm is before its branch", where="before"),
    OF_BRANCHES.wrong("post-norm", "each norm is after the sum", where="sum"),
    POOLED.wrong("post-norm", "the port norms only those that are picked, or their average", mistake="pooled"),
    POOLED_FIRST.wrong("post-norm", "the port norms each of them", mistake="", name="each normed"),
    POOLED.wrong("norm-missing", "norm1", mistake="unnormed", others=True),
    ENCODER_LAYER.wrong("post-norm", "put each norm after the sum", of_te=True, weights=OF_TE, name="norms first"),
)
