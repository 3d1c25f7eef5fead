"""Parameters after some steps of an optimizer: TE's against ``torch.optim``'s of another kind or other settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import parity

IN, OUT, TOKENS, STEPS, LR = 48, 32, 64, 3, 1e-2


class Trained(nn.Module):
    """Trains a copy of its layer and returns the parameters."""

    def __init__(self, layer: nn.Module, optimizer: Callable[[list[nn.Parameter]], Any]) -> None:
        super().__init__()
        self.layer, self.optimizer = layer, optimizer

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        layer = copy.deepcopy(self.layer)
        optimizer = self.optimizer(list(layer.parameters()))
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.enable_grad():
                (layer(x) - target).square().mean().backward()
            optimizer.step()
        return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def found(kind: type, right: dict[str, Any], fused: str, port: dict[str, Any], precision: str) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        of_te = getattr(te.optimizers, fused)
        return parity.Pair(
            Trained(nn.Linear(IN, OUT), lambda parameters: kind(parameters, lr=LR, **right)),
            Trained(te.Linear(IN, OUT), lambda parameters: of_te(parameters, **{"lr": LR, **port})),
            lambda rng: (rng.normal(TOKENS, IN), rng.normal(TOKENS, OUT)),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    (result,) = parity.compare(parity.Case("trained", factory, sizes=({},)), [precision])
    return result


def test_right_optimizers_pass():
    assert found(AdamW, dict(weight_decay=0.1), "FusedAdam", dict(weight_decay=0.1), "fp32").passed
    right = dict(momentum=0.9, weight_decay=0.1)
    assert found(SGD, right, "FusedSGD", right, "fp32").passed


@pytest.mark.parametrize(
    ("kind", "right", "fused", "port", "told"),
    [
        (Adam, dict(weight_decay=0.1), "FusedAdam", dict(weight_decay=0.1), "decouples the decay"),
        (
            AdamW,
            dict(weight_decay=0.1),
            "FusedAdam",
            dict(weight_decay=0.1, adam_w_mode=False),
            "adds the decay to the gradient",
        ),
        (AdamW, dict(weight_decay=0.1), "FusedAdam", dict(weight_decay=0.1, bias_correction=False), "corrects no bias"),
        (AdamW, dict(weight_decay=1.0), "FusedAdam", dict(), "its weight decay is 0"),
        (AdamW, dict(), "FusedAdam", dict(lr=1e-3, weight_decay=0.01), "its learning rate is 0.001"),
        (SGD, dict(momentum=0.9), "FusedSGD", dict(momentum=0.9, nesterov=True), "has Nesterov's momentum"),
        (SGD, dict(momentum=0.9, nesterov=True), "FusedSGD", dict(momentum=0.9), "has plain momentum"),
        (SGD, dict(momentum=0.9), "FusedSGD", dict(momentum=0.9, dampening=0.5), "its dampening is 0.5"),
        (SGD, dict(momentum=0.9), "FusedSGD", dict(momentum=0.8), "its momentum is 0.8"),
        (
            SGD,
            dict(momentum=0.9, weight_decay=1.0),
            "FusedSGD",
            dict(momentum=0.9, weight_decay=1.0, wd_after_momentum=True),
            "adds the decay after momentum",
        ),
    ],
)
def test_what_differs_is_told(kind, right, fused, port, told):
    result = found(kind, right, fused, port, "fp32")
    assert [finding.title for finding in result.findings] == ["optimizer"]
    assert told in result.findings[0].message


def test_parameters_that_fused_sgd_does_not_step_are_told():
    result = found(SGD, dict(momentum=0.9, weight_decay=1.0), "FusedSGD", dict(momentum=0.9, weight_decay=1.0), "bf16")
    assert "FusedSGD skips BF16 parameters" in result.findings[0].message
