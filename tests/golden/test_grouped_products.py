"""References that multiply all experts in one call of PyTorch's, which has no kernel for FP64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.numerics.golden import experts_one_by_one

ROWS, WIDTH, EXPERTS = (32, 0, 16), 64, 3

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")


class Experts(nn.Module):
    """As transformers keeps and multiplies the experts of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)  # [expert, out, in]

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor(ROWS, device=x.device).cumsum(0).int()
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


def test_products_one_by_one_are_the_grouped_product():
    x, experts = torch.randn(sum(ROWS), WIDTH), Experts()
    expected = experts(x)
    with experts_one_by_one():
        torch.testing.assert_close(experts(x), expected)
        torch.testing.assert_close(experts.double()(x.double()).float(), expected)


def test_rows_of_no_expert_are_zero():
    x = torch.randn(sum(ROWS) + 4, WIDTH)
    with experts_one_by_one():
        assert not Experts()(x)[-4:].any()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current", "fp8_block"])
def test_a_reference_with_grouped_products_is_compared(precision):
    def factory(te, **_):
        return parity.Pair(
            Experts(),
            te.GroupedLinear(EXPERTS, WIDTH, WIDTH, bias=False),
            weights={"weight": parity.experts(*(f"weight{i}" for i in range(EXPERTS)))},
            inputs=lambda rng: rng.normal(sum(ROWS), WIDTH),
            call_candidate=lambda module, x: module(x, list(ROWS)),
        )

    results = parity.compare(parity.Case("grouped", factory, sizes=({},)), [precision], seeds=range(3))
    assert [(result.status, result.reason) for result in results] == [("passed", "")] * 3
