"""A norm that has a bias in one module alone brings the other kind of norm to mind."""

from __future__ import annotations

import pytest
from torch import nn

from parity.case.map_check import check_map, other_names
from parity.case.weight_map import Shape, Side, WeightMapError, shift

RMS_NORM = 'normalization="RMSNorm"'
Shapes = dict[str, Shape]


def problem(weights: dict[Side, Side], reference: Shapes, candidate: Shapes, *others) -> str:
    with pytest.raises(WeightMapError) as caught:
        check_map(weights, reference, candidate, *others)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("weight", ["norm.weight", shift("norm.weight", -1.0)], ids=["plain", "centred"])
def test_a_bias_that_only_tes_norm_has_brings_an_rms_norm_to_mind_first(weight):
    shapes: Shapes = {"layer_norm_weight": (8,), "layer_norm_bias": (8,)}
    told = problem({weight: "layer_norm_weight"}, {"norm.weight": (8,)}, shapes)
    assert 'the reference\'s norm "norm.weight" has no bias and looks like an RMSNorm' in told
    assert 0 < told.index(RMS_NORM) < told.index("constant(0.0, 8)")


def test_a_norm_of_te_by_itself_is_recognized_by_its_shapes():
    told = problem({"gain": "norm.weight"}, {"gain": (8,)}, {"norm.weight": (8,), "norm.bias": (8,)})
    assert RMS_NORM in told


def test_a_linear_layer_without_a_bias_is_no_norm():
    told = problem({"up.weight": "weight"}, {"up.weight": (8, 8)}, {"weight": (8, 8), "bias": (8,)})
    assert RMS_NORM not in told


def test_a_layer_norm_without_a_bias_is_no_rms_norm():
    norm = nn.LayerNorm(8, bias=False)
    shapes: Shapes = {"layer_norm_weight": (8,), "layer_norm_bias": (8,)}
    told = problem({"weight": "layer_norm_weight"}, {"weight": (8,)}, shapes, other_names(norm))
    assert RMS_NORM not in told
    assert "constant(0.0, 8)" in told


def test_a_bias_that_only_the_references_norm_has_brings_a_layer_norm_to_mind():
    told = problem({"norm.weight": "norm.weight"}, {"norm.weight": (8,), "norm.bias": (8,)}, {"norm.weight": (8,)})
    assert told == (
        'reference parameter "norm.bias" (8,) is used by no entry; TE\'s "norm.weight" has no bias; '
        'is normalization="LayerNorm" meant?'
    )


def test_what_to_do_with_several_norms_is_told_once():
    names = ("attention_norm", "mlp_norm")
    norms: Shapes = {f"{name}.{kind}": (8,) for name in names for kind in ("weight", "bias")}
    with pytest.raises(WeightMapError) as caught:
        check_map({f"{name}.weight": f"{name}.weight" for name in names}, dict.fromkeys([*norms][::2], (8,)), norms)
    assert [RMS_NORM in line for line in str(caught.value).splitlines()] == [True, False]


def test_a_bias_that_was_forgotten_is_not_the_kind_of_norm():
    norm: Shapes = {"norm.weight": (8,), "norm.bias": (8,)}
    with pytest.raises(WeightMapError) as caught:
        check_map({"norm.weight": "norm.weight"}, norm, norm)
    assert "Norm" not in str(caught.value)
