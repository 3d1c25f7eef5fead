"""Pairs passed to ``compare`` are judged by the weights they hold; weights that contradict the map are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.case.case import Rng
from parity.case.transfer import to_candidate
from parity.result import Result

te = parity.te.kernels("cpu").te
TOKENS, WIDTH, FFN, HEADS = 32, 64, 96, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([rows @ weight.T for rows, weight in zip(x.chunk(3), self.weight, strict=True)])


def tokens(rng: Rng) -> Tensor:
    return rng.normal(TOKENS, WIDTH)


def linear(**fields: Any) -> parity.Pair:
    return parity.Pair(
        nn.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH), tokens, {"weight": "weight", "bias": "bias"}, **fields
    )


def swiglu(**fields: Any) -> parity.Pair:
    return parity.Pair(
        parity.reference.SwiGLUMLP(WIDTH, FFN),
        te.LayerNormMLP(
            *(WIDTH, FFN), normalization="RMSNorm", activation="swiglu", bias=False, zero_centered_gamma=True
        ),
        tokens,
        {
            parity.shift("norm.weight", -1.0): "layer_norm_weight",
            parity.stack("gate_proj.weight", "up_proj.weight"): "fc1_weight",
            "down_proj.weight": "fc2_weight",
        },
        **fields,
    )


def attention(**fields: Any) -> parity.Pair:
    options = dict(fuse_qkv_params=True, bias=False, attention_dropout=0.0, attn_mask_type="causal")
    return parity.Pair(
        Attention(),
        te.MultiheadAttention(WIDTH, HEADS, qkv_format="bshd", **options),
        lambda rng: rng.normal(2, TOKENS, WIDTH),
        {
            parity.interleaved_qkv("q.weight", "k.weight", "v.weight", groups=HEADS, head_dim=WIDTH // HEADS): (
                "qkv.weight"
            ),
            "out.weight": "proj.weight",
        },
        **fields,
    )


def two_layers(**fields: Any) -> parity.Pair:
    names = [f"{i}.{kind}" for i in range(2) for kind in ("weight", "bias")]
    return parity.Pair(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(te.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)),
        tokens,
        {name: name for name in names},
        **fields,
    )


def experts(**fields: Any) -> parity.Pair:
    return parity.Pair(
        Experts(),
        te.GroupedLinear(3, WIDTH, WIDTH, bias=False),
        lambda rng: rng.normal(3 * 16, WIDTH),
        {"weight": parity.experts("weight0", "weight1", "weight2")},
        call_candidate=lambda module, x: module(x, [16] * 3),
        **fields,
    )


def operations(**fields: Any) -> parity.Pair:
    return parity.Pair(
        nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH)),
        te.ops.Sequential(te.ops.RMSNorm(WIDTH), te.ops.Linear(WIDTH, WIDTH)),
        tokens,
        {"0.weight": "0.weight", "1.weight": "1.weight", "1.bias": "1.bias"},
        **fields,
    )


def loaded(pair: parity.Pair, weights: Mapping[Any, Any] | None = None, without: tuple[str, ...] = ()) -> parity.Pair:
    """Perturb the reference's weights and fill the candidate through ``weights``, except for ``without``."""
    candidate = dict(pair.candidate.named_parameters())
    with torch.no_grad():
        for parameter in pair.reference.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * parameter.abs().mean())
        reference = {name: parameter.detach() for name, parameter in pair.reference.named_parameters()}
        shapes = {name: tuple(parameter.shape) for name, parameter in candidate.items()}
        for name, tensor in to_candidate(pair.weights if weights is None else weights, reference, shapes).items():
            if name not in without:
                candidate[name].copy_(tensor)
    return pair


def only(pair: parity.Pair, precision: str = "fp32") -> Result:
    (result,) = parity.compare(pair, [precision])
    return result


PAIRS: list[Callable[..., parity.Pair]] = [linear, swiglu, attention, two_layers, experts, operations]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)


@every_pair
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_as_the_map_says_pass(pair, precision) -> None:
    result = only(loaded(pair()), precision)
    assert result.passed, (result.findings, result.reason)
    assert not result.notes


@every_pair
def test_weights_that_were_never_loaded_fail(pair) -> None:
    result = only(pair())
    assert result.status == "failed"
    assert result.findings[0].code == "PAR112"
    assert "as if it had never been loaded" in result.findings[0].message


@every_pair
def test_filling_can_be_asked_for(pair) -> None:
    assert only(pair(fill=True)).passed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
@pytest.mark.parametrize(
    ("pair", "weights", "named", "explained"),
    [
        (
            swiglu,
            {parity.stack("up_proj.weight", "gate_proj.weight"): "fc1_weight"},
            ("fc1_weight",),
            ("PAR101", 'map stack("up_proj.weight", "gate_proj.weight") to "fc1_weight"'),
        ),
        (swiglu, {"norm.weight": "layer_norm_weight"}, ("layer_norm_weight",), ("PAR104",)),
        (
            attention,
            {parity.stack("q.weight", "k.weight", "v.weight"): "qkv.weight"},
            ("qkv.weight",),
            ("PAR102", 'map stack("q.weight", "k.weight", "v.weight") to "qkv.weight"'),
        ),
        (
            attention,
            {
                parity.interleaved_qkv(
                    parity.rope_halves("q.weight", head_dim=WIDTH // HEADS),
                    parity.rope_halves("k.weight", head_dim=WIDTH // HEADS),
                    "v.weight",
                    groups=HEADS,
                    head_dim=WIDTH // HEADS,
                ): "qkv.weight"
            },
            ("qkv.weight",),
            ("the right numbers in an order that no known layout has",),
        ),
        (linear, {parity.transpose("weight"): "weight"}, ('"weight"',), ("PAR103",)),
        (two_layers, {"0.weight": "1.weight", "1.weight": "0.weight"}, ("0.weight", "1.weight"), ("PAR105",)),
        (
            experts,
            {"weight": parity.experts("weight1", "weight0", "weight2")},
            ("weight0", "weight1"),
            ("PAR111",),
        ),
        (operations, {parity.transpose("1.weight"): "1.weight"}, ("1.weight",), ("PAR103",)),
    ],
)
def test_weights_of_another_layout_are_the_first_finding(pair, weights, named, explained, precision) -> None:
    made = pair()
    of_others = {left: right for left, right in made.weights.items() if right not in weights.values()}
    result = only(loaded(made, {**of_others, **weights}), precision)
    assert result.status == "failed"
    first = result.findings[0]
    assert (first.code, first.title) == ("PAR112", "weights-not-as-mapped")
    assert all(word in first.message for word in (*named, *explained)), first.message


@pytest.mark.parametrize(
    ("pair", "parameter", "told"),
    [
        (linear, "bias", '"bias" holds'),
        (swiglu, "layer_norm_weight", '"layer_norm_weight" holds 0 throughout, as when it was constructed'),
        (two_layers, "1.weight", '"1.weight" holds unrelated numbers, as if it had never been loaded'),
    ],
)
def test_one_that_was_forgotten_is_named(pair, parameter, told) -> None:
    (finding,) = only(loaded(pair(), without=(parameter,))).findings
    assert told in finding.message, finding.message
    assert finding.message.count("of its norm") == 1


def changed(change: Callable[[Tensor], Any]) -> str:
    pair = loaded(linear())
    with torch.no_grad():
        change(pair.candidate.weight)
    return only(pair).findings[0].message


def test_what_is_left_of_the_weights_is_told() -> None:
    assert '"weight" holds 0.5 times what it should' in changed(lambda weight: weight.mul_(0.5))
    assert '"weight" holds -1 times what it should' in changed(lambda weight: weight.neg_())
    assert '"weight" differs in 8 of 64 rows, from 16 to 23' in changed(lambda weight: weight[16:24].normal_())


def test_a_difference_within_what_the_precision_costs_fails_too() -> None:
    pair = loaded(linear())
    with torch.no_grad():
        pair.candidate.weight[3, 5] *= 1.01
    result = only(pair, "fp8_current")
    assert result.status == "failed"
    assert result.margin < 1.0
    assert result.findings[0].code == "PAR112"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", ["candidate", "reference", "then float"])
def test_weights_that_one_side_holds_in_16_bits_are_what_the_map_says(narrow, dtype, precision) -> None:
    pair = loaded(swiglu())
    exact = {name: parameter.detach().clone() for name, parameter in pair.reference.named_parameters()}
    if narrow == "reference":
        pair.reference.to(dtype)
        assert not torch.equal(exact["down_proj.weight"], pair.reference.down_proj.weight)
    else:
        pair.candidate.to(dtype)
    if narrow == "then float":
        pair.candidate.float()
    result = only(pair, precision)
    assert result.passed, (result.findings, result.reason)


def test_a_gain_that_the_loader_rounds_before_it_takes_1_from_it_is_right() -> None:
    pair = loaded(swiglu())
    pair.candidate.bfloat16()
    with torch.no_grad():
        pair.candidate.layer_norm_weight.copy_(pair.reference.norm.weight.bfloat16() - 1.0)
    assert only(pair).passed


def test_norms_of_ones_in_bf16_are_not_taken_for_trained_ones() -> None:
    pair = loaded(operations())
    with torch.no_grad():
        pair.reference[0].weight.copy_(1 + 0.008 * torch.randn(WIDTH))
        pair.candidate[0].weight.fill_(1.0)
    for dtype in (torch.float32, torch.bfloat16):
        pair.candidate.to(dtype)
        (finding,) = only(pair).findings
        assert '"0.weight" holds 1 throughout' in finding.message


@pytest.mark.parametrize("right", [True, False])
def test_quantized_parameters_are_compared_within_what_their_format_costs(right) -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling

    with te.quantized_model_init(enabled=True, recipe=Float8CurrentScaling()):
        candidate = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16)
    pair = parity.Pair(nn.Linear(WIDTH, WIDTH), candidate, tokens, {"weight": "weight", "bias": "bias"})
    weights = pair.weights if right else {parity.transpose("weight"): "weight", "bias": "bias"}
    result = only(loaded(pair, weights), "fp8_current")
    assert result.passed is right, (result.findings, result.reason)
    if not right:
        assert "PAR103 weight-transposed" in result.findings[0].message


def test_what_a_constant_of_the_map_stands_for_is_compared_as_well() -> None:
    def pair(bias: float) -> parity.Pair:
        made = parity.Pair(
            nn.Linear(WIDTH, WIDTH, bias=False),
            te.Linear(WIDTH, WIDTH),
            tokens,
            {"weight": "weight", parity.constant(0.0, WIDTH): "bias"},
        )
        nn.init.constant_(loaded(made).candidate.bias, bias)
        return made

    assert only(pair(0.0)).passed
    assert '"bias" holds 0.1 throughout' in only(pair(0.1)).findings[0].message


def test_a_seed_changes_only_the_inputs() -> None:
    pair = loaded(linear())
    before = pair.reference.weight.detach().clone()
    results = parity.compare(pair, ["bf16"], seeds=range(3))
    assert all(result.passed for result in results)
    assert len({result.tensors[0].errors.golden_rms for result in results}) == 3
    assert torch.equal(before, pair.reference.weight)


def test_a_function_fills_unless_it_says_that_its_modules_hold_their_weights() -> None:
    def results(fill: bool | None, load: bool) -> list[Result]:
        def factory(te: Any) -> parity.Pair:
            return loaded(swiglu(fill=fill)) if load else swiglu(fill=fill)

        return parity.compare(parity.Case("mlp", factory, sizes=({},)), ["bf16", "fp8_current"], seeds=range(2))

    assert all(result.passed for result in (*results(None, False), *results(True, False), *results(False, True)))
    assert {result.findings[0].code for result in results(False, False)} == {"PAR112"}


def test_fill_is_true_false_or_none() -> None:
    with pytest.raises(parity.UserError, match="fill must be True, False or None, not 'map'"):
        parity.compare(linear(fill="map"), ["fp32"])
