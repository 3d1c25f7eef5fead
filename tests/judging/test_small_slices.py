"""Small rows, columns and heads beside large ones are judged by their own error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parity

WIDTH = 64


class Joined(nn.Module):
    """A layer's result twice, once far larger."""

    def __init__(self, layer: nn.Module, large: float, small: float, dim: int) -> None:
        super().__init__()
        self.layer, self.large, self.small, self.dim = layer, large, small, dim

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cat((y * self.large, y * self.small), self.dim)


def joined(large: float, small: float, dim: int) -> parity.Case:
    def factory(te, **_):
        return parity.Pair(
            reference=Joined(nn.Linear(WIDTH, WIDTH), large, 1.0, dim),
            candidate=Joined(te.Linear(WIDTH, WIDTH), large, small, dim),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
            inputs=lambda rng, batch: rng.normal(batch, 32, WIDTH),
        )

    return parity.Case("joined", factory, sizes=(dict(batch=4),))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["sequences", "tokens", "columns"])
@pytest.mark.parametrize(
    ("precision", "large"),
    [("fp32", 1e8), ("bf16", 1e3), ("fp8_current", 1e2)],
)
def test_a_wrong_factor_in_the_small_part_fails(precision, large, dim):
    (right,) = parity.compare(joined(large, 1.0, dim), [precision])
    assert right.status == "passed"
    for wrong in (1.5, 1.1):
        (result,) = parity.compare(joined(large, wrong, dim), [precision])
        assert result.status == "failed"
        output = next(tensor for tensor in result.tensors if tensor.kind == "output")
        assert any(check.statistic == "slice" and check.margin > 1 for check in output.checks)


class Scaled(nn.Module):
    """Scales single input features; the first weight's gradient has as many columns of other sizes."""

    def __init__(self, layer: nn.Module, factors: Tensor) -> None:
        super().__init__()
        self.layer, self.factors = layer, factors

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.factors.to(x.dtype))


@pytest.mark.parametrize(("precision", "large"), [("fp32", 1e2), ("fp32", 1e4), ("bf16", 1e1)])
def test_a_wrong_factor_in_a_small_slice_of_gradients_fails(precision, large):
    factors = torch.full((WIDTH,), large, dtype=torch.float64)
    factors[:8] = 1.0
    wrong = factors.clone()
    wrong[:8] = 1.5

    def case(used: Tensor) -> parity.Case:
        def factory(te, **_):
            return parity.Pair(
                reference=Scaled(nn.Linear(WIDTH, WIDTH), factors),
                candidate=Scaled(te.Linear(WIDTH, WIDTH), used),
                weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
                inputs=lambda rng, batch: rng.normal(batch, 32, WIDTH),
            )

        return parity.Case("scaled", factory, sizes=(dict(batch=4),))

    (right,) = parity.compare(case(factors), [precision])
    assert right.status == "passed"
    (result,) = parity.compare(case(wrong), [precision])
    failed = {tensor.label: tensor for tensor in result.tensors if not tensor.passed}
    assert {"d input", "d layer.weight"} <= set(failed)
    places = [check.where for check in failed["d layer.weight"].checks if check.statistic == "slice"]
    assert places
    assert int(places[0].removeprefix("dim 1 at ")) < 8
