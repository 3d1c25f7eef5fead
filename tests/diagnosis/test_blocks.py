"""Blocks: parallel branches and their norms, TE's layers and their options, pooling, token types, layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, normal, tells, tells_only
from torch import Tensor, nn

import parity
from parity import reference
from parity.reference import CoreAttention, rotate_halves, rotate_interleaved
from parity.weights.suggest.proposal import python

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

    def __init__(
        self, linear: Any, norm: Any, two: bool, how: str, normed: bool, layers: int = 1, layer: int | None = None
    ) -> None:
        super().__init__()
        self.how = how
        hows = [how if layer in (None, number) else "" for number in range(layers)]
        self.tokens, self.types = nn.Embedding(48, HIDDEN), nn.Embedding(2, HIDDEN)
        self.layers = nn.ModuleList(Block(linear, norm, two, one) for one in hows)
        self.norm = norm(HIDDEN) if normed else nn.Identity()
        self.head = linear(HIDDEN, 32)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        x = self.tokens(ids) + self.types(torch.zeros_like(types) if self.how == "no types" else types)
        for layer in self.layers:
            x = layer(x)
        x = x if self.how == "no last norm" else self.norm(x)
        return self.head(x[:, 1:].mean(1) if self.how == "mean of others" else x[:, 0])


def encoders(
    how: str, precision: str, two: bool = False, normed: bool = True, reference: str = "", **layers: int
) -> parity.Result:
    """Compare the encoder with a port that has this mistake, in all layers or only in ``layer`` of ``layers``."""
    several = {name: value for name, value in layers.items() if name == "layers"}
    return compared(
        lambda: Encoder(nn.Linear, lambda width: nn.LayerNorm(width, eps=1e-5), two, reference, normed, **several),
        lambda te: Encoder(te.Linear, lambda width: te.LayerNorm(width), two, how, normed, **layers),
        lambda rng: (rng.integers(BATCH, SEQ, high=48), rng.integers(BATCH, SEQ, high=2)),
        precision,
    )


@in_turn(
    ("how", "two", "title", "phrase"),
    [
        ("", False, "passed", ""),
        ("", True, "passed", ""),
        ("in sequence", True, "parallel-block", ""),
        ("no norm", False, "norm-missing", ""),
        ("no bias of queries", False, "bias-dropped", "first third"),
        ("no types", False, "embedding-position", "token types"),
        ("sequence first", False, "sequence-first", "layers.0"),
    ],
)
def test_a_block_that_is_put_together_otherwise_is_told(how, two, title, phrase, precision):
    tells(encoders(how, precision, two), title, phrase)


@pytest.mark.parametrize(
    ("how", "title"),
    [("in sequence", "parallel-block"), ("no norm", "norm-missing"), ("sequence first", "sequence-first")],
)
def test_one_layer_that_is_otherwise_is_told_with_its_name(how, title):
    result = encoders(how, "fp32", layers=2, layer=1)
    tells(result, title, "layers.1")
    assert "layers.0" not in result.findings[0].message


def test_branches_that_are_all_scaled_are_told_with_their_factor():
    # Before a norm, halved branches cannot be told from a doubled stream.
    result = encoders("halved", "bf16", normed=False)
    tells(result, "factor", "multiplies them by 0.5.")
    assert "what the branches return" in result.findings[0].message


@pytest.mark.parametrize(
    ("how", "title", "phrase"),
    [
        ("no last norm", "norm-missing", ""),  # its weight gets no gradient
        ("mean of others", "operation", "mean over the others of dimension 1"),
    ],
)
def test_a_last_norm_that_is_left_out_and_a_mean_for_the_first_token_are_told(how, title, phrase):
    tells(encoders(how, "bf16"), title, phrase)


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


def weights_of_parallel(own_norm: bool) -> dict[Any, Any]:
    """Return the map of one layer. Its norm fills both of TE's if the MLP has none of its own."""
    entries: dict[Any, Any] = {}
    for kind in ("weight", "bias"):
        norms = f"{ATTENTION}layer_norm_{kind}", f"{MLP}layer_norm_{kind}"
        entries |= dict(zip((f"ln_1.{kind}", f"ln_2.{kind}"), norms, strict=True)) if own_norm else {}
        entries |= {} if own_norm else {f"ln_1.{kind}": parity.copies(*norms)}
        entries |= {f"{name[0]}_proj.{kind}": f"{ATTENTION}{name}_{kind}" for name in ("query", "key", "value")}
        entries[f"out_proj.{kind}"] = f"self_attention.proj.{kind}"
        entries |= {f"fc_in.{kind}": f"{MLP}fc1_{kind}", f"fc_out.{kind}": f"{MLP}fc2_{kind}"}
    return entries


def te_layer(te: Any, parallel: bool) -> nn.Module:
    options = dict(hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")
    return te.TransformerLayer(HIDDEN, FFN, HEADS, parallel_attention_mlp=parallel, **options)


def parallel_case(with_weights: bool = True, parallel: bool = True, **right: bool) -> parity.Case:
    def factory(te: Any, **_: Any) -> parity.Pair:
        weights = weights_of_parallel(right.get("own_norm", False)) if with_weights else {}
        return parity.Pair(Parallel(**right), te_layer(te, parallel), normal((2, 24, HIDDEN)), weights)

    return parity.Case("parallel", factory, sizes=({},))


REFERENCES = [{}, dict(stream_first=False), dict(own_norm=True), dict(stream_first=False, own_norm=True)]


def test_blocks_in_sequence_are_told_where_a_number_multiplies_both():
    assert encoders("halved", "bf16", two=True, reference="halved").passed
    tells(encoders("halved in sequence", "bf16", two=True, reference="halved"), "parallel-block")


@pytest.mark.parametrize("right", REFERENCES)
def test_right_parallel_blocks_pass(right):
    results = parity.compare(parallel_case(**right), ["bf16", "fp8_current"], seeds=range(2))
    assert {result.status for result in results} == {"passed"}


@pytest.mark.parametrize("own_norm", [False, True])
def test_tes_blocks_that_follow_each_other_are_told(own_norm):
    (result,) = parity.compare(parallel_case(parallel=False, own_norm=own_norm), ["bf16"])
    tells_only(result, "parallel-block")


def test_a_mistake_that_takes_nearly_all_of_an_error_is_told_though_something_else_is_wrong():
    result = compared(
        Parallel,
        lambda te: te_layer(te, parallel=False),
        normal((2, 24, HIDDEN)),
        "fp32",
        weights_of_parallel(own_norm=False),
        call_candidate=lambda port, x: (output := port(x)) + 2e-3 * torch.sin(7.0 * output),
    )
    tells(result, "parallel-block", "something else is wrong as well")


@pytest.mark.parametrize(
    ("kind", "options", "own_norm"), [(Parallel, dict(stream_first=False), False), (InPlace, {}, True)]
)
def test_so_are_those_of_several_layers_whatever_the_order_of_their_sums(kind, options, own_norm):
    own = weights_of_parallel(own_norm)
    result = compared(
        lambda: nn.Sequential(*(kind(own_norm=own_norm, **options) for _ in range(2))),
        lambda te: nn.Sequential(*(te_layer(te, parallel=False) for _ in range(2))),
        normal((2, 24, HIDDEN)),
        weights={left: right for i in range(2) for left, right in parity.under(own, f"{i}.").items()},
    )
    tells_only(result, "parallel-block")


def test_the_map_that_fills_both_norms_is_suggested():
    suggestion = parity.suggest_map(parallel_case(with_weights=False))
    assert suggestion.error <= suggestion.limit
    for kind in ("weight", "bias"):
        copies = f'parity.copies("{ATTENTION}layer_norm_{kind}", "{MLP}layer_norm_{kind}")'
        assert f'"ln_1.{kind}": {copies}' in python(suggestion.weights)


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
        query, key = (self._placed(y, norm) for y, norm in ((query, self.q_norm), (key, self.k_norm)))
        x = x + self.o_proj(self.attention(query, key, value))
        return x + self.mlp(x)

    def _placed(self, x: Tensor, norm: nn.Module) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * FREQUENCIES.to(x.dtype)
        return self.rotate(norm(x), angles) if self.norm_first else norm(self.rotate(x, angles))


WEIGHTS = {
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


def weights_of_both(exchanged: tuple[str, ...] = ()) -> dict[Any, Any]:
    """Return the map of both layers, with the TE parameters of two entries exchanged in each."""

    def left(side: Any, layer: int) -> Any:
        return parity.stack(*(f"{layer}.{name}" for name in side)) if isinstance(side, tuple) else f"{layer}.{side}"

    other = dict(zip(exchanged, exchanged[::-1], strict=True))
    return {left(side, layer): f"{layer}.{WEIGHTS[other.get(side, side)]}" for layer in (0, 1) for side in WEIGHTS}


def layers_of(
    right: dict[str, bool] | None = None,
    exchanged: tuple[str, ...] = (),
    rope: dict[str, Any] | None = None,
    cast: bool = False,
    precision: str = "fp32",
    shape: tuple[int, int] = (2, 32),
    **options: Any,
) -> parity.Result:
    """Compare two layers with TE's layers of these options.

    ``cast`` makes the rotary embedding a submodule of the port, so that casting the port also rounds its frequencies.
    """
    embedding: list[Any] = []
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
        qk_norm_before_rope=True,
    )

    def port(te: Any) -> nn.Module:
        embedding[:] = [te.RotaryPositionEmbedding(HEAD_DIM, **(rope or {}))]
        layers = nn.ModuleList(te.TransformerLayer(HIDDEN, FFN, HEADS, **(usual | options)) for _ in range(2))
        if cast:
            layers[0].rope = embedding[0]
        return layers

    def called(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for one in layers:
            x = one(x, rotary_pos_emb=embedding[0](x.shape[1]))
        return x

    return compared(
        lambda: nn.Sequential(*(QwenLayer(**(right or {})) for _ in range(2))),
        port,
        normal((*shape, HIDDEN)),
        precision,
        weights_of_both(exchanged),
        call_candidate=called,
    )


AFTER_ROPE = dict(norm_first=False)


@pytest.mark.parametrize(
    ("port", "title"),
    [
        ({}, "passed"),
        (dict(right=AFTER_ROPE, qk_norm_before_rope=False), "passed"),
        (dict(qk_norm_before_rope=False), "norm-order"),
        (dict(right=AFTER_ROPE, qk_norm_before_rope=True), "norm-order"),
        (dict(qk_norm_eps=1e-3), "norm-eps"),  # of queries and keys alone, far from known values
        (dict(layernorm_epsilon=1e-3), "norm-eps"),  # of all other norms
        (dict(zero_centered_gamma=True), "gamma-shift"),
        (dict(exchanged=("q_norm.weight", "k_norm.weight")), "parameters-exchanged"),
        (dict(parallel_attention_mlp=True), "parallel-block"),
    ],
)
def test_an_option_of_all_layers_that_the_reference_does_not_have_is_told_once(port, title):
    tells_only(layers_of(**port), title)


@pytest.mark.parametrize(("interleaved", "wrong"), [(False, "layer"), (True, "embedding"), (False, "both")])
def test_an_interleaving_that_layer_or_embedding_does_not_share_is_told(interleaved, wrong):
    rotary_pos_interleaved = interleaved ^ (wrong in ("layer", "both"))
    rope = dict(interleaved=interleaved ^ (wrong in ("embedding", "both")))
    right = dict(interleaved=interleaved)
    tells_only(layers_of(right, rotary_pos_interleaved=rotary_pos_interleaved, rope=rope), "rope-layout")


@pytest.mark.parametrize(
    ("cast", "title", "precision"),
    [(False, "passed", "bf16"), (False, "passed", "fp16"), (True, "rope-precision", "bf16")],
)
def test_rotary_frequencies_that_are_cast_with_the_model_are_told(cast, title, precision):
    tells_only(layers_of(precision=precision, shape=(1, 96), cast=cast), title)


# What models of transformers write differently: norms, factors, and masks or tables that layers are given.

ROWS = 32


class LayerNorm(nn.Module):
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
        self.norm, self.qkv, self.out = LayerNorm(), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
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


class Model(nn.Module):
    """Embeddings times a number from a buffer, plus position embeddings, and one layer."""

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


class TEModel(nn.Module):
    def __init__(self, te, wrong) -> None:
        super().__init__()
        self.wrong = wrong
        self.tokens, self.positions = nn.Embedding(ROWS, HIDDEN), nn.Embedding(16, HIDDEN)
        self.positions.requires_grad_(False)
        norm = "RMSNorm" if wrong == "norm" else "LayerNorm"
        self.qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, normalization=norm)
        qkv_format = "sbhd" if wrong == "sequence first" else "bshd"
        self.core = te.DotProductAttention(HEADS, 16, qkv_format=qkv_format, attention_dropout=0.0)
        self.out = te.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x if self.wrong == "factor" else x * math.sqrt(HIDDEN)
        x = x if self.wrong == "positions" else x + self.positions.weight[: ids.shape[1]]
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        first = self.wrong == "sequence first"
        query, key = (self.rotated(part.transpose(0, 1) if first else part) for part in (query, key))
        query, key = (part.transpose(0, 1) if first else part for part in (query, key))
        parts = (part.to(x.dtype).contiguous() for part in (query, key, value))
        return x + self.out(self.core(*parts, attn_mask_type="causal"))

    def rotated(self, x: Tensor) -> Tensor:
        frequencies = 10_000.0 ** -(torch.arange(8, dtype=torch.float32, device=x.device) / 8)
        return rotate_halves(x, torch.arange(x.shape[1], device=x.device)[:, None] * frequencies)


@pytest.mark.parametrize(
    ("precision", "wrong", "title", "phrase"),
    [
        *((precision, "", "passed", "") for precision in ("fp32", "bf16", "fp8_current")),
        ("bf16", "norm", "norm-kind", ""),  # RMSNorm for a LayerNorm that subtracts its mean twice
        ("bf16", "sequence first", "sequence-first", ""),  # though layers are given masks and angles
        (
            "bf16",
            "factor",
            "factor",
            "multiply by 8, as the reference does; in all, the port multiplies by 1",
        ),  # a buffer holds it
        ("bf16", "positions", "branch-missing", "add the result of the 1st 'embedding' of positions"),
    ],
)
def test_what_models_write_otherwise_is_told_all_the_same(precision, wrong, title, phrase):
    weights: dict[Any, Any] = {f"{table}.weight": f"{table}.weight" for table in ("tokens", "positions")}
    weights |= {f"layer.{n}.{k}": f"{n}.{k}" for n in ("qkv", "out") for k in ("weight", "bias")}
    weights["layer.norm.weight"] = "qkv.layer_norm_weight"
    if wrong != "norm":
        weights[parity.constant(0.0, HIDDEN)] = "qkv.layer_norm_bias"
    inputs = lambda rng: rng.integers(4, 16, high=ROWS)  # noqa: E731
    tells_only(compared(Model, lambda te: TEModel(te, wrong), inputs, precision, weights), title, phrase)
