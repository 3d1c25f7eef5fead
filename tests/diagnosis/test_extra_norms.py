"""Norms that a port alone has: TE's LayerNormLinear or LayerNormMLP where the reference has no norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN, FFN, TOKENS, LAYERS = 48, 96, 40, 2


class Layer(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def result(kind: str | None, precision: str) -> parity.Result:
    """Of a port that has this norm before ``up``, or none."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = nn.Sequential(*(Layer(nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)) for _ in range(LAYERS)))
        names: dict[Any, Any] = {name: name for name, _ in plain.named_parameters()}
        ups = [te.Linear(HIDDEN, FFN) for _ in range(LAYERS)]
        if kind is not None:
            ups = [te.LayerNormLinear(HIDDEN, FFN, normalization=kind) for _ in range(LAYERS)]
            weights, biases = ([f"{i}.up.layer_norm_{what}" for i in range(LAYERS)] for what in ("weight", "bias"))
            names[parity.constant(1.0, HIDDEN)] = parity.copies(*weights)
            if kind == "LayerNorm":
                names[parity.constant(0.0, HIDDEN)] = parity.copies(*biases)
        port = nn.Sequential(*(Layer(up, te.Linear(FFN, HIDDEN)) for up in ups))
        return parity.Pair(plain, port, lambda rng: 3.0 * rng.normal(TOKENS, HIDDEN), weights=names)

    (one,) = parity.compare(parity.Case("layers", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_norm_that_the_port_alone_has_is_told_with_its_kind(kind, precision):
    finding = result(kind, precision).findings[0]
    assert finding.title == "norm-missing"
    assert f"a {kind} comes before" in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_without_a_norm_pass(precision):
    assert result(None, precision).passed
