"""Norms that only the port has, that it lacks, or that it has elsewhere: of queries, keys and branches, around sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from ports import compared, decoders, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity
from lab.corpus.decoder import Options

# TE's LayerNormLinear in place of a linear layer without a norm.

HIDDEN, FFN, TOKENS, LAYERS = 48, 96, 40, 2


class Mlp(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


@in_turn(("kind",), [("",), ("LayerNorm",), ("RMSNorm",)])
def test_a_norm_that_tes_linear_layer_alone_has_is_told_with_its_kind(kind, precision):
    same = [f"{i}.{layer}.{leaf}" for i in range(LAYERS) for layer in ("up", "down") for leaf in ("weight", "bias")]
    weights: dict[Any, Any] = {name: name for name in same}
    for leaf, value in (("weight", 1.0), ("bias", 0.0)):
        if kind == "LayerNorm" or (kind and leaf == "weight"):
            norms = (f"{i}.up.layer_norm_{leaf}" for i in range(LAYERS))
            weights[parity.constant(value, HIDDEN)] = parity.copies(*norms)

    def port(te: Any) -> nn.Module:
        ups = [
            te.LayerNormLinear(HIDDEN, FFN, normalization=kind) if kind else te.Linear(HIDDEN, FFN)
            for _ in range(LAYERS)
        ]
        return nn.Sequential(*(Mlp(up, te.Linear(FFN, HIDDEN)) for up in ups))

    result = compared(
        lambda: nn.Sequential(*(Mlp(nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)) for _ in range(LAYERS))),
        port,
        lambda rng: 3.0 * rng.normal(TOKENS, HIDDEN),
        precision,
        weights,
    )
    tells(result, "norm-missing" if kind else "passed", f"a {kind} comes before")


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


def with_extra(precision: str, where: str, kind: str, layers: tuple[int, ...], of: int = 2) -> parity.Result:
    """Compare ``of`` layers with a port that has such norms in ``layers``."""
    return compared(
        lambda: nn.Sequential(*(Layer(nn.Linear, nn.RMSNorm, {}) for _ in range(of))),
        lambda te: nn.Sequential(
            *(Layer(te.Linear, te.RMSNorm, {where: kind} if i in layers else {}) for i in range(of))
        ),
        lambda rng: 3.0 * rng.normal(2, SEQ, HIDDEN),
        precision,
    )


@in_turn(
    ("kind", "layers", "phrase"),
    [
        ("RMSNorm", (0, 1), "RMSNorm."),
        ("LayerNorm", (0, 2), "LayerNorm in 0, 2."),
        ("L2", (0,), "L2Normalization in 0."),
    ],
)
def test_a_norm_of_queries_and_keys_is_told_with_its_kind_and_the_layers_that_have_it(kind, layers, phrase, precision):
    phrase = f"qk_norm_type=None; in the port, they go through a {phrase}"
    tells(with_extra(precision, "qk", kind, layers, of=3 if 2 in layers else 2), "norm-missing", phrase)


@in_turn(
    ("where", "layers", "phrase"),
    [
        ("branch", (1,), "a LayerNorm comes before the sum in 1 (sum 1)."),
        ("sum", (0, 1), "a LayerNorm comes after it in each layer (sum 2)."),
    ],
)
def test_an_extra_norm_is_told_with_its_place(where, layers, phrase, precision):
    tells(with_extra(precision, where, "LayerNorm", layers), "norm-missing", phrase)


@in_turn(("layer", "kind"), [(1, "RMSNorm"), (0, "LayerNorm")])
def test_a_norm_before_a_linear_layer_of_one_layer_is_told_with_the_layer(layer, kind, precision):
    result = with_extra(precision, "up", kind, (layer,))
    tells(result, "norm-missing", f"a {kind} comes before.")
    place = f"leave out the norm before the 1st 'linear' of {layer}.up, as the reference does"
    assert place in result.findings[0].message


def test_norms_before_linear_layers_of_some_layers_are_told_with_these():
    tells(with_extra("fp32", "up", "RMSNorm", (0, 2), of=3), "norm-missing", "in 0.up, 2.up.")


# Norms of queries, keys or values that only the port has.

WIDTH, HEAD = 64, 32


class Attention(nn.Module):
    """Attention with or without norms of queries and keys."""

    normed = False

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.qkv, self.out = mistake, linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        if self.normed:
            self.of_q, self.of_k = (nn.RMSNorm(HEAD, eps=1e-6) for _ in range(2))
            nn.init.uniform_(self.of_k.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, HEAD)).permute(2, 0, 3, 1, 4)
        if self.normed:
            q, k = self.of_q(q), self.of_k(k)
            v = self.of_k(v) if self.mistake == "keys' norm" else v
        if "all heads" in self.mistake:
            q, k = (F.rms_norm(one.transpose(1, 2).flatten(2), (WIDTH,), eps=1e-5) for one in (q, k))
            q, k = (one.unflatten(-1, (2, HEAD)).transpose(1, 2) for one in (q, k))
        else:
            q, k, v = (
                F.rms_norm(one, (HEAD,), eps=1e-5) if name in self.mistake.split() else one
                for name, one in zip("qkv", (q, k, v), strict=True)
            )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Normed(Attention):
    normed = True


@in_turn(
    ("module", "mistake", "title", "phrase"),
    [
        (Attention, "", "passed", ""),
        (Attention, "v", "norm-missing", "attention has a RMSNorm of values."),
        (Attention, "q k v", "norm-missing", "attention has a RMSNorm of queries, keys and values."),
        (Attention, "k", "norm-missing", "attention has a RMSNorm of keys."),
        (Attention, "all heads", "norm-missing", "attention has a RMSNorm of queries and keys, all heads at once."),
        (Normed, "", "passed", ""),
        (Normed, "v", "norm-missing", "attention has a RMSNorm of values."),
        (Normed, "keys' norm", "norm-missing", "in the port, they go through the norm of the keys."),
    ],
)
def test_a_norm_of_the_port_alone_is_told_by_what_it_is_of(module, mistake, title, phrase, precision):
    tells_only(twins(module, dict(mistake=mistake), normal((2, 16, WIDTH)), precision), title, phrase)


def test_a_last_norm_that_is_left_out_is_told_and_not_only_that_its_weight_gets_no_gradient():
    tells(decoders(Options(), "bf16", final_norm=False), "norm-missing")


@in_turn(
    ("normed", "title", "phrase"),
    [
        (1, "post-norm", "it is after each 2nd sum."),
        (2, "post-norm", "it is after each 2nd sum, and once more at the end."),
        (0, "passed", ""),
    ],
)
def test_a_last_norm_that_is_after_each_layer_is_told(normed, title, phrase, precision):
    tells_only(decoders(Options(layers=2, loss=False), precision, normed=normed), title, phrase)


# Norms after sums, as in the original transformer, and norms of branches, as in OLMo 2, each in the other's place.

WIDE = 112


class Block(nn.Module):
    def __init__(self, linear: Any, norm: Any, where: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)
        self.mix, self.up, self.down = linear(HIDDEN, HIDDEN), linear(HIDDEN, WIDE), linear(WIDE, HIDDEN)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            x = x + self.mix(self.norm1(x))
            return x + self.down(self.up(self.norm2(x)).relu())
        x = self.norm1(x + self.mix(x))
        return self.norm2(x + self.down(self.up(x).relu()))


class OfBranches(Block):
    """Norm each branch's result, as in OLMo 2; a port may put the norm ``before`` the branch, or after the ``sum``."""

    def __init__(self, linear: Any, norm: Any, where: str) -> None:
        super().__init__(linear, norm, where)

    def forward(self, x: Tensor) -> Tensor:
        if self.where != "branch":
            return super().forward(x)
        x = x + self.norm1(self.mix(x))
        return x + self.norm2(self.down(self.up(x).relu()))


@in_turn(
    ("module", "right", "where", "norm", "title", "phrase"),
    [
        (Block, "sum", "before", "LayerNorm", "post-norm", "it is before the branch"),
        (Block, "sum", "sum", "LayerNorm", "passed", ""),
        (OfBranches, "branch", "before", "RMSNorm", "post-norm", "each norm is before its branch"),
        (OfBranches, "branch", "sum", "RMSNorm", "post-norm", "each norm is after the sum"),
        (OfBranches, "branch", "branch", "RMSNorm", "passed", ""),
    ],
)
def test_norms_that_come_before_branches_or_after_sums_are_told(module, right, where, norm, title, phrase, precision):
    result = compared(
        lambda: module(nn.Linear, getattr(nn, norm), right),
        lambda te: module(te.Linear, getattr(te, norm), where),
        normal((TOKENS, HIDDEN)),
        precision,
    )
    tells_only(result, title, phrase)


# Norms of embeddings, and norms of tokens before pooling.


class Pooled(nn.Module):
    """Norm tokens, add a learned number, and pool them; a port may lack a norm."""

    def __init__(self, linear: Any, norm: Any, mistake: str = "") -> None:
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


@in_turn(
    ("right", "mistake", "title", "phrase"),
    [
        ("", "", "passed", ""),
        ("", "pooled", "post-norm", "the port norms only those that are picked, or their average"),
        ("pooled", "", "post-norm", "the port norms each of them"),
        ("", "unnormed", "norm-missing", "norm1"),
    ],
)
def test_norms_of_embeddings_and_before_pooling_are_told(right, mistake, title, phrase, precision):
    result = compared(
        lambda: Pooled(nn.Linear, nn.LayerNorm, right),
        lambda te: Pooled(te.Linear, te.LayerNorm, mistake),
        normal((2, TOKENS, HIDDEN)),
        precision,
    )
    tells(result, title, phrase)


def test_pytorchs_encoder_layer_ported_to_tes_layer_without_moving_its_norms_is_told():
    attention, mlp = "self_attention.", "layernorm_mlp."
    options = dict(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="no_mask",
        activation="relu",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        attn_input_format="bshd",
    )
    names = {
        "self_attn.in_proj_": f"{attention}layernorm_qkv.",
        "self_attn.out_proj.": f"{attention}proj.",
        "norm1.": f"{attention}layernorm_qkv.layer_norm_",
        "norm2.": f"{mlp}layer_norm_",
        "linear1.": f"{mlp}fc1_",
        "linear2.": f"{mlp}fc2_",
    }
    result = compared(
        lambda: nn.TransformerEncoderLayer(HIDDEN, 3, WIDE, dropout=0.0, batch_first=True),  # norm_first=False
        lambda te: te.TransformerLayer(HIDDEN, WIDE, 3, **options),
        normal((2, TOKENS, HIDDEN)),
        weights={left + kind: right + kind for kind in ("weight", "bias") for left, right in names.items()},
    )
    tells_only(result, "post-norm", "put each norm after the sum")
