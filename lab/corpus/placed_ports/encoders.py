"""Encoders: like BERT, with padded sentences and norms of sums, and a vision transformer with a class token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.placed import (
    MLP,
    NOWHERE,
    At,
    build_layers,
    exchange,
    map_layers,
    merge_heads,
    place,
    scale_weights,
    split_heads,
)
from lab.corpus.small import Host
from parity.case.case import Rng
from parity.case.weight_map import rearrange, reorder

WIDTH, HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 16, 128, 3

# BERT, which returns the words of its sentences and a pooled first token.

VOCABULARY, BATCH, SEQ = 96, 4, 24


class BertAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), HEAD_DIM) for proj in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / HEAD_DIM**0.5
        scores = scores + (1.0 - keep[:, None, None].to(scores.dtype)) * -10_000.0
        return self.dense(merge_heads(torch.matmul(scores.softmax(dim=-1), v)))


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.attn_norm = BertAttention(), nn.LayerNorm(WIDTH, eps=1e-12)
        self.intermediate, self.output = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)
        self.output_norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.attn_norm(self.attn(x, keep) + x)
        return self.output_norm(self.output(F.gelu(self.intermediate(x))) + x)


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.types = (nn.Embedding(rows, WIDTH) for rows in (VOCABULARY, 32, 2))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer() for _ in range(LAYERS))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        scale_weights(self)

    def forward(self, ids: Tensor, types: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.types(types) + self.positions(places))
        for layer in self.layers:
            x = layer(x, keep)
        return x * keep[..., None], torch.tanh(self.pooler(x[:, 0]))


class TEBertLayer(nn.Module):
    def __init__(
        self,
        te: Any,
        eps: float = 1e-12,
        mask: str = "padding",
        adds_to: str = "input",
        mlp_residual: Any = lambda x: x,
    ) -> None:
        super().__init__()
        self.mask, self.adds_to, self.mlp_residual = mask, adds_to, mlp_residual
        self.attn = te.MultiheadAttention(
            WIDTH, HEADS, attention_dropout=0.0, attn_mask_type=mask, input_layernorm=False, qkv_format="bshd"
        )
        self.attn_norm = te.LayerNorm(WIDTH, eps=1e-12)
        self.up, self.down, self.mlp_norm = te.Linear(WIDTH, FFN), te.Linear(FFN, WIDTH), te.LayerNorm(WIDTH, eps=eps)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        attended = self.attn(x, attention_mask=padding if self.mask == "padding" else None)
        x = self.attn_norm(attended) + x if self.adds_to == "norm" else self.attn_norm(attended + x)
        return self.mlp_norm(self.down(F.gelu(self.up(x))) + self.mlp_residual(x))


class TEBert(nn.Module):
    def __init__(self, te: Any, at: At = NOWHERE, pooled: int = 0, first_position: int = 0, **options: Any) -> None:
        super().__init__()
        self.pooled, self.first_position = pooled, first_position
        self.words, self.positions, self.types = (nn.Embedding(rows, WIDTH) for rows in (VOCABULARY, 32, 2))
        self.norm = te.LayerNorm(WIDTH, eps=1e-12)
        self.layers = build_layers(LAYERS, partial(TEBertLayer, te), at, options)
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, types: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        seq = ids.shape[1]
        x = self.words(ids) + self.types(types) + self.positions.weight[self.first_position :][:seq]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, ~keep[:, None, None])
        return x * keep[..., None], torch.tanh(self.pooler(x[:, self.pooled]))


def draw_sentences(rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, token types, and whether a token is kept, all ``[batch, seq]``."""
    lengths = rng.integers(BATCH, 1, low=SEQ // 2, high=SEQ)
    places = torch.arange(SEQ)
    return rng.integers(BATCH, SEQ, high=VOCABULARY), (places > lengths // 2).long(), places < lengths


BERT_LAYER: dict[Any, Any] = {
    f"{ours}.{kind}": f"{theirs}{separator}{kind}"
    for ours, theirs, separator in (
        *((f"attn.{name}", f"attn.qkv.{name}", "_") for name in ("query", "key", "value")),
        ("attn.dense", "attn.proj", "."),
        ("attn_norm", "attn_norm", "."),
        ("intermediate", "up", "."),
        ("output", "down", "."),
        ("output_norm", "mlp_norm", "."),
    )
    for kind in ("weight", "bias")
}
BERT_OWN = {
    name: name
    for name in (
        "words.weight",
        "positions.weight",
        "types.weight",
        "norm.weight",
        "norm.bias",
        "pooler.weight",
        "pooler.bias",
    )
}
BERT = Host("placed_bert", Bert, TEBert, draw_sentences, weights=BERT_OWN | map_layers(BERT_LAYER, LAYERS))


# A vision transformer: 15 patches and a class token. Its port has TE's layers between a linear layer of PyTorch for the
# convolution and one for the classes, whose rows are too few for FP8.

PATCH, CLASSES = 4, 48


class VitAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(proj(x), HEAD_DIM) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class VitLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn, self.mlp = VitAttention(), MLP(WIDTH, FFN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.cls, self.positions = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 16, WIDTH))
        self.layers = nn.ModuleList(VitLayer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)
        scale_weights(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class TEVit(nn.Module):
    def __init__(
        self,
        te: Any,
        at: At = NOWHERE,
        cls_has_position: bool = True,
        normed: bool = True,
        positions: Any = lambda table: table,
        **options: Any,
    ) -> None:
        super().__init__()
        usual = dict(
            layernorm_epsilon=1e-6,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="no_mask",
            attn_input_format="bshd",
        )
        self.cls_has_position, self.normed, self.read_positions = cls_has_position, normed, positions
        self.patch = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.layers = build_layers(LAYERS, partial(te.TransformerLayer, WIDTH, FFN, HEADS), at, usual | options)
        self.norm, self.head = te.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(F.unfold(images, PATCH, stride=PATCH).transpose(1, 2))
        positions, cls = self.read_positions(self.positions), self.cls.expand(len(x), -1, -1)
        if self.cls_has_position:
            x = torch.cat((cls, x), dim=1) + positions
        else:
            x = torch.cat((cls, x + positions[:, :-1]), dim=1)
        for layer in self.layers:
            x = layer(x)
        x = x[:, 0]
        return self.head(self.norm(x) if self.normed else x)


def map_vit_layer(q_heads: tuple[int, ...] = (0, 1, 2, 3)) -> dict[Any, Any]:
    """Return a layer's map, with the heads of queries in some order."""
    layer: dict[Any, Any] = {}
    for kind in ("weight", "bias"):
        layer |= {
            f"attn.{name[0]}_proj.{kind}": f"self_attention.layernorm_qkv.{name}_{kind}" for name in ("key", "value")
        }
        query = f"attn.q_proj.{kind}"
        layer[query if q_heads == (0, 1, 2, 3) else reorder(query, q_heads)] = (
            f"self_attention.layernorm_qkv.query_{kind}"
        )
        layer[f"norm1.{kind}"] = f"self_attention.layernorm_qkv.layer_norm_{kind}"
        layer[f"attn.out_proj.{kind}"] = f"self_attention.proj.{kind}"
        layer[f"norm2.{kind}"] = f"layernorm_mlp.layer_norm_{kind}"
        layer |= {f"mlp.fc{number}.{kind}": f"layernorm_mlp.fc{number}_{kind}" for number in (1, 2)}
    return layer


def map_vit(pixels: str = "(c h w)", at: Any = NOWHERE) -> dict[Any, Any]:
    """Return the map, with the pixels of a patch in some order."""
    own = ("patch.bias", "cls", "positions", "norm.weight", "norm.bias", "head.weight", "head.bias")
    return {
        **{name: name for name in own},
        rearrange("patch.weight", f"out c h w -> out {pixels}"): "patch.weight",
        **map_layers(map_vit_layer(), LAYERS, at),
    }


VIT = Host("placed_vit", Vit, TEVit, lambda rng: rng.normal(2, 3, 3 * PATCH, 5 * PATCH), weights=map_vit())
QUERY, KEY = (tuple(f"attn.{name}.{kind}" for kind in ("weight", "bias")) for name in ("query", "key"))
EXCHANGED = exchange(exchange(BERT_LAYER, QUERY[0], KEY[0]), QUERY[1], KEY[1])

PORTS = (
    place(BERT, "eps of Keras in one norm", "norm-eps", "layers.{i}.output_norm", "layer_norm", 1, eps=1e-3),
    place(BERT, "one layer sees padding", "padding-mask", "layers.{i}.attn", "add mul", 2, mask="no_mask"),
    place(BERT, "residual of one layer after the norm", ("residual-placement", "post-norm"), "layers.{i}(|.attn_norm)",
          "add layer_norm", 0, adds_to="norm"),
    place(BERT, "last token pooled", "operation", "(|pooler)", "getitem linear", pooled=-1),
    place(BERT, "queries and keys of one layer exchanged", ("query-key-swapped", "parameters-exchanged"),
          "layers.{i}.attn.(query|key)", "linear", 1,
          weights=BERT_OWN | map_layers(BERT_LAYER, LAYERS, {1: EXCHANGED})),
    place(BERT, "positions begin at 2", "embedding-position", "(|positions)", "arange embedding add", first_position=2),
    place(BERT, "residual of one MLP detached", "gradient-path-missing", "layers.{i}", "add", 1, backward=True,
          mlp_residual=Tensor.detach),
    place(VIT, "no position for the class token", "embedding-position", "", "cat add", cls_has_position=False),
    place(VIT, "colours of a patch last", ("weights-not-as-mapped", "operation"), "patch", "conv2d",
          weights=map_vit("(h w c)")),
    place(VIT, "one layer causal", "mask", "layers.{i}.attn", "scaled_dot_product_attention", 1,
          self_attn_mask_type="causal"),
    place(VIT, "heads of queries in another order in one layer", "heads-permuted", "layers.{i}.attn(|.q_proj)",
          "linear scaled_dot_product_attention", 0, weights=map_vit(at={0: map_vit_layer((1, 2, 3, 0))})),
    place(VIT, "class token not normed", "norm-missing", "norm", "layer_norm", normed=False),
    place(VIT, "positions not trained", "gradient-path-missing", "", "add", backward=True, positions=Tensor.detach),
)  # fmt: skip
