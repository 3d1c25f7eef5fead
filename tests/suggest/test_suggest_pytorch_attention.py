"""``suggest_map`` for PyTorch's own attention and layers, whose modules say how they store what they hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.suggest import Suggestion
from parity.suggest.suggestion import explain, python

te = parity.te.kernels("cpu").te
HIDDEN, FFN, HEADS = 64, 96, 4
NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")
FUSED = pytest.mark.parametrize(
    "fused",
    [{}, dict(fuse_qkv_params=True), dict(fuse_qkv_params=True, qkv_weight_interleaved=False)],
    ids=["separate", "interleaved", "in turn"],
)


class Attention(nn.Module):
    """PyTorch's attention, maybe after a norm; ``apart`` as with ``kdim``: a weight each, and one bias."""

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


# What modules say of themselves decides where nothing else does


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
    assert 'the reference\'s "attn.in_proj_bias" (192,) has no place in the TE module' in suggestion.problems[0]
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
    """Keeps its gain minus 1 in a layer norm that it does not call."""

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
