"""Terms of a sum that a port multiplies or leaves out where its reference adds them as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN, FFN, TOKENS = 64, 96, 64


class Shared(nn.Module):
    """A routed MLP beside a shared one, as mixtures have it; returns the sum or its mean square."""

    def __init__(self, linear: Any, shared: float = 1.0, routed: float = 1.0, loss: bool = False) -> None:
        super().__init__()
        self.up, self.down = linear(HIDDEN, FFN, bias=False), linear(FFN, HIDDEN, bias=False)
        self.shared_up, self.shared_down = linear(HIDDEN, FFN, bias=False), linear(FFN, HIDDEN, bias=False)
        self.shared, self.routed, self.loss = shared, routed, loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.silu(self.up(x)))
        y = y if self.routed == 1.0 else y * self.routed
        if self.shared:
            z = self.shared_down(F.silu(self.shared_up(x)))
            y = y + (z if self.shared == 1.0 else z * self.shared)
        return y.square().mean() if self.loss else y


def found(precision: str, loss: bool = False, **port: float) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = Shared(nn.Linear, loss=loss)
        return parity.Pair(
            plain,
            Shared(te.Linear, loss=loss, **port),  # type: ignore[arg-type]
            lambda rng, tokens: rng.normal(tokens, HIDDEN),
            weights={name: name for name, _ in plain.named_parameters()},
        )

    (result,) = parity.compare(parity.Case("shared", factory, sizes=(dict(tokens=TOKENS),)), [precision])
    return result


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
@pytest.mark.parametrize("port", [dict(shared=0.5), dict(routed=2.5)])
def test_a_term_that_is_scaled_is_told_with_the_number(port, precision, loss):
    finding, *_ = found(precision, loss, **port).findings
    (number,) = port.values()
    assert finding.title == "factor"
    if precision in ("fp32", "fp16") and not loss:
        assert f"it is multiplied by {number}" in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
def test_a_term_that_is_left_out_is_told_with_its_parameters(precision):
    finding, *_ = found(precision, shared=0.0).findings
    assert finding.title == "branch-missing"
    assert "shared_down.weight, shared_up.weight" in finding.message
