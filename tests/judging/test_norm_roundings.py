"""A port's norms that round in 16 bits are told, unless the reference's own lines round there as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parity

WIDTH = 128
half_precision = pytest.mark.parametrize("precision", ["bf16", "fp16"])


class Norm(nn.Module):
    """An RMSNorm in lines of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


class RoundedBeforeWeight(Norm):
    """As in Hugging Face's Llama."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class StatisticsInTheDtype(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


class NotInHalfPrecision(RoundedBeforeWeight):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):
            raise RuntimeError("not implemented for half precision")
        return super().forward(x)


def result_of(reference: nn.Module, port: nn.Module, precision: str) -> parity.Result:
    te = parity.te.kernels("cpu").te
    torch.manual_seed(0)
    nn.init.uniform_(reference.weight, 0.5, 1.5)
    pair = parity.Pair(
        nn.Sequential(reference, nn.Linear(WIDTH, WIDTH, bias=False)),
        nn.Sequential(port, te.Linear(WIDTH, WIDTH, bias=False)),
        weights={"0.weight": "0.weight", "1.weight": "1.weight"},
        inputs=lambda rng: rng.normal(512, WIDTH),
        fill=True,
    )
    (result,) = parity.compare(pair, [precision])
    return result


@half_precision
@pytest.mark.parametrize(
    ("norm", "code"), [(RoundedBeforeWeight, "PAR204"), (StatisticsInTheDtype, "PAR203")], ids=["weight", "statistics"]
)
def test_a_rounding_that_the_port_alone_makes_is_told(precision, norm, code):
    result = result_of(nn.RMSNorm(WIDTH, eps=1e-5), norm(), precision)
    assert result.status == "failed"
    assert result.findings[0].code == code


@half_precision
@pytest.mark.parametrize("norm", [RoundedBeforeWeight, StatisticsInTheDtype])
def test_a_norm_that_a_port_leaves_as_the_reference_has_it_is_right(precision, norm):
    assert result_of(norm(), norm(), precision).passed


def test_a_reference_that_half_precision_cannot_run_excuses_the_ports_own_lines():
    assert result_of(NotInHalfPrecision(), RoundedBeforeWeight(), "bf16").passed
