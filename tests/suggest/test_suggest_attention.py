"""``suggest_map`` tells self-attention from cross-attention, and norms around branches, also in PyTorch's modules."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.reference import CoreAttention
from parity.weights.suggest import Suggestion
from parity.weights.suggest.proposal import explain, python

# ``suggest_map`` tells similar modules apart: self-attention from cross-attention, and norms around branches.


te = parity.te.kernels("cpu").te
HIDDEN, FFN, HEADS = 64, 96, 4
NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")


def assert_finds_a_map(reference: nn.Module, candidate: nn.Module, inputs=None, **calls) -> None:
    pair = parity.Pair(reference, candidate, inputs or (lambda rng: rng.normal(2, 16, HIDDEN)), **calls)
    suggestion = parity.suggest_map(pair)
    assert suggestion.settled, explain(suggestion)


def with_memory(rng):
    return rng.normal(2, 16, HIDDEN), rng.normal(2, 24, HIDDEN)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def causal(module: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    later = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
    return module(x, memory, tgt_mask=later)


@pytest.mark.parametrize(
    "fused", [{}, dict(fuse_qkv_params=True), dict(fuse_qkv_params=True, qkv_weight_interleaved=False)]
)
def test_the_decoder_layer_of_pytorch_is_a_decoder_layer_of_te(fused):
    assert_finds_a_map(
        nn.TransformerDecoderLayer(HIDDEN, HEADS, FFN, 0.0, tanh_gelu, norm_first=True, batch_first=True),
        te.TransformerLayer(HIDDEN, FFN, HEADS, layer_type="decoder", **fused, **NO_DROPOUT),
        with_memory,
        call_reference=causal,
        call_candidate=lambda module, x, memory: module(x, encoder_output=memory),
    )


class AttentionBeside(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.core = CoreAttention(causal=is_causal)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        query, key, value = self.q_proj(x), self.k_proj(memory), self.v_proj(memory)
        return self.out_proj(self.core(*(part.unflatten(-1, (HEADS, -1)) for part in (query, key, value))))


class BartDecoder(nn.Module):
    """A decoder layer with the names and the order of BART's."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = AttentionBeside(is_causal=True), nn.LayerNorm(HIDDEN)
        self.encoder_attn, self.encoder_attn_layer_norm = AttentionBeside(is_causal=False), nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.final_layer_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, x))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory))
        return self.final_layer_norm(x + self.fc2(tanh_gelu(self.fc1(x))))


class PostNormDecoder(nn.Module):
    """A decoder layer of TE's attention modules, under names that reveal little."""

    def __init__(self) -> None:
        super().__init__()
        options = dict(attention_dropout=0.0, qkv_format="bshd")
        self.sa = te.MultiheadAttention(HIDDEN, HEADS, **options)
        self.ca = te.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", attn_mask_type="no_mask", **options)
        self.a, self.b, self.c = (te.LayerNorm(HIDDEN) for _ in range(3))
        self.fc1, self.fc2 = te.Linear(HIDDEN, FFN), te.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.a(x + self.sa(x))
        x = self.b(x + self.ca(x, encoder_output=memory))
        return self.c(x + self.fc2(tanh_gelu(self.fc1(x))))


def test_te_s_own_names_tell_cross_attention():
    assert_finds_a_map(BartDecoder(), PostNormDecoder(), with_memory)


class SandwichedAttention(nn.Module):
    """Attention with norms before and after each branch, named as in Gemma 2."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2))
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2)
        )
        projections = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN, bias=False) for name in projections})
        self.mlp = nn.ModuleDict(
            {name: nn.Linear(HIDDEN, FFN, bias=False) for name in ("gate_proj", "up_proj")}
            | {"down_proj": nn.Linear(FFN, HIDDEN, bias=False)}
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        qkv = (self.self_attn[f"{name}_proj"](h).unflatten(-1, (HEADS, -1)) for name in "qkv")
        x = x + self.post_attention_layernorm(self.self_attn["o_proj"](CoreAttention(causal=True)(*qkv)))
        h = self.pre_feedforward_layernorm(x)
        h = self.mlp["down_proj"](tanh_gelu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))
        return x + self.post_feedforward_layernorm(h)


class SandwichedPort(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, bias=False, normalization="RMSNorm")
        self.core = te.DotProductAttention(HEADS, HIDDEN // HEADS, qkv_format="bshd", attn_mask_type="causal")
        self.o = te.Linear(HIDDEN, HIDDEN, bias=False)
        self.after_attention, self.after_mlp = te.RMSNorm(HIDDEN), te.RMSNorm(HIDDEN)
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, bias=False, normalization="RMSNorm", activation="geglu")

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.contiguous() for part in self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2))
        x = x + self.after_attention(self.o(self.core(query, key, value)))
        return x + self.after_mlp(self.mlp(x))


def test_norms_before_and_after_branches_keep_their_places():
    assert_finds_a_map(SandwichedAttention(), SandwichedPort())


class Convolved(nn.Module):
    def __init__(self, linear) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(HIDDEN, HIDDEN, 1), linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).movedim(1, -1))


def test_a_convolution_of_one_pixel_has_one_layout():
    assert_finds_a_map(Convolved(nn.Linear), Convolved(te.Linear), lambda rng: rng.normal(2, HIDDEN, 4, 4))


# Modules that run only in training, or not in FP32


def test_a_port_that_runs_only_with_gradients_is_tried_with_them():
    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(te.Linear(HIDDEN, HIDDEN) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            offloading, synchronize = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
            for layer in self.layers:
                with offloading:
                    x = layer(x)
                x = synchronize(x)
            return x

    reference = nn.Module()
    reference.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
    assert_finds_a_map(reference, Offloaded(), call_reference=lambda module, x: nn.Sequential(*module.layers)(x))


def test_parameters_that_te_holds_quantized_are_matched_by_their_own_precision():
    with te.quantized_model_init():
        candidate = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16)
    assert_finds_a_map(nn.Linear(HIDDEN, HIDDEN), candidate)


# ``suggest_map`` for PyTorch's own attention and layers, whose classes say how they store their parameters.


FUSED = pytest.mark.parametrize(
    "fused",
    [{}, dict(fuse_qkv_params=True), dict(fuse_qkv_params=True, qkv_weight_interleaved=False)],
    ids=["separate", "interleaved", "in turn"],
)


class Attention(nn.Module):
    """PyTorch's attention, with an optional norm before it; ``apart``: three weights and one bias, as with ``kdim``."""

    def __init__(self, norm: bool, apart: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN) if norm else nn.Identity()
        self.attn = nn.MultiheadAttention(HIDDEN, HEADS, bias=bias, batch_first=True)
        if apart:
            whole = self.attn.in_proj_weight.detach()
            self.attn._qkv_same_embed_dim = False
            self.attn.register_parameter("in_proj_weight", None)
            for name, part in zip("qkv", whole.chunk(3), strict=True):
                self.attn.register_parameter(f"{name}_proj_weight", nn.Parameter(part.clone()))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        other = x if memory is None else memory
        return self.attn(x, other, other, need_weights=False)[0]


def te_attention(**options) -> nn.Module:
    return te.MultiheadAttention(
        HIDDEN, HEADS, **{"attention_dropout": 0.0, "attn_mask_type": "no_mask", "qkv_format": "bshd", **options}
    )


def hidden(rng: parity.case.case.Rng) -> Tensor:
    return rng.normal(2, 16, HIDDEN)


def assert_passes(suggestion: Suggestion, pair: parity.Pair) -> None:
    assert suggestion.settled, explain(suggestion)
    (result,) = parity.compare(dataclasses.replace(pair, weights=suggestion.weights, fill=True), ["fp32"])
    assert result.passed, result.findings


@FUSED
@pytest.mark.parametrize("apart", [False, True], ids=["one weight", "three weights"])
@pytest.mark.parametrize("norm", [False, True], ids=["without norm", "with norm"])
def test_pytorchs_attention_is_mapped(norm, apart, fused):
    pair = parity.Pair(Attention(norm, apart), te_attention(input_layernorm=norm, **fused), hidden)
    assert_passes(parity.suggest_map(pair), pair)


@FUSED
@pytest.mark.parametrize("apart", [False, True], ids=["one weight", "three weights"])
def test_pytorchs_attention_on_another_sequence_is_mapped(apart, fused):
    pair = parity.Pair(
        Attention(norm=True, apart=apart),
        te_attention(attention_type="cross", input_layernorm=True, **fused),
        lambda rng: (rng.normal(2, 16, HIDDEN), rng.normal(2, 24, HIDDEN)),
        call_candidate=lambda module, x, memory: module(x, encoder_output=memory),
    )
    assert_passes(parity.suggest_map(pair), pair)


@FUSED
def test_pytorchs_encoder_layer_is_mapped(fused):
    pair = parity.Pair(
        nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN, dropout=0.0, batch_first=True, norm_first=True),
        te.TransformerLayer(
            HIDDEN, FFN, HEADS, activation="relu", self_attn_mask_type="no_mask", **NO_DROPOUT, **fused
        ),
        hidden,
    )
    assert_passes(parity.suggest_map(pair), pair)


def test_the_bias_of_three_weights_is_stacked():
    suggestion = parity.suggest_map(parity.Pair(Attention(norm=False, apart=True), te_attention(), hidden))
    assert '"attn.in_proj_bias": parity.stack("qkv.query_bias", "qkv.key_bias", "qkv.value_bias")' in python(
        suggestion.weights
    )


# What a module's class says decides where nothing else does


@FUSED
def test_a_mask_that_is_wrong_makes_the_map_no_other(fused):
    reference = Attention(norm=True)
    right, wrong = (
        parity.suggest_map(
            parity.Pair(reference, te_attention(input_layernorm=True, attn_mask_type=mask, **fused), hidden)
        )
        for mask in ("no_mask", "causal")
    )
    assert right.fits
    assert not wrong.fits
    assert python(wrong.weights) == python(right.weights)


def test_a_bias_that_te_lacks_leaves_the_right_layout_of_the_weight():
    candidate = te_attention(bias=False, fuse_qkv_params=True)
    suggestion = parity.suggest_map(parity.Pair(Attention(norm=False), candidate, hidden))
    assert 'parity.separated_qkv("qkv.weight", groups=4, head_dim=16)' in python(suggestion.weights)
    assert 'the reference\'s "attn.in_proj_bias" (192,) has no counterpart in the TE module' in suggestion.problems[0]
    assert "bias=True" in suggestion.problems[0]


def test_what_modules_say_is_no_question():
    pair = parity.Pair(Attention(norm=True), te_attention(input_layernorm=True, fuse_qkv_params=True), hidden)
    suggestion = parity.suggest_map(pair)
    assert suggestion.settled
    assert suggestion.decisions == ()


@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_of_pytorchs_is_shifted_where_te_centres_it(centred):
    suggestion = parity.suggest_map(
        parity.Pair(nn.LayerNorm(HIDDEN), te.LayerNorm(HIDDEN, zero_centered_gamma=centred), hidden)
    )
    assert suggestion.settled
    assert (parity.shift("weight", -1.0) in suggestion.weights) == centred


class Centred(nn.Module):
    """Stores its gain minus 1 in a layer norm that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), 1.0 + self.norm.weight, self.norm.bias)


def test_what_contradicts_a_modules_class_is_tried_where_nothing_else_fits():
    suggestion = parity.suggest_map(parity.Pair(Centred(), te.LayerNorm(HIDDEN), hidden))
    assert suggestion.settled, explain(suggestion)
    assert parity.shift("norm.weight", 1.0) in suggestion.weights


def test_a_weight_that_a_layer_is_not_called_with_is_tried_transposed():
    class Transposing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.layer.bias, x.flatten(0, 1), self.layer.weight).view(x.shape)

    suggestion = parity.suggest_map(parity.Pair(Transposing(), te.Linear(HIDDEN, HIDDEN), hidden))
    assert suggestion.settled, explain(suggestion)
    assert parity.transpose("layer.weight") in suggestion.weights
