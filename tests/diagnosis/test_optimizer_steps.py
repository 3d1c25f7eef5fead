"""Parameters after some steps of an optimizer: TE's against ``torch.optim``'s of another kind or other settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import parity

IN, OUT, TOKENS, STEPS, LR = 48, 32, 64, 3, 1e-2


class Trained(nn.Module):
    """Trains a copy of its layer and returns the parameters; the learning rate is halved after each step, or stays."""

    def __init__(
        self,
        layer: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], Any],
        halves: bool = False,
        largest_norm: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer, self.optimizer, self.factor = layer, optimizer, 0.5 if halves else 1.0
        self.largest_norm = largest_norm

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        layer = copy.deepcopy(self.layer)
        optimizer = self.optimizer(list(layer.parameters()))
        scheduler = StepLR(optimizer, 1, self.factor)
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.enable_grad():
                (layer(x) - target).square().mean().backward()
            if self.largest_norm:
                nn.utils.clip_grad_norm_(layer.parameters(), self.largest_norm)
            optimizer.step()
            scheduler.step()
        return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def compared(
    right: Callable[[Any], Any], port: Callable[[Any, Any], Any], precision: str, **kwargs: Any
) -> parity.Result:
    """From parameters to an optimizer, the port's from TE's as well."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        return parity.Pair(
            Trained(nn.Linear(IN, OUT), right, **kwargs),
            Trained(te.Linear(IN, OUT), lambda parameters: port(te.optimizers, parameters)),
            lambda rng: (rng.normal(TOKENS, IN), rng.normal(TOKENS, OUT)),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    (result,) = parity.compare(parity.Case("trained", factory, sizes=({},)), [precision])
    return result


def found(
    kind: type, right: dict[str, Any], fused: str, port: dict[str, Any], precision: str, **kwargs: Any
) -> parity.Result:
    return compared(
        lambda parameters: kind(parameters, lr=LR, **right),
        lambda optimizers, parameters: getattr(optimizers, fused)(parameters, **{"lr": LR, **port}),
        precision,
        **kwargs,
    )


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


BFLOAT16, DECAY = torch.bfloat16, dict(weight_decay=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("kind", "right", "port"),
    [
        (AdamW, DECAY, DECAY),
        (Adam, DECAY, dict(adam_w_mode=False, **DECAY)),
        (AdamW, dict(eps=1e-6, **DECAY), dict(eps=1e-6, **DECAY)),
        (AdamW, DECAY, dict(master_weights=True, **DECAY)),
        (AdamW, DECAY, dict(master_weights=True, store_param_remainders=True, **DECAY)),
        (AdamW, DECAY, dict(master_weights=True, master_weight_dtype=torch.float16, **DECAY)),
        (AdamW, DECAY, dict(exp_avg_dtype=BFLOAT16, exp_avg_sq_dtype=BFLOAT16, **DECAY)),
        (AdamW, DECAY, dict(exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16, **DECAY)),
        (AdamW, DECAY, dict(capturable=True, **DECAY)),
    ],
)
def test_right_steps_on_16_bit_weights_pass(kind, right, port, precision):
    result = found(kind, right, "FusedAdam", port, precision)
    assert result.passed, result.findings


def test_what_weights_of_16_bits_lose_is_noted():
    result = found(Adam, DECAY, "FusedAdam", dict(adam_w_mode=False, **DECAY), "bf16")
    assert "the port's optimizer holds weights in bfloat16: what its steps round is expected" in result.notes


def test_pytorchs_own_optimizer_may_step_on_16_bit_weights():
    result = compared(
        lambda parameters: AdamW(parameters, lr=LR, **DECAY),
        lambda optimizers, parameters: AdamW(parameters, lr=LR, **DECAY),
        "bf16",
    )
    assert result.passed, result.findings


@pytest.mark.parametrize(
    ("port", "told"),
    [
        (dict(betas=(0.9, 0.95), **DECAY), "beta2 is 0.95"),
        (dict(betas=(0.9, 0.95), master_weights=True, **DECAY), "beta2 is 0.95"),
        (dict(eps=1e-5, **DECAY), "its eps is 1e-05"),
        (dict(weight_decay=0.01), "its weight decay is 0.01"),
        (dict(lr=0.9 * LR, **DECAY), "its learning rate is 0.009"),
        (dict(adam_w_mode=False, **DECAY), "adds the decay to the gradient"),
    ],
)
def test_small_mistakes_are_told_in_bf16(port, told):
    result = found(AdamW, DECAY, "FusedAdam", port, "bf16")
    assert [finding.title for finding in result.findings] == ["optimizer"]
    assert told in result.findings[0].message


def test_moments_of_less_than_fp32_are_told_in_fp32():
    port = dict(exp_avg_dtype=BFLOAT16, exp_avg_sq_dtype=BFLOAT16, **DECAY)
    result = found(AdamW, DECAY, "FusedAdam", port, "fp32")
    assert "holds exp_avg and exp_avg_sq in bfloat16" in result.findings[0].message


def test_a_learning_rate_that_never_changes_is_told():
    result = found(AdamW, DECAY, "FusedAdam", DECAY, "bf16", halves=True)
    assert "learning rate stays at 0.01" in result.findings[0].message


def test_a_decay_of_all_groups_is_told():
    def groups(parameters):
        weight, bias = parameters
        return [dict(params=[weight], weight_decay=0.5), dict(params=[bias], weight_decay=0.0)]

    def decaying_all(optimizers, parameters):
        return optimizers.FusedAdam(parameters, lr=LR, weight_decay=0.5)

    result = compared(lambda parameters: AdamW(groups(parameters), lr=LR), decaying_all, "fp32")
    assert "weight decay 0.5 for all parameters" in result.findings[0].message


def test_gradients_that_are_not_clipped_are_told():
    result = found(SGD, dict(momentum=0.9), "FusedSGD", dict(momentum=0.9), "fp16", largest_norm=0.05)
    assert "the port clips none" in result.findings[0].message
