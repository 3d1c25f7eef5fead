"""An output through which nothing flows back is seen, though its share of the gradients may be below rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.trace.effects import detached_by_candidate_alone


class WithLoss(nn.Module):
    """A layer, and a small loss beside its result, as a router's."""

    def __init__(self, layer: nn.Module, change=lambda loss: loss) -> None:
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, self.change(1e-6 * y.float().square().mean().to(y.dtype))


def compared(change, of_reference=lambda loss: loss):
    def factory(te, **_):
        return parity.Pair(
            WithLoss(nn.Linear(64, 64), of_reference),
            WithLoss(te.Linear(64, 64), change),
            inputs=lambda rng: rng.normal(32, 64),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    return parity.compare(parity.Case("with_loss", factory, sizes=({},)), ["fp32", "bf16"])


@pytest.mark.parametrize("change", [Tensor.detach, lambda loss: torch.tensor(loss.item()).to(loss)])
def test_a_loss_that_is_detached_beside_other_outputs_is_an_error(change):
    for result in compared(change):
        assert result.status == "error"
        assert result.reason.startswith("output[1] of the candidate has no gradient, where the reference's has one")


def test_one_that_the_reference_detaches_too_is_right():
    assert {result.status for result in compared(Tensor.detach, of_reference=Tensor.detach)} == {"passed"}


def test_one_that_the_reference_alone_detaches_is_right():
    assert {result.status for result in compared(lambda loss: loss, of_reference=Tensor.detach)} == {"passed"}


def test_several_are_told_together():
    assert detached_by_candidate_alone([], ["output[0]", "output[2]"]).startswith(
        "output[0], output[2] of the candidate have no gradient"
    )
