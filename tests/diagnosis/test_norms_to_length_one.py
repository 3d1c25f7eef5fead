"""Norms that give each row the length 1, which TE calls L2Normalization: left out, or mistaken for RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, OUT, ROWS = 32, 48, 40


class Projected(nn.Module):
    """A linear layer of what a function returns."""

    def __init__(self, function: Callable[[Tensor], Tensor], linear: nn.Module) -> None:
        super().__init__()
        self.function, self.linear = function, linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))


def to_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def to_mean_square_one(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def normalized(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def compared(reference: Callable[[Tensor], Tensor], candidate: Callable[[Any], Any], precision: str) -> parity.Result:
    """The candidate's norm is one of TE's operations, from its module of operations."""

    def factory(te: Any) -> parity.Pair:
        return parity.Pair(
            Projected(reference, nn.Linear(WIDTH, OUT)),
            Projected(candidate(te.ops), te.Linear(WIDTH, OUT)),
            lambda rng: rng.normal(ROWS, WIDTH),
            {"linear.weight": "linear.weight", "linear.bias": "linear.bias"},
        )

    (result,) = parity.compare(parity.Case("projected", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("norm", "eps"), [(to_length_one, 1e-6), (normalized, 1e-24)], ids=["formula", "F.normalize"])
class TestOfLengthOne:
    def test_tes_passes(self, norm, eps, precision):
        assert compared(norm, lambda ops: ops.L2Normalization(eps=eps), precision).passed

    def test_one_that_is_left_out_is_told(self, norm, eps, precision):
        (finding,) = compared(norm, lambda ops: ops.Identity(), precision).findings
        assert finding.title == "norm-missing"

    def test_rms_norm_in_its_place_is_told(self, norm, eps, precision):
        (finding,) = compared(norm, lambda ops: to_mean_square_one, precision).findings
        assert finding.title == "norm-kind"
        assert "give TE L2Normalization" in finding.message


def test_tes_default_eps_in_the_place_of_pytorchs_is_told():
    (finding,) = compared(normalized, lambda ops: ops.L2Normalization(), "fp32").findings
    assert finding.title == "norm-eps"
    assert "1e-24" in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tes_l2_normalization_in_the_place_of_rms_norm_is_told(precision):
    (finding,) = compared(to_mean_square_one, lambda ops: ops.L2Normalization(), precision).findings
    assert finding.title == "norm-kind"
    assert "give TE RMSNorm" in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_heads_that_the_port_does_not_normalize_are_told(precision):
    def factory(te: Any) -> parity.Pair:
        port = te.MultiheadAttention(
            WIDTH, 2, attention_dropout=0.0, attn_mask_type="no_mask", qkv_format="bshd", input_layernorm=False
        )
        names = ("query", "key", "value")
        weights = {f"{name}.{kind}": f"qkv.{name}_{kind}" for name in names for kind in ("weight", "bias")}
        weights |= {f"out.{kind}": f"proj.{kind}" for kind in ("weight", "bias")}
        return parity.Pair(NormedHeads(), port, lambda rng: rng.normal(2, ROWS, WIDTH), weights)

    (result,) = parity.compare(parity.Case("heads", factory, sizes=({},)), [precision])
    (finding,) = result.findings
    assert finding.title == "norm-missing"


class NormedHeads(nn.Module):
    """Attention with two heads, whose queries and keys get the length 1 (``qk_norm_type="L2Normalization"``)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(to_length_one(query), to_length_one(key), value)
        return self.out(context.transpose(1, 2).flatten(2))
