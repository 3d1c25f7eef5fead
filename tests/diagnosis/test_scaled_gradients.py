"""Gradients that are right but for one factor, though rounding moves the factor of each a little."""

import dataclasses
from functools import partial

import pytest
from torch import nn

import parity
from parity.lab.zoo.catalogue import BUGS, HOSTS
from parity.lab.zoo.planting import planted
from parity.search.localise import readable


@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_delayed"])
def test_a_loss_scale_that_was_left_in_is_told_of_all_gradients_of_a_layer(precision):
    llama = HOSTS["llama_layer"]
    wrong = planted(BUGS["gradient-left-scaled"], dataclasses.replace(llama, sizes=llama.sizes[:1]))
    (result,) = parity.compare(wrong, [precision], seeds=[1])
    assert [finding.code for finding in result.findings] == ["PAR401"]
    assert "every gradient is 12" in result.findings[0].message


class Branches(nn.Module):
    """Two linear layers, each a branch beside a residual stream; the second one's gradient may be scaled."""

    def __init__(self, linear, scale=1.0):
        super().__init__()
        self.first, self.second, self.scale = linear(64, 64), linear(64, 64), scale

    def forward(self, x):
        x = x + self.first(x)
        y = self.second(x)
        if self.scale != 1.0:
            y.register_hook(lambda gradient: self.scale * gradient)
        return x + y


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_one_layer_alone_that_are_scaled_are_told_with_the_layer(precision):
    def build(te, **_):
        linear = partial(te.Linear, init_method=nn.init.xavier_normal_)
        names = {f"{layer}.{leaf}": f"{layer}.{leaf}" for layer in ("first", "second") for leaf in ("weight", "bias")}
        return parity.Pair(Branches(nn.Linear), Branches(linear, 16.0), lambda rng: rng.normal(4, 32, 64), names)

    (result,) = parity.compare(parity.Case("branches", build, sizes=({},)), [precision])
    (finding,) = result.findings
    assert finding.code == "PAR401"
    assert "2 of 5 wrong gradients" in finding.message
    assert "16 times" in finding.message
    assert "behind second" in finding.message


def test_a_factor_near_1_of_a_single_gradient_is_no_loss_scale_and_is_written_out():
    """A subtle mistake, as another eps, may leave as much of a bias's gradient."""

    def build(te, **_):
        candidate = te.Linear(64, 64)
        candidate.bias.register_hook(lambda gradient: 1.0004 * gradient)
        names = {"weight": "weight", "bias": "bias"}
        return parity.Pair(nn.Linear(64, 64), candidate, lambda rng: rng.normal(4, 32, 64), names)

    (result,) = parity.compare(parity.Case("bias", build, sizes=({},)), ["fp32"])
    assert [finding.title for finding in result.findings] == ["unexplained"]
    assert "multiplied by 1.0004" in result.findings[0].message


@pytest.mark.parametrize(
    ("factor", "text"), [(128.0, "128"), (1 / 128, "1/128"), (1.0000421, "1.000042"), (0.99, "0.99"), (-1.0, "-1")]
)
def test_a_factor_is_written_so_that_it_can_be_told_from_one(factor, text):
    assert readable(factor) == text
