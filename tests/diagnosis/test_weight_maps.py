"""Weight maps with stacked, interleaved, exchanged and transposed weights, and mistakes that no map can cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity
from parity import reference
from parity.case.weight_map import Reorder, WeightMap, describe, reorder
from parity.mistakes import weight_maps
from tests.hf_models import Conv1D

# A gated MLP and attention against TE's fused modules.

HIDDEN, FFN, HEADS, GROUPS = 128, 256, 4, 2
MLP = {"norm.weight": "layer_norm_weight", "down_proj.weight": "fc2_weight"}
GATE_OVER_UP = {parity.stack("gate_proj.weight", "up_proj.weight"): "fc1_weight"}
UP_OVER_GATE = {parity.stack("up_proj.weight", "gate_proj.weight"): "fc1_weight"}
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
QVK = (QKV[0], QKV[2], QKV[1])


def mlps(weights: WeightMap, precision: str = "fp32", **options: Any) -> parity.Result:
    options = dict(normalization="RMSNorm", activation="swiglu", bias=False) | options
    return compared(
        lambda: reference.SwiGLUMLP(HIDDEN, FFN),
        lambda te: te.LayerNormMLP(HIDDEN, FFN, **options),
        normal((2, 32, HIDDEN)),
        precision,
        MLP | weights,
    )


def attentions(weights: WeightMap, **options: Any) -> parity.Result:
    options = dict(num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="bshd", bias=False) | options
    angles: list[Any] = []

    def port(te: Any) -> nn.Module:
        angles[:] = [te.RotaryPositionEmbedding(HIDDEN // HEADS)]
        return te.MultiheadAttention(HIDDEN, HEADS, **options)

    return compared(
        lambda: reference.Attention(HIDDEN, HEADS, GROUPS),
        port,
        normal((2, 32, HIDDEN)),
        "fp32",
        weights | {"o_proj.weight": "proj.weight"},
        call_candidate=lambda module, x: module(x, rotary_pos_emb=angles[0](x.shape[1])),
    )


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
@pytest.mark.parametrize(("weights", "title"), [(GATE_OVER_UP, "passed"), (UP_OVER_GATE, "gate-up-swapped")])
def test_up_over_gate_is_told(weights, title, precision):
    tells_only(mlps(weights, precision), title)


@pytest.mark.parametrize(
    ("options", "title"),
    [(dict(zero_centered_gamma=True), "gamma-shift"), (dict(activation="geglu"), "activation")],
)
def test_a_gamma_that_was_not_shifted_and_another_activation_are_told(options, title):
    tells_only(mlps(GATE_OVER_UP, **options), title)


def interleaved(*names: str) -> Any:
    return parity.interleaved_qkv(*names, groups=GROUPS, head_dim=HIDDEN // HEADS)


FUSED = dict(fuse_qkv_params=True)


@pytest.mark.parametrize(
    ("weights", "options", "title"),
    [
        ({parity.stack(*QKV): "qkv.weight"}, FUSED, "qkv-layout"),
        ({interleaved(*QKV): "qkv.weight"}, FUSED | dict(qkv_weight_interleaved=False), "qkv-layout"),
        ({interleaved(*QVK): "qkv.weight"}, FUSED, "key-value-swapped"),
        (
            dict(zip(QVK, ("qkv.query_weight", "qkv.key_weight", "qkv.value_weight"), strict=True)),
            {},
            "parameters-exchanged",
        ),
    ],
)
def test_queries_keys_and_values_that_lie_otherwise_are_told(weights, options, title):
    tells_only(attentions(weights, **options), title)


def test_a_square_weight_that_was_transposed_is_told():
    result = compared(
        lambda: nn.Linear(HIDDEN, HIDDEN, bias=False),
        lambda te: te.Linear(HIDDEN, HIDDEN, bias=False),
        normal((2, 32, HIDDEN)),
        "fp32",
        parity.transpose,
    )
    tells_only(result, "weight-transposed")


class FusedAttention(nn.Module):
    """Attention whose fused weight holds query, key and value of each head in turn, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (HEADS, 3, -1)).unbind(-2)
        return self.proj(reference.CoreAttention(causal=True)(query, key, value))


def test_a_fused_qkv_that_is_laid_out_by_head_is_told_of_weight_and_bias_at_once():
    weights = {}
    for kind in ("weight", "bias"):
        weights[f"qkv.{kind}"] = parity.stack(*(f"qkv.{name}_{kind}" for name in ("query", "key", "value")))
        weights[f"proj.{kind}"] = f"proj.{kind}"
    result = compared(
        FusedAttention,
        lambda te: te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, qkv_format="bshd"),
        normal((2, 32, HIDDEN)),
        "fp32",
        weights,
    )
    tells_only(result, "qkv-layout")


class Projected(nn.Module):
    """Attention whose queries, keys and values come from one linear layer."""

    def __init__(self, qkv: nn.Module) -> None:
        super().__init__()
        self.qkv = qkv

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        return F.scaled_dot_product_attention(*heads.unbind(2))


@pytest.mark.parametrize(
    ("order", "title"),
    [(("query", "value", "key"), "key-value-swapped"), (("key", "query", "value"), "stacked-in-another-order")],
)
def test_a_fused_weight_that_fills_tes_parameters_in_another_order_is_told(order, title):
    parts = {f"{name}_": HIDDEN for name in ("query", "key", "value")}
    result = compared(
        lambda: Projected(nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)),
        lambda te: Projected(te.Linear(HIDDEN, 3 * HIDDEN, bias=False, parameters_split=parts)),
        normal((2, 32, HIDDEN)),
        "fp32",
        {"qkv.weight": parity.stack(*(f"qkv.{name}_weight" for name in order))},
    )
    tells_only(result, title)


# Rows of a fused weight that are copied unchanged although TE reads them in another order.

WIDTH = 64


class Rows(nn.Module):
    """Attention whose fused rows are viewed as ``shape``; ``to_heads`` permutes ``[batch, seq, *shape]``."""

    def __init__(self, shape: tuple[int, ...], to_heads: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.to_heads = shape, to_heads
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused.weight.data *= 2

    def forward(self, x: Tensor) -> Tensor:
        apart = self.fused(x).unflatten(-1, self.shape).permute(*self.to_heads)  # [3, batch, heads, seq, head_dim]
        return self.out(F.scaled_dot_product_attention(*apart).transpose(1, 2).flatten(2))


BY_KIND = (3, HEADS, WIDTH // HEADS), (2, 0, 3, 1, 4)
BY_HEAD = (HEADS, 3, WIDTH // HEADS), (3, 0, 2, 1, 4)
BY_CHANNEL = (HEADS, WIDTH // HEADS, 3), (4, 0, 2, 1, 3)


class Conv1DRows(Rows):
    """Attention with a fused weight ``[in, out]``, as in GPT-2."""

    def __init__(self, *layout: Any) -> None:
        super().__init__(*layout)
        self.fused = Conv1D(WIDTH, 3 * WIDTH)


def by_head(kind: str) -> Any:
    return parity.rearrange(f"fused.{kind}", "(qkv heads c) ... -> (heads qkv c) ...", qkv=3, heads=HEADS)


COPIED = {f"fused.{kind}": f"qkv.{kind}" for kind in ("weight", "bias")}
TRANSPOSED = {parity.transpose("fused.weight"): "qkv.weight", "fused.bias": "qkv.bias"}
TO_SEPARATED = 'to separated_qkv("qkv.weight", groups=4, head_dim=16)'
OF_BIAS = 'likewise for "qkv.bias"'


@pytest.mark.parametrize(
    ("module", "layout", "is_interleaved", "weights", "title", "phrases"),
    [
        (Rows, BY_KIND, False, COPIED, "passed", []),
        (Rows, BY_HEAD, True, COPIED, "passed", []),
        (Conv1DRows, BY_KIND, False, TRANSPOSED, "passed", []),
        (Rows, BY_KIND, True, COPIED, "qkv-layout", [f'map "fused.weight" {TO_SEPARATED}', OF_BIAS]),
        (
            Conv1DRows,
            BY_KIND,
            True,
            TRANSPOSED,
            "qkv-layout",
            [f'map transpose("fused.weight") {TO_SEPARATED}', OF_BIAS],
        ),
        (
            Rows,
            BY_HEAD,
            False,
            COPIED,
            "qkv-layout",
            ['map separated_qkv("fused.weight", groups=4, head_dim=16) to "qkv.weight"'],
        ),
        (Rows, BY_CHANNEL, False, COPIED, "qkv-layout", ["(heads channels qkv) ..."]),
        (Rows, BY_CHANNEL, True, COPIED, "qkv-layout", ["(heads channels qkv) ..."]),
        (
            Rows,
            BY_KIND,
            False,
            {by_head("weight"): "qkv.weight", by_head("bias"): "qkv.bias"},
            "qkv-layout",
            ['map "fused.weight" to "qkv.weight"'],
        ),
    ],
)
def test_rows_in_another_order_than_te_reads_them_are_told(module, layout, is_interleaved, weights, title, phrases):
    options = dict(attention_dropout=0.0, fuse_qkv_params=True, attn_mask_type="no_mask", qkv_format="bshd")
    result = compared(
        lambda: module(*layout),
        lambda te: te.MultiheadAttention(WIDTH, HEADS, qkv_weight_interleaved=is_interleaved, **options),
        normal((2, 17, WIDTH)),
        weights=weights | {f"out.{kind}": f"proj.{kind}" for kind in ("weight", "bias")},
    )
    tells_only(result, title)
    assert all(phrase in result.findings[0].message for phrase in phrases)


class FlatAttention(nn.Module):
    """Attention over ``[batch * heads, seq, head_dim]``, as older models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q.weight.data *= 3

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for layer in (self.q, self.k, self.v)
        )
        query, key, value = heads
        context = torch.bmm((torch.bmm(query, key.mT) * (WIDTH // HEADS) ** -0.5).softmax(-1), value)
        return self.out(context.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))


def test_rows_of_heads_that_are_batched_are_told_in_another_order():
    def by_channel(name: str) -> Any:
        return parity.rearrange(f"{name}.weight", "(heads channels) ... -> (channels heads) ...", heads=HEADS)

    options = dict(attention_dropout=0.0, attn_mask_type="no_mask", qkv_format="bshd", bias=False)
    names = zip("qkv", ("query", "key", "value"), strict=True)
    result = compared(
        FlatAttention,
        lambda te: te.MultiheadAttention(WIDTH, HEADS, **options),
        normal((2, 17, WIDTH)),
        weights={by_channel(name): f"qkv.{of}_weight" for name, of in names} | {"out.weight": "proj.weight"},
    )
    tells_only(result, "heads-transposed")


# Keys and values of cross-attention, which TE reads head by head unless it is told otherwise.

CROSS, INNER, QUERIES, KEYS = 48, 80, 20, 12
CROSSED = dict(attention_dropout=0.0, fuse_qkv_params=True)


def of_cross_attention(plain: str, te: str, query: str) -> dict[Any, Any]:
    return {
        parity_side: te_side
        for kind in ("weight", "bias")
        for parity_side, te_side in {
            f"{plain}in_proj_{kind}": parity.stack(f"{te}{query}.{kind}", f"{te}key_value.{kind}"),
            f"{plain}out_proj.{kind}": f"{te}proj.{kind}",
        }.items()
    }


def crossed(
    plain: Any, port: Any, weights: WeightMap, precision: str, call: Any = lambda module, x, y: module(x, y, y)[0]
) -> parity.Result:
    return compared(
        plain,
        port,
        normal((2, QUERIES, CROSS), (2, KEYS, CROSS)),
        precision,
        weights,
        call_reference=call,
        call_candidate=lambda module, x, memory: module(x, encoder_output=memory),
    )


@in_turn(("is_interleaved", "title"), [(False, "passed"), (True, "qkv-layout")])
def test_keys_and_values_that_te_takes_head_by_head_are_told(is_interleaved, title, precision):
    options = dict(attention_type="cross", attn_mask_type="no_mask", qkv_format="bshd", **CROSSED)
    result = crossed(
        lambda: nn.MultiheadAttention(CROSS, 3, batch_first=True),
        lambda te: te.MultiheadAttention(CROSS, 3, **options, qkv_weight_interleaved=is_interleaved),
        of_cross_attention("", "", "query_layer"),
        precision,
    )
    tells(result, title, 'reorder("key_value.weight", order=(0, 2, 4, 1, 3, 5))')


def test_a_decoder_layer_whose_attentions_are_both_misread_is_told_as_one_mistake():
    def call(layer: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
        return layer(x, memory, tgt_mask=torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1))

    itself, cross, mlp = "self_attention.", "inter_attention.", "layernorm_mlp."
    names = {
        "self_attn.in_proj_": f"{itself}layernorm_qkv.",
        "self_attn.out_proj.": f"{itself}proj.",
        "norm1.": f"{itself}layernorm_qkv.layer_norm_",
        "norm2.": f"{cross}layernorm_query.layer_norm_",
        "norm3.": f"{mlp}layer_norm_",
        "linear1.": f"{mlp}fc1_",
        "linear2.": f"{mlp}fc2_",
    }
    weights = of_cross_attention("multihead_attn.", cross, "layernorm_query")
    weights |= {left + kind: right + kind for left, right in names.items() for kind in ("weight", "bias")}
    options = dict(hidden_dropout=0.0, layer_type="decoder", activation="relu", attn_input_format="bshd", **CROSSED)
    result = crossed(
        lambda: nn.TransformerDecoderLayer(CROSS, 3, INNER, dropout=0.0, batch_first=True, norm_first=True),
        lambda te: te.TransformerLayer(CROSS, INNER, 3, **options),
        weights,
        "fp32",
        call,
    )
    tells_only(result, "qkv-layout", "self_attention.layernorm_qkv.weight")
    assert "inter_attention.key_value.weight" in result.findings[0].message


# Exchanged halves of a weight are reported as gate and up projection only if that is what they are.


class Modulated(nn.Module):
    """A layer whose scale and shift come from a condition."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.halves, self.down = linear(WIDTH, 2 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.halves(condition).chunk(2, -1)
        return self.down(x * (1 + scale) + shift)


class Gated(Modulated):
    """A layer whose halves are a gate and an up projection."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        gate, up = self.halves(x).chunk(2, -1)
        return self.down(F.silu(gate) * up) + condition


class Exchanging(Modulated):
    """The same layer as a port that takes the halves in the other order."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.halves(condition).chunk(2, -1)
        return self.down(x * (1 + scale) + shift)


class UpFirst(Gated):
    """The same layer as a port that takes the halves in the other order."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        up, gate = self.halves(x).chunk(2, -1)
        return self.down(F.silu(gate) * up) + condition


@pytest.mark.parametrize("order", [(1, 0), (*range(WIDTH, 2 * WIDTH), *range(WIDTH))], ids=["halves", "rows"])
def test_a_scale_and_a_shift_are_parts_in_another_order(order):
    result = compared(
        lambda: Modulated(nn.Linear),
        lambda te: Modulated(te.Linear),
        normal((32, WIDTH), (32, WIDTH)),
        weights=lambda name: reorder(name, order) if "halves" in name else name,
    )
    tells(result, "stacked-in-another-order")
    assert "gate" not in result.findings[0].message
    assert len(result.findings[0].message) < 500


@pytest.mark.parametrize(
    ("right", "port", "title"),
    [(Modulated, Exchanging, "stacked-in-another-order"), (Gated, UpFirst, "gate-up-swapped")],
)
def test_what_the_port_takes_in_another_order_is_told_so(right, port, title):
    result = compared(lambda: right(nn.Linear), lambda te: port(te.Linear), normal((32, WIDTH), (32, WIDTH)), "fp32")
    tells_only(result, title)
    assert title == "gate-up-swapped" or "gate" not in result.findings[0].message


def test_an_order_of_many_rows_is_shortened_but_where_it_is_to_be_pasted():
    term = Reorder(("w",), tuple(range(100)))
    assert describe(term) == 'reorder("w", order=(0, 1, 2, ..., 97, 98, 99))'
    assert "50, 51, 52" in describe(term, "parity.")


# Gate and up that alternate in blocks, as in TE's fused grouped MLP (``glu_interleave_size``).

IN_BLOCKS_OF_32 = (0, 3, 1, 4, 2, 5)  # the three blocks of gate and of up in turn


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)


def in_blocks(size: int | None, has_blocks: bool, precision: str) -> parity.Result:
    """Compare a gated MLP with TE's operations, which read blocks of this size; the map may lay out blocks."""

    def port(te: Any) -> nn.Module:
        from transformer_engine.pytorch import ops

        up = ops.Linear(WIDTH, 2 * 96)
        return ops.Sequential(up, ops.SwiGLU(glu_interleave_size=size), ops.Linear(96, WIDTH))

    weights: dict[Any, Any] = {}
    for kind in ("weight", "bias"):
        of_fc1 = f"fc1.{kind}"
        weights[reorder(of_fc1, IN_BLOCKS_OF_32) if has_blocks else of_fc1] = f"0.{kind}"
        weights[f"fc2.{kind}"] = f"2.{kind}"
    return compared(GatedMlp, port, normal((48, WIDTH)), precision, weights)


@in_turn(("size", "has_blocks"), [(32, True), (None, False)])
def test_blocks_that_te_reads_pass(size, has_blocks, precision):
    assert in_blocks(size, has_blocks, precision).passed


def test_weights_that_lack_the_blocks_are_told_what_lays_them_out():
    phrase = 'lay out "0.weight" with te.interleave_glu_tensor'
    tells_only(in_blocks(32, False, "bf16"), "gate-up-interleaved", phrase)


def test_blocks_that_te_does_not_know_of_are_told():
    assert in_blocks(None, True, "fp32").findings[0].code in ("PAR101", "PAR107")


# What no map covers: a module's buffers, and the order of its outputs.

FEATURES = 16


class Fourier(nn.Module):
    def __init__(self, linear: Any, seed: int = 0, name: str = "directions", exchanged: bool = False) -> None:
        super().__init__()
        self.name, self.exchanged, self.fc = name, exchanged, linear(2 * FEATURES, WIDTH)
        drawn = torch.randn(FEATURES, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.register_buffer(name, 0.1 * drawn)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = x @ getattr(self, self.name).T
        y = self.fc(torch.cat((angles.sin(), angles.cos()), -1))
        return (x * y, y) if self.exchanged else (y, x * y)


@pytest.mark.parametrize(
    ("port", "title", "phrase"),
    [
        (dict(name="of_another_name"), "passed", ""),
        (dict(seed=1), "buffer-not-copied", "copy directions"),
        (dict(seed=1, name="of_another_name"), "buffer-not-copied", "copy of_another_name"),
        (
            dict(exchanged=True),
            "outputs-exchanged",
            "output[0] is the reference's output[1], output[1] is the reference's output[0]",
        ),
    ],
)
def test_another_buffer_and_outputs_in_another_order_are_told(port, title, phrase):
    tells_only(twins(Fourier, port, normal((32, WIDTH)), "fp32"), title, phrase)


class Rotated(nn.Module):
    """A rotation whose frequencies are a buffer, as in Hugging Face's models."""

    def __init__(self, linear: Any, base: float = 1e4, times: float = 1.0) -> None:
        super().__init__()
        self.fc = linear(WIDTH, WIDTH)
        self.register_buffer("inv_freq", times * base ** -torch.linspace(0.0, 1.0, WIDTH // 2 + 1)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq.float()
        left, right = self.fc(x).chunk(2, -1)
        turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
        return torch.cat(turned, -1).to(x.dtype)


@in_turn(
    ("port", "title", "phrase"),
    [
        ({}, "passed", ""),
        (dict(base=5e5), "rope-base", "base 500000; give its rotary embedding the reference's base, 10000."),
        (dict(base=8.3e3), "rope-base", "inv_freq has the frequencies of base 8300; give"),
        (dict(times=0.25), "buffer-not-copied", "copy inv_freq"),
    ],
)
def test_frequencies_of_another_base_are_told_by_the_base(port, title, phrase, precision):
    tells(twins(Rotated, port, normal((2, 24, WIDTH)), precision), title, phrase)


# A parameter that is used in place of another one.


class QueryKeyNorms(nn.Module):
    """Products of queries and keys, each with its own norm."""

    def __init__(self, linear: Any, same: bool = False) -> None:
        super().__init__()
        self.query, self.key = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.query_norm, self.key_norm = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.same = same

    def forward(self, x: Tensor) -> Tensor:
        key_norm = self.query_norm if self.same else self.key_norm
        return self.query_norm(self.query(x)) * key_norm(self.key(x))


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
@pytest.mark.parametrize(("same", "title"), [(False, "passed"), (True, "no-gradient")])
def test_a_norm_that_is_used_for_both_queries_and_keys_is_told(same, title, precision):
    phrase = 'use "key_norm.weight" where the candidate uses "query_norm.weight" again' if same else ""
    tells_only(twins(QueryKeyNorms, dict(same=same), normal((2, 32, HIDDEN)), precision), title, phrase)


def test_what_all_layers_have_in_common_is_told_once():
    entries = {f"layers.{i}.fused.{kind}": f"layers.{i}.qkv.{kind}" for i in range(4) for kind in ("weight", "bias")}
    ours, theirs = (
        {name: (3 * WIDTH, WIDTH) if name.endswith("weight") else (3 * WIDTH,) for name in side}
        for side in (entries, entries.values())
    )
    rows = frozenset(ours)
    mapped = weight_maps.Mapped(entries, ours, theirs, weight_maps.Heads(4, 4, WIDTH // 4, rows))
    repairs = [one.repair for one in weight_maps.repeated_weight_hypotheses(mapped)]
    of_all = [repair for repair in repairs if "likewise" in repair and "layers.3" not in repair]
    assert any(repair.endswith('likewise for "layers.{i}.qkv.weight", "layers.{i}.qkv.bias"') for repair in of_all)
