"""Blocks: parallel branches and their norms, TE's layers and their options, pooling, token types, layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.port import Port
from lab.corpus.small import Host, normal
from parity import reference
from parity.case.weight_map import constant, copies, stack, under
from parity.reference import CoreAttention, rotate_halves, rotate_interleaved

HIDDEN, FFN, HEADS = 64, 128, 4

# An encoder whose blocks compute attention and MLP in parallel.

SEQ, BATCH = 12, 4


class Block(nn.Module):
    """Attention and MLP in parallel, behind one norm or two; ``how`` is the port's mistake."""

    def __init__(self, linear: Any, norm: Any, two: bool, how: str) -> None:
        super().__init__()
        self.how, self.two = how, two
        self.norm1 = norm(HIDDEN)
        if two:
            self.norm2 = norm(HIDDEN)
        self.qkv, self.out = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.up, self.down = linear(HIDDEN, 2 * HIDDEN), linear(2 * HIDDEN, HIDDEN)
        nn.init.normal_(self.qkv.bias, std=0.5)

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.how == "no bias of queries":
            qkv = qkv - torch.cat((self.qkv.bias[:HIDDEN], torch.zeros_like(self.qkv.bias[HIDDEN:])))
        x = x.transpose(0, 1) if self.how == "sequence first" else x
        qkv = qkv.transpose(0, 1) if self.how == "sequence first" else qkv
        heads = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in qkv.chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.out(y.transpose(0, 1) if self.how == "sequence first" else y)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        other = self.norm2 if self.two else self.norm1
        read = {"in sequence": None, "no norm": x}.get(self.how, other(x) if self.two else normed)
        attended = self.attention(normed)
        if self.how == "halved in sequence":
            x = x + 0.5 * attended
            return x + 0.5 * self.down(F.gelu(self.up(other(x)), approximate="tanh"))
        read = other(x + attended) if read is None else read
        y = self.down(F.gelu(self.up(read), approximate="tanh"))
        if self.how == "halved":
            return x + 0.5 * (attended + y)
        return x + attended + y


class Encoder(nn.Module):
    """Embeddings of tokens and their types, blocks, and a classifier on the first token."""

    def __init__(self, linear: Any, norm: Any, how: tuple[str, ...], two: bool, normed: bool = True) -> None:
        super().__init__()
        self.how = how[0]
        self.tokens, self.types = nn.Embedding(48, HIDDEN), nn.Embedding(2, HIDDEN)
        self.layers = nn.ModuleList(Block(linear, norm, two, one) for one in how)
        self.norm = norm(HIDDEN) if normed else nn.Identity()
        self.head = linear(HIDDEN, 32)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        x = self.tokens(ids) + self.types(torch.zeros_like(types) if self.how == "no types" else types)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x[:, 1:].mean(1) if self.how == "mean of others" else x[:, 0])


def encoder(name: str, *how: str, two: bool = False, **settings: Any) -> Host:
    """Return the host of an encoder with a block for each of ``how``."""
    return Host(
        name,
        lambda **given: Encoder(nn.Linear, lambda width: nn.LayerNorm(width, eps=1e-5), **given),
        lambda te, **given: Encoder(te.Linear, te.LayerNorm, **given),
        lambda rng: (rng.integers(BATCH, SEQ, high=48), rng.integers(BATCH, SEQ, high=2)),
        dict(how=how, two=two, **settings),
    )


ENCODER, OF_TWO = encoder("parallel_encoder", ""), encoder("parallel_encoder_of_two_blocks", "", "")
WITH_TWO_NORMS = encoder("parallel_encoder_with_two_norms", "", two=True)
OF_TWO_WITH_TWO_NORMS = encoder("parallel_encoder_of_two_blocks_with_two_norms", "", "", two=True)
NOT_NORMED = encoder("parallel_encoder_without_a_last_norm", "", normed=False)
HALVED = encoder("parallel_encoder_of_halved_branches", "halved", two=True)


# Layers whose attention and MLP read the same norm in parallel, against TE's, which have a norm for each.

ATTENTION, MLP = "self_attention.layernorm_qkv.", "layernorm_mlp."


class Parallel(nn.Module):
    """A layer like GPT-J's, with its sum in either order; the MLP may have a norm of its own, as in GPT-NeoX."""

    def __init__(self, stream_first: bool = True, own_norm: bool = False) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(HIDDEN)
        self.ln_2 = nn.LayerNorm(HIDDEN) if own_norm else None
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.fc_in, self.fc_out = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.stream_first = stream_first

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.branches(x)
        return x + attention + mlp if self.stream_first else attention + mlp + x

    def branches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.ln_1(x)
        projected = (projection(normed) for projection in (self.q_proj, self.k_proj, self.v_proj))
        heads = (x.unflatten(-1, (HEADS, -1)) for x in projected)
        attention = self.out_proj(CoreAttention(causal=True)(*heads))
        hidden = self.fc_in(normed if self.ln_2 is None else self.ln_2(x))
        return attention, self.fc_out(F.gelu(hidden, approximate="tanh"))


class InPlace(Parallel):
    """A layer like Falcon's, which adds one branch to the other in place and then applies a dropout of 0."""

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.branches(x)
        mlp += attention
        return x + F.dropout(mlp, 0.0, self.training)


class Disturbed(nn.Module):
    """Another mistake, of a thousandth of the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 2e-3 * torch.sin(7.0 * x)


def map_parallel(own_norm: bool, layers: int = 1) -> dict[Any, Any]:
    """Return the map of some layers. Their norm fills both of TE's if the MLP has none of its own."""
    entries: dict[Any, Any] = {}
    for kind in ("weight", "bias"):
        norms = f"{ATTENTION}layer_norm_{kind}", f"{MLP}layer_norm_{kind}"
        entries |= dict(zip((f"ln_1.{kind}", f"ln_2.{kind}"), norms, strict=True)) if own_norm else {}
        entries |= {} if own_norm else {f"ln_1.{kind}": copies(*norms)}
        entries |= {f"{name[0]}_proj.{kind}": f"{ATTENTION}{name}_{kind}" for name in ("query", "key", "value")}
        entries[f"out_proj.{kind}"] = f"self_attention.proj.{kind}"
        entries |= {f"fc_in.{kind}": f"{MLP}fc1_{kind}", f"fc_out.{kind}": f"{MLP}fc2_{kind}"}
    return {left: right for i in range(layers) for left, right in under(entries, f"{i}.").items()}


def build_te_layers(te: Any, layers: int = 1, parallel: bool = True, disturbed: bool = False) -> nn.Module:
    options = dict(hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")
    options["parallel_attention_mlp"] = parallel
    more = [Disturbed()] if disturbed else []
    return nn.Sequential(*(te.TransformerLayer(HIDDEN, FFN, HEADS, **options) for _ in range(layers)), *more)


def parallel_layers(
    name: str, layer: Callable[..., Parallel] = Parallel, layers: int = 1, own_norm: bool = False, **options: bool
) -> Host:
    return Host(
        name,
        lambda: nn.Sequential(*(layer(own_norm=own_norm, **options) for _ in range(layers))),
        lambda te, **settings: build_te_layers(te, layers, **settings),
        normal((2, 24, HIDDEN)),
        weights=map_parallel(own_norm, layers),
    )


PARALLEL = parallel_layers("parallel_layer")
WITH_OWN_NORM = parallel_layers("parallel_layer_with_a_norm_of_the_MLP", own_norm=True)
STREAM_LAST = parallel_layers("parallel_layers_that_add_the_stream_last", layers=2, stream_first=False)
IN_PLACE = parallel_layers("parallel_layers_that_add_in_place", InPlace, 2, own_norm=True)


# Two of TE's layers, which normalise queries and keys, with an option that the reference does not have.

HEAD_DIM = HIDDEN // HEADS
FREQUENCIES = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)


class QwenLayer(nn.Module):
    """Llama's layer with norms of queries and keys before the rotation, as in Qwen3, or after it, as in Llama 4."""

    def __init__(self, norm_first: bool = True, interleaved: bool = False) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.rotate = rotate_interleaved if interleaved else rotate_halves
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD_DIM, eps=1e-6) for _ in range(2))
        self.attention = reference.CoreAttention(causal=True)
        self.mlp = reference.SwiGLUMLP(HIDDEN, FFN, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (
            projection(normed).unflatten(-1, (HEADS, HEAD_DIM))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (self._place(y, norm) for y, norm in ((query, self.q_norm), (key, self.k_norm)))
        x = x + self.o_proj(self.attention(query, key, value))
        return x + self.mlp(x)

    def _place(self, x: Tensor, norm: nn.Module) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * FREQUENCIES.to(x.dtype)
        return self.rotate(norm(x), angles) if self.norm_first else norm(self.rotate(x, angles))


class TELayers(nn.Module):
    """TE's layers with their rotary embedding, which is cast with the port where it is a submodule."""

    def __init__(self, te: Any, norm_first: bool, interleaved: bool, cast: bool = False, **options: Any) -> None:
        super().__init__()
        usual = dict(
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            layernorm_epsilon=1e-6,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="bshd",
            qk_norm_type="RMSNorm",
            qk_norm_eps=1e-6,
            qk_norm_before_rope=norm_first,
            rotary_pos_interleaved=interleaved,
        )
        embedding = te.RotaryPositionEmbedding(HEAD_DIM, interleaved=options.pop("of_embedding", interleaved))
        if cast:
            self.rope = embedding
        self.embed: Callable[[int], Tensor] = lambda length: embedding(length)
        self.layers = nn.ModuleList(te.TransformerLayer(HIDDEN, FFN, HEADS, **(usual | options)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.embed(x.shape[1]))
        return x


QWEN_WEIGHTS = {
    "norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "q_proj.weight": "self_attention.layernorm_qkv.query_weight",
    "k_proj.weight": "self_attention.layernorm_qkv.key_weight",
    "v_proj.weight": "self_attention.layernorm_qkv.value_weight",
    "q_norm.weight": "self_attention.q_norm.weight",
    "k_norm.weight": "self_attention.k_norm.weight",
    "o_proj.weight": "self_attention.proj.weight",
    "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"): "layernorm_mlp.fc1_weight",
    "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
}


def map_qwen(*exchanged: str) -> dict[Any, Any]:
    """Return the map of both layers, with the TE parameters of two entries exchanged in each."""

    def left(side: Any, layer: int) -> Any:
        return stack(*(f"{layer}.{name}" for name in side)) if isinstance(side, tuple) else f"{layer}.{side}"

    other: dict[Any, Any] = dict(zip(exchanged, exchanged[::-1], strict=True))
    return {
        left(side, layer): f"layers.{layer}.{QWEN_WEIGHTS[other.get(side, side)]}"
        for layer in (0, 1)
        for side in QWEN_WEIGHTS
    }


def qwen(
    name: str,
    seq: int = 32,
    norm_first: bool = True,
    interleaved: bool = False,
    precisions: tuple[str, ...] = ("fp32",),
) -> Host:
    return Host(
        name,
        lambda **right: nn.Sequential(*(QwenLayer(**right) for _ in range(2))),
        TELayers,
        normal((1 if seq > 32 else 2, seq, HIDDEN)),
        dict(norm_first=norm_first, interleaved=interleaved),
        map_qwen(),
        precisions=precisions,
    )


QWEN, LLAMA4 = qwen("qwen_layers"), qwen("llama4_layers", norm_first=False)
INTERLEAVED = qwen("qwen_layers_interleaved", interleaved=True)
LONG = qwen("qwen_layers_of_many_tokens", 96, precisions=("bf16", "fp16"))


# What models of transformers write differently: norms, factors, and masks or tables that layers are given.

ROWS = 32


class CohereNorm(nn.Module):
    """Cohere's norm, without a bias: it subtracts the mean once for the variance, and again before it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) * torch.rsqrt(variance + 1e-5))


class CohereLayer(nn.Module):
    """Attention whose model gives it the mask and the angles of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = CohereNorm(), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.qkv.weight.data *= 2

    def forward(self, x: Tensor, mask: Tensor, angles: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        query, key = (rotate(part, angles).transpose(1, 2) for part in (query, key))
        scores = query @ key.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS) + mask
        return x + self.out((scores.softmax(-1) @ value.transpose(1, 2)).transpose(1, 2).flatten(2))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = (table[:, :, None].repeat(1, 1, 1, 2) for table in (angles.cos(), angles.sin()))
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class CohereModel(nn.Module):
    """Embeddings times a number from a buffer, plus position embeddings, and one layer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.layer = nn.Embedding(ROWS, HIDDEN), nn.Embedding(16, HIDDEN), CohereLayer()
        self.positions.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(math.sqrt(HIDDEN)))

    def forward(self, ids: Tensor) -> Tensor:
        batch, seq = ids.shape
        places = torch.arange(seq, device=ids.device)
        x = self.tokens(ids) * self.scale.to(self.tokens.weight.dtype) + self.positions(places)
        mask = torch.full((seq, seq), -1e9, dtype=x.dtype, device=x.device).triu(1).expand(batch, 1, seq, seq)
        frequencies = 10_000.0 ** -(torch.arange(8, dtype=x.dtype, device=x.device) / 8)
        return self.layer(x, mask, (places[:, None] * frequencies).expand(batch, seq, 8))


class TECohereModel(nn.Module):
    def __init__(
        self,
        te: Any,
        norm: str = "LayerNorm",
        sequence_first: bool = False,
        scaled: bool = True,
        with_positions: bool = True,
    ) -> None:
        super().__init__()
        self.first, self.scaled, self.with_positions = sequence_first, scaled, with_positions
        self.tokens, self.positions = nn.Embedding(ROWS, HIDDEN), nn.Embedding(16, HIDDEN)
        self.positions.requires_grad_(False)
        self.qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, normalization=norm)
        qkv_format = "sbhd" if sequence_first else "bshd"
        self.core = te.DotProductAttention(HEADS, 16, qkv_format=qkv_format, attention_dropout=0.0)
        self.out = te.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x * math.sqrt(HIDDEN) if self.scaled else x
        x = x + self.positions.weight[: ids.shape[1]] if self.with_positions else x
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        query, key = (self.rotated(part.transpose(0, 1) if self.first else part) for part in (query, key))
        query, key = (part.transpose(0, 1) if self.first else part for part in (query, key))
        parts = (part.to(x.dtype).contiguous() for part in (query, key, value))
        return x + self.out(self.core(*parts, attn_mask_type="causal"))

    def rotated(self, x: Tensor) -> Tensor:
        frequencies = 10_000.0 ** -(torch.arange(8, dtype=torch.float32, device=x.device) / 8)
        return rotate_halves(x, torch.arange(x.shape[1], device=x.device)[:, None] * frequencies)


def map_cohere(bias: bool = True) -> dict[Any, Any]:
    """Return the map of the model; the port's norm has a bias, which is 0, or none."""
    weights: dict[Any, Any] = {f"{table}.weight": f"{table}.weight" for table in ("tokens", "positions")}
    weights |= {f"layer.{n}.{k}": f"{n}.{k}" for n in ("qkv", "out") for k in ("weight", "bias")}
    weights["layer.norm.weight"] = "qkv.layer_norm_weight"
    return weights | ({constant(0.0, HIDDEN): "qkv.layer_norm_bias"} if bias else {})


COHERE = Host(
    "cohere_model", CohereModel, TECohereModel, lambda rng: rng.integers(4, 16, high=ROWS), weights=map_cohere()
)
FACTOR = "multiply by 8, as the reference does; in all, the port multiplies by 1"

PORTS: tuple[Port, ...] = (
    *(host.right() for host in (ENCODER, WITH_TWO_NORMS, HALVED, QWEN, LLAMA4)),
    ENCODER.wrong("bias-dropped", "first third", how=("no bias of queries",)),
    ENCODER.wrong("embedding-position", "token types", how=("no types",)),
    ENCODER.wrong("operation", "mean over the others of dimension 1", how=("mean of others",)),
    OF_TWO_WITH_TWO_NORMS.wrong("parallel-block", "layers.1", how=("", "in sequence")),
    OF_TWO.wrong("norm-missing", "layers.1", how=("", "no norm")),
    OF_TWO.wrong("sequence-first", "layers.1", how=("", "sequence first")),
    # Before a norm, halved branches cannot be told from a doubled stream.
    NOT_NORMED.wrong("factor", "multiplies them by 0.5.", how=("halved",)),
    HALVED.wrong("parallel-block", how=("halved in sequence",)),
    *(host.right(precisions=("bf16", "fp8_current")) for host in (PARALLEL, WITH_OWN_NORM, STREAM_LAST, IN_PLACE)),
    *(host.wrong("parallel-block", parallel=False) for host in (PARALLEL, WITH_OWN_NORM, STREAM_LAST, IN_PLACE)),
    PARALLEL.wrong(
        "parallel-block",
        "something else is wrong as well",
        parallel=False,
        disturbed=True,
        precisions=("fp32",),
        others=True,
    ),
    QWEN.wrong("norm-order", norm_first=False),
    LLAMA4.wrong("norm-order", norm_first=True),
    QWEN.wrong("norm-eps", qk_norm_eps=1e-3),  # of queries and keys alone, far from known values
    QWEN.wrong("norm-eps", layernorm_epsilon=1e-3),  # of all other norms
    QWEN.wrong("gamma-shift", zero_centered_gamma=True),
    QWEN.wrong("parameters-exchanged", weights=map_qwen("q_norm.weight", "k_norm.weight"), name="norms exchanged"),
    QWEN.wrong("parallel-block", parallel_attention_mlp=True),
    QWEN.wrong("rope-layout", rotary_pos_interleaved=True),
    QWEN.wrong("rope-layout", interleaved=True),  # of layers and their embedding
    INTERLEAVED.wrong("rope-layout", of_embedding=False),
    LONG.right(),
    LONG.wrong("rope-precision", cast=True, precisions=("bf16",)),
    COHERE.right(precisions=("fp32", "bf16", "fp8_current")),
    COHERE.wrong("norm-kind", norm="RMSNorm", weights=map_cohere(bias=False), name="RMSNorm for LayerNorm"),
    COHERE.wrong("sequence-first", sequence_first=True),  # though layers are given masks and angles
    COHERE.wrong("factor", FACTOR, scaled=False),  # a buffer holds the reference's
    COHERE.wrong("branch-missing", "add the result of the 1st 'embedding' of positions", with_positions=False),
)
