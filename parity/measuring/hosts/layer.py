"""Whole layers, mixtures of experts, and a language model of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from parity import reference
from parity.case import weight_map
from parity.case.case import Pair, Rng
from parity.case.weight_map import Side, WeightMap, copies, stack, under
from parity.measuring.hosts.host import UNQUANTIZED, construct, host
from parity.reference import LlamaLayer

# Whole transformer layers.


SMALL_LAYER = dict(batch=2, seq=32, hidden=64, ffn=128, heads=4)
LARGE_LAYER = dict(batch=2, seq=128, hidden=256, ffn=512, heads=8)

GPT_WEIGHTS: WeightMap = {
    f"{left}.{kind}": f"{right}_{kind}" if separator else f"{right}.{kind}"
    for kind in ("weight", "bias")
    for left, right, separator in (
        ("attention_norm", "self_attention.layernorm_qkv.layer_norm", True),
        ("attention.q_proj", "self_attention.layernorm_qkv.query", True),
        ("attention.k_proj", "self_attention.layernorm_qkv.key", True),
        ("attention.v_proj", "self_attention.layernorm_qkv.value", True),
        ("attention.o_proj", "self_attention.proj", False),
        ("mlp.norm", "layernorm_mlp.layer_norm", True),
        ("mlp.up_proj", "layernorm_mlp.fc1", True),
        ("mlp.down_proj", "layernorm_mlp.fc2", True),
    )
}
LLAMA_WEIGHTS: WeightMap = {
    "attention_norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "attention.q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "attention.k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "attention.v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "attention.o_proj.weight": "self_attention.proj.weight",
    "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
    stack("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
    "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}
PARALLEL_WEIGHTS: WeightMap = {
    **{left: right for left, right in GPT_WEIGHTS.items() if str(left).startswith("attention.")},
    **{
        f"norm.{kind}": copies(f"self_attention.layernorm_qkv.layer_norm_{kind}", f"layernorm_mlp.layer_norm_{kind}")
        for kind in ("weight", "bias")
    },
    **{f"up_proj.{kind}": f"layernorm_mlp.fc1_{kind}" for kind in ("weight", "bias")},
    **{f"down_proj.{kind}": f"layernorm_mlp.fc2_{kind}" for kind in ("weight", "bias")},
}


class ParallelLayer(nn.Module):
    """Attention and MLP in parallel, which read the same norm, as in GPT-J."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = reference.Attention(hidden, heads, heads, bias=True, rope=False)
        self.up_proj, self.down_proj = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same."""
        normed = self.norm(x)
        return x + self.attention(normed) + self.down_proj(F.gelu(self.up_proj(normed), approximate="tanh"))


@host("gpt_layer", SMALL_LAYER, LARGE_LAYER)
def gpt_layer(te: ModuleType, hidden: int, ffn: int, heads: int, **_: Any) -> Pair:
    return Pair(
        reference=reference.GPTLayer(hidden, ffn, heads),
        candidate=_te_layer(te, hidden, ffn, heads),
        weights=GPT_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("parallel_layer", SMALL_LAYER, LARGE_LAYER)
def parallel_layer(te: ModuleType, hidden: int, ffn: int, heads: int, **_: Any) -> Pair:
    return Pair(
        reference=ParallelLayer(hidden, ffn, heads),
        candidate=_te_layer(te, hidden, ffn, heads, parallel_attention_mlp=True),
        weights=PARALLEL_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
    )


@host("llama_layer", SMALL_LAYER | dict(groups=2), LARGE_LAYER | dict(groups=2))
def llama_layer(te: ModuleType, hidden: int, ffn: int, heads: int, groups: int, **_: Any) -> Pair:
    rope = te.RotaryPositionEmbedding(hidden // heads)

    def call_candidate(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, rotary_pos_emb=rope(x.shape[1]))

    return Pair(
        reference=reference.LlamaLayer(hidden, ffn, heads, groups),
        candidate=te_llama_layer(te, hidden, ffn, heads, groups),
        weights=LLAMA_WEIGHTS,
        inputs=lambda rng, batch, seq: rng.normal(batch, seq, hidden),
        call_candidate=call_candidate,
    )


def te_llama_layer(te: ModuleType, hidden: int, ffn: int, heads: int, groups: int) -> nn.Module:
    """Return TE's layer in Llama's form, batch first, without dropout. RoPE is passed in its call."""
    return _te_layer(
        te, hidden, ffn, heads, num_gqa_groups=groups, normalization="RMSNorm", activation="swiglu", bias=False
    )


def _te_layer(te: ModuleType, hidden: int, ffn: int, heads: int, **others: Any) -> nn.Module:
    no_dropout = dict(hidden_dropout=0.0, attention_dropout=0.0)
    return construct(te.TransformerLayer, hidden, ffn, heads, attn_input_format="bshd", **no_dropout, **others)


# A mixture of SwiGLU experts.


SMALL_MIXTURE = dict(tokens=64, hidden=64, ffn=96, experts=4)
LARGE_MIXTURE = dict(tokens=256, hidden=256, ffn=384, experts=8)
CHOSEN = 2
Route = Callable[[Tensor, int], tuple[Tensor, Tensor]]
# Standard deviation of the router's weights. With PyTorch's initial ones, all experts would weigh about the same.
ROUTER_STD = 1.0


class Mixture(nn.Module):
    """Experts with stacked parameters. A token is sent to two of them, whose shares sum to 1, as in Mixtral."""

    def __init__(self, hidden: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        nn.init.normal_(self.router.weight, std=ROUTER_STD)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, hidden).normal_(std=hidden**-0.5))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn).normal_(std=ffn**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[tokens, hidden]`` to the same."""
        shares, chosen = route(self.router(x), CHOSEN)
        result = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(x[token], gate_up).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, down)
            result = result.index_add(0, token, y * shares[token, place, None])
        return result


class TEMixture(nn.Module):
    """``Mixture`` with TE's grouped layers and permutation.

    Attributes:
        weights_of: maps the router's logits ``[tokens, experts]`` to weights and experts ``[tokens, chosen]``.
    """

    def __init__(self, te: ModuleType, hidden: int, ffn: int, experts: int, chosen: int = CHOSEN) -> None:
        super().__init__()
        self.te, self.experts, self.chosen = te, experts, chosen
        self.router = nn.Linear(hidden, experts, bias=False)
        self.fc1 = te.GroupedLinear(experts, hidden, 2 * ffn, bias=False)
        self.fc2 = te.GroupedLinear(experts, ffn, hidden, bias=False)
        self.weights_of: Route = route

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[tokens, hidden]`` to the same."""
        shares, chosen = self.weights_of(self.router(x), self.chosen)
        rows, places = self.te.moe_permute(x, chosen.int(), num_out_tokens=chosen.numel(), map_type="index")
        splits = torch.bincount(chosen.flatten(), minlength=self.experts).tolist()
        gate, up = self.fc1(rows, splits).chunk(2, dim=-1)
        y = self.fc2(F.silu(gate) * up, splits)
        return self.te.moe_unpermute(y, places, shares.float(), map_type="index")


def route(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Return the largest weights of the softmax, divided by their sum, and their experts."""
    shares, experts = logits.softmax(dim=-1).topk(chosen, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True), experts


@host("mixture", SMALL_MIXTURE, LARGE_MIXTURE, precisions=UNQUANTIZED)
def mixture(te: ModuleType, hidden: int, ffn: int, experts: int, **_: Any) -> Pair:
    """Pair mixtures, without FP8, which would need as many tokens for each expert as its kernels' tiles hold."""
    return Pair(
        reference=Mixture(hidden, ffn, experts),
        candidate=construct(TEMixture, te, hidden, ffn, experts),
        weights=weights_in(range(experts)),
        inputs=lambda rng, tokens: rng.normal(tokens, hidden),
    )


def weights_in(order: Iterable[int]) -> weight_map.WeightMap:
    """Return the map that fills TE's experts in this order."""
    order = list(order)
    return {
        "router.weight": "router.weight",
        "gate_up": weight_map.experts(*(f"fc1.weight{expert}" for expert in order)),
        "down": weight_map.experts(*(f"fc2.weight{expert}" for expert in order)),
    }


# A language model of one Llama layer with tied embeddings, returning logits or a loss.


SMALL_MODEL = dict(batch=2, seq=32, vocabulary=96, hidden=64, ffn=128, heads=4, groups=2)
LARGE_MODEL = dict(batch=2, seq=128, vocabulary=256, hidden=256, ffn=512, heads=8, groups=2)
EMBEDDING_STD = 0.5
# The label of tokens that do not count, as in ``F.cross_entropy``.
IGNORED = -100


class Model(nn.Module):
    """Embeddings, a layer, a norm, and the embeddings again as the output projection."""

    def __init__(self, vocabulary: int, hidden: int, ffn: int, heads: int, groups: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.tokens.weight, std=EMBEDDING_STD)
        self.layer = LlamaLayer(hidden, ffn, heads, groups)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``."""
        return F.linear(self.norm(self.layer(self.tokens(tokens))), self.tokens.weight)


class TEModel(nn.Module):
    """``Model`` built of TE's modules.

    Attributes:
        frequencies: maps a length to RoPE's phases, ``[length, 1, 1, head_dim]``, FP32. It is not a submodule, so that
            casting the model does not round the frequencies, as it did in TransformerEngine issue 1245.
        tie: maps the embeddings to the output projection's weight.
        final_norm: maps the last layer's output to the output projection's input.
    """

    def __init__(self, te: ModuleType, vocabulary: int, hidden: int, ffn: int, heads: int, groups: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.frequencies = partial(te.RotaryPositionEmbedding(hidden // heads))
        self.layer = te_llama_layer(te, hidden, ffn, heads, groups)
        self.norm = te.RMSNorm(hidden)
        self.head = te.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.tie: Callable[[Tensor], Tensor] = lambda weight: weight
        self.final_norm: Callable[[Tensor], Tensor] = lambda x: self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Take and return what ``Model`` does."""
        x = self.layer(self.tokens(tokens), rotary_pos_emb=self.frequencies(tokens.shape[1]))
        return functional_call(self.head, {"weight": self.tie(self.tokens.weight)}, (self.final_norm(x),))


class WithLoss(nn.Module):
    """A model whose output is its loss, ``[1]``.

    Attributes:
        reduce: reduces the losses of the tokens that count, ``[batch, seq]`` with 0 elsewhere, and a mask of these
            tokens to a number.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.reduce = mean_of_counted

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Take tokens and labels, both ``[batch, seq]``. Labels that are ``IGNORED`` do not count."""
        logits = self.model(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return self.reduce(losses.view(labels.shape), labels != IGNORED).view(1)


def mean_of_counted(losses: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over the tokens that count."""
    return losses.sum() / counts.sum()


@host("tied_model", SMALL_MODEL, LARGE_MODEL)
def tied_model(te: ModuleType, vocabulary: int, hidden: int, ffn: int, heads: int, groups: int, **_: Any) -> Pair:
    return Pair(
        reference=Model(vocabulary, hidden, ffn, heads, groups),
        candidate=TEModel(te, vocabulary, hidden, ffn, heads, groups),
        weights=_map_weights(""),
        inputs=lambda rng, batch, seq: rng.integers(batch, seq, high=vocabulary),
    )


@host("model_with_loss", SMALL_MODEL, LARGE_MODEL)
def model_with_loss(te: ModuleType, vocabulary: int, hidden: int, ffn: int, heads: int, groups: int, **_: Any) -> Pair:
    def inputs(rng: Rng, batch: int, seq: int) -> tuple[Tensor, Tensor]:
        labels = rng.integers(batch, seq, high=vocabulary)
        lengths = torch.arange(1, batch + 1)[:, None] * seq // (batch + 1)
        return rng.integers(batch, seq, high=vocabulary), labels.masked_fill(torch.arange(seq) >= lengths, IGNORED)

    return Pair(
        reference=WithLoss(Model(vocabulary, hidden, ffn, heads, groups)),
        candidate=WithLoss(TEModel(te, vocabulary, hidden, ffn, heads, groups)),
        weights=_map_weights("model."),
        inputs=inputs,
    )


def _map_weights(prefix: str) -> dict[Side, Side]:
    """Return the weight map of a model whose parameters' names begin with a prefix."""
    return under(
        {**under(LLAMA_WEIGHTS, "layer."), "tokens.weight": "tokens.weight", "norm.weight": "norm.weight"}, prefix
    )


HOSTS = (
    gpt_layer,
    parallel_layer,
    llama_layer,
    mixture,
    tied_model,
    model_with_loss,
)
