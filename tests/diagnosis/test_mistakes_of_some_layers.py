"""A mistake that is made in some layers is told with their names."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from language_model import HEAD_DIM, Options, first, result
from torch import nn

import parity

LOGITS = Options(layers=3, loss=False)
ROPED = {None: (1,), (0, 1): (0,), (1, 2): (0, 1)}  # the reference's layers, by the port's


@pytest.mark.parametrize(
    ("roped", "precision"),
    [*product([(0,), (0, 2), (2,)], ["fp32", "bf16", "fp16"]), ((0,), "fp8_current")],
)
def test_rope_that_some_layers_lack_is_told_with_these_layers(roped, precision):
    one = result(LOGITS, precision, roped=roped)
    assert first(one) == "rope-missing"
    for number in range(3):
        assert (f"layers.{number}" in one.findings[0].message) == (number not in roped)


@pytest.mark.parametrize(
    ("port", "told"),
    [
        (None, "query and key are rotated in layers.0, layers.2"),
        ((0, 1), "in layers.1"),
        ((1, 2), "in layers.2; each layer is rotated, or not, as the one before it"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rope_in_layers_that_have_none_is_told_with_these_layers(port, told, precision):
    """As in SmolLM3, Cohere 2 and Llama 4, some of whose layers have no positions (NoPE)."""
    one = result(replace(LOGITS, roped=ROPED[port]), precision, roped=port)
    assert first(one) == "rope-unwanted"
    assert told in one.findings[0].message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("port", "told"),
    [
        ((1e4, 1e4), "rotary_base=1e+06; it rotates with base 1e+04 in layers.1"),
        ((1e6, 1e6), "rotary_base=10000; it rotates with base 1e+06 in layers.0"),
        ((1e4, 5e5), "rotary_base=1e+06; it rotates with base 5e+05 in layers.1"),
    ],
)
def test_a_base_of_layers_that_have_their_own_is_told_with_these_layers(port, told, precision):
    """As in Gemma 3, whose local layers have another base than its global ones."""
    one = result(Options(layers=2, loss=False, bases=(1e4, 1e6)), precision, seq=48, bases=port)
    assert first(one) == "rope-base"
    assert told in one.findings[0].message


@pytest.mark.parametrize("loss", [False, True])
def test_queries_and_keys_that_are_permuted_in_one_layer_are_told_with_it(loss):
    def mapped(name):
        permuted = name in ("layers.1.q.weight", "layers.1.k.weight")
        return parity.rope_halves(name, head_dim=HEAD_DIM) if permuted else name

    one = result(Options(layers=3, loss=loss), "fp32", mapped=mapped)
    assert first(one) == "rope-layout"
    assert 'map "layers.1.q.weight" to "layers.1.q.weight"' in one.findings[0].message


def test_a_scale_that_is_divided_by_each_layers_number_is_told():
    one = result(LOGITS, "bf16", scales=(1.0, 1 / 2, 1 / 3))
    assert first(one) == "softmax-scale"


def test_attentions_sums_alone_that_take_the_norm_are_told_as_one_mistake():
    (finding,) = result(LOGITS, "bf16", from_norm=True).findings
    assert finding.title == "residual-placement"
    assert "each layer's 1st sum" in finding.message


def test_keys_and_values_of_the_position_before_are_told():
    assert first(result(LOGITS, "bf16", shift=1)) == "cache-step"


def test_a_layer_that_is_left_out_is_told_by_what_gets_no_gradient():
    one = result(LOGITS, "bf16", skipped=(1,))
    assert first(one) == "branch-missing"
    assert "layers.1" in one.findings[0].message


class Normed(nn.Module):
    """Branches behind norms, and a norm at the end, of a stream as small as embeddings are."""

    def __init__(self, linear, norm, last):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(norm(64), linear(64, 64)) for _ in range(3))
        self.norm = last(64)

    def forward(self, x):
        x = 1e-3 * x
        for layer in self.layers:
            x = x + 1e-3 * layer(x)
        return self.norm(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_eps_of_all_layers_is_told_with_their_list_where_the_last_norm_is_right(precision):
    def build(te, **_):
        def right(width):
            return te.RMSNorm(width, eps=1e-6)

        plain = Normed(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-6), lambda width: nn.RMSNorm(width, eps=1e-6))
        ported = Normed(te.Linear, te.RMSNorm, right)
        same = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, ported, lambda rng, batch, seq: rng.normal(batch, seq, 64), same)

    (one,) = parity.compare(parity.Case("normed", build, sizes=(dict(batch=2, seq=32),), probe=False), [precision])
    assert [finding.title for finding in one.findings] == ["norm-eps"]
    assert "it computes with eps=1e-05 in norms of 64 channels in layers" in one.findings[0].message
