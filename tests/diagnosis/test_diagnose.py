"""A failure is explained by the mistake that was made, and a right port by none."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
from parity import reference

HIDDEN, FFN, HEADS, GROUPS = 128, 256, 4, 2
MLP = {"norm.weight": "layer_norm_weight", "down_proj.weight": "fc2_weight"}
GATE_OVER_UP = {parity.stack("gate_proj.weight", "up_proj.weight"): "fc1_weight"}
OUT = {"o_proj.weight": "proj.weight"}
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def findings(factory, precision="fp32"):
    case = parity.Case("case", factory, sizes=(dict(batch=2, seq=32),))
    (result,) = parity.compare(case, [precision])
    return result.status, [f"{finding.code} {finding.title}" for finding in result.findings]


def mlp(weights, **te_arguments):
    def factory(te, **_):
        arguments = dict(normalization="RMSNorm", activation="swiglu", bias=False) | te_arguments
        return parity.Pair(
            reference=reference.SwiGLUMLP(HIDDEN, FFN),
            candidate=te.LayerNormMLP(HIDDEN, FFN, **arguments),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights=weights,
        )

    return factory


def attention(weights, **te_arguments):
    def factory(te, **_):
        rope = te.RotaryPositionEmbedding(HIDDEN // HEADS)
        return parity.Pair(
            reference=reference.Attention(HIDDEN, HEADS, GROUPS),
            candidate=te.MultiheadAttention(
                HIDDEN,
                HEADS,
                num_gqa_groups=GROUPS,
                attention_dropout=0.0,
                qkv_format="bshd",
                bias=False,
                **te_arguments,
            ),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights=weights | OUT,
            call_candidate=lambda module, x: module(x, rotary_pos_emb=rope(x.shape[1])),
        )

    return factory


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_a_right_port_has_no_finding(precision):
    assert findings(mlp(MLP | GATE_OVER_UP), precision) == ("passed", [])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_up_over_gate_is_found(precision):
    swapped = {parity.stack("up_proj.weight", "gate_proj.weight"): "fc1_weight"}
    assert findings(mlp(MLP | swapped), precision) == ("failed", ["PAR101 gate-up-swapped"])


def test_stacked_qkv_where_interleaved_is_due_is_found():
    stacked = {parity.stack(*QKV): "qkv.weight"}
    assert findings(attention(stacked, fuse_qkv_params=True)) == ("failed", ["PAR102 qkv-layout"])


def test_interleaved_qkv_where_stacked_is_due_is_found():
    interleaved = {parity.interleaved_qkv(*QKV, groups=GROUPS, head_dim=HIDDEN // HEADS): "qkv.weight"}
    factory = attention(interleaved, fuse_qkv_params=True, qkv_weight_interleaved=False)
    assert findings(factory) == ("failed", ["PAR102 qkv-layout"])


def test_key_and_value_that_changed_places_are_found():
    query, key, value = QKV
    swapped = {parity.interleaved_qkv(query, value, key, groups=GROUPS, head_dim=HIDDEN // HEADS): "qkv.weight"}
    assert findings(attention(swapped, fuse_qkv_params=True)) == ("failed", ["PAR102 key-value-swapped"])


def test_separate_key_and_value_that_changed_places_are_found():
    query, key, value = QKV
    swapped = {query: "qkv.query_weight", key: "qkv.value_weight", value: "qkv.key_weight"}
    assert findings(attention(swapped)) == ("failed", ["PAR105 parameters-exchanged"])


def test_a_square_weight_that_was_transposed_is_found():
    def factory(te, **_):
        return parity.Pair(
            reference=nn.Linear(HIDDEN, HIDDEN, bias=False),
            candidate=te.Linear(HIDDEN, HIDDEN, bias=False),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights={parity.transpose("weight"): "weight"},
        )

    assert findings(factory) == ("failed", ["PAR103 weight-transposed"])


def test_a_gamma_that_was_not_shifted_is_found():
    factory = mlp(MLP | GATE_OVER_UP, zero_centered_gamma=True)
    assert findings(factory) == ("failed", ["PAR104 gamma-shift"])


def test_another_activation_is_found():
    assert findings(mlp(MLP | GATE_OVER_UP, activation="geglu")) == ("failed", ["PAR202 activation"])


def test_another_eps_is_found_where_it_matters():
    def factory(te, **_):
        return parity.Pair(
            reference=nn.RMSNorm(HIDDEN, eps=1e-6),
            candidate=te.RMSNorm(HIDDEN, eps=1e-5),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN, std=1e-2),
            weights={"weight": "weight"},
        )

    assert findings(factory) == ("failed", ["PAR201 norm-eps"])


def test_what_no_hypothesis_explains_is_said_to_be_unexplained():
    def factory(te, **_):
        return parity.Pair(
            reference=nn.Linear(HIDDEN, FFN),
            candidate=te.Linear(HIDDEN, FFN),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights={"weight": "weight", "bias": "bias"},
            call_candidate=lambda module, x: module(x) + 0.1 * torch.sin(x[..., :1]),
        )

    status, found = findings(factory)
    assert status == "failed"
    assert set(found) == {"PAR501 unexplained"}


def test_diagnosis_leaves_the_reference_as_it_was_for_the_next_precision():
    case = parity.Case(
        "case",
        mlp(MLP | {parity.stack("up_proj.weight", "gate_proj.weight"): "fc1_weight"}),
        sizes=(dict(batch=2, seq=32),),
    )
    (alone,) = parity.compare(case, ["fp8_current"])
    _, after_bf16 = parity.compare(case, ["bf16", "fp8_current"])
    assert alone.tensors == after_bf16.tensors


def test_the_message_tells_the_error_before_and_after_and_what_to_write():
    swapped = {parity.stack("up_proj.weight", "gate_proj.weight"): "fc1_weight"}
    case = parity.Case("case", mlp(MLP | swapped), sizes=(dict(batch=2, seq=32),))
    message = parity.compare(case, ["fp32"])[0].findings[0].message
    assert 'stack("gate_proj.weight", "up_proj.weight") to "fc1_weight"' in message
    before, after = _figures(message)
    assert before > 100 * after


def _figures(message):
    words = message.replace(",", " ").split()
    return float(words[words.index("from") + 1]), float(words[words.index("to") + 1])


def test_a_fused_qkv_that_is_laid_out_by_head_is_found_in_weight_and_bias_at_once():
    class FusedAttention(nn.Module):
        """Query, key and value of each head after the other, as in GPT-NeoX."""

        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            query, key, value = self.qkv(x).unflatten(-1, (HEADS, 3, -1)).unbind(-2)
            return self.proj(reference.CoreAttention(causal=True)(query, key, value))

    def factory(te, **_):
        names = ("query", "key", "value")
        return parity.Pair(
            reference=FusedAttention(),
            candidate=te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, qkv_format="bshd"),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights={
                f"qkv.{kind}": parity.stack(*(f"qkv.{name}_{kind}" for name in names)) for kind in ("weight", "bias")
            }
            | {f"proj.{kind}": f"proj.{kind}" for kind in ("weight", "bias")},
        )

    assert findings(factory) == ("failed", ["PAR102 qkv-layout"])


def test_a_residual_that_skips_the_norm_after_the_sum_is_found_in_a_layer_like_berts():
    class PostNormLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = reference.Attention(HIDDEN, HEADS, HEADS, bias=True, rope=False)
            self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
            self.last_norm = nn.LayerNorm(HIDDEN)

        def forward(self, x):
            x = self.norm(x + self.attention(x))
            return self.last_norm(x + self.down(nn.functional.gelu(self.up(x), approximate="tanh")))

    def factory(post_layernorm, te, **_):
        kinds = ("weight", "bias")
        weights = {
            f"attention.{name[0]}_proj.{kind}": f"self_attention.qkv.{name}_{kind}"
            for name in ("query", "key", "value")
            for kind in kinds
        }
        for left, right in (("norm.", "layer_norm_"), ("up.", "fc1_"), ("down.", "fc2_")):
            weights |= {left + kind: f"layernorm_mlp.{right}{kind}" for kind in kinds}
        weights |= {f"attention.o_proj.{kind}": f"self_attention.proj.{kind}" for kind in kinds}
        weights |= {f"last_norm.{kind}": f"layernorm.{kind}" for kind in kinds}
        return parity.Pair(
            reference=PostNormLayer(),
            candidate=te.TransformerLayer(
                HIDDEN,
                FFN,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                output_layernorm=True,
                apply_residual_connection_post_layernorm=post_layernorm,
            ),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights=weights,
        )

    assert findings(partial(factory, True)) == ("passed", [])
    assert findings(partial(factory, False)) == ("failed", ["PAR231 residual-placement"])


@pytest.mark.parametrize(
    ("order", "title"),
    [(("query", "value", "key"), "key-value-swapped"), (("key", "query", "value"), "stacked-in-another-order")],
)
def test_a_fused_weight_that_fills_te_s_parameters_in_another_order_is_found(order, title):
    parts = {f"{name}_": HIDDEN for name in ("query", "key", "value")}

    class Attention(nn.Module):
        def __init__(self, qkv):
            super().__init__()
            self.qkv = qkv

        def forward(self, x):
            heads = self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
            return F.scaled_dot_product_attention(*heads.unbind(2))

    def factory(te, **_):
        return parity.Pair(
            reference=Attention(nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)),
            candidate=Attention(te.Linear(HIDDEN, 3 * HIDDEN, bias=False, parameters_split=parts)),
            inputs=lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN),
            weights={"qkv.weight": parity.stack(*(f"qkv.{name}_weight" for name in order))},
        )

    _, found = findings(factory)
    assert [finding.split()[1] for finding in found] == [title]
