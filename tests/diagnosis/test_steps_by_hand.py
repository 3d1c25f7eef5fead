"""Optimizer steps that a reference writes out, and ports that step otherwise: by hand as well, or by TE's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

IN, OUT, TOKENS, STEPS, LR = 48, 32, 64, 3, 1e-2

Parameters = list[Tensor]


def adam(
    lr: float = LR,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    decoupled: bool = True,
    corrected: bool = True,
) -> Callable[[int, Tensor, Tensor, dict[str, Tensor]], None]:
    """Adam as a paper writes it: parameter and state are changed, steps are counted from 1."""

    def step(number: int, p: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        if decoupled:
            p.mul_(1.0 - lr * decay)
        else:
            gradient = gradient + decay * p
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(p)) + (1.0 - betas[0]) * gradient
        v = state["v"] = betas[1] * state.get("v", torch.zeros_like(p)) + (1.0 - betas[1]) * gradient**2
        if corrected:
            m, v = m / (1.0 - betas[0] ** number), v / (1.0 - betas[1] ** number)
        p.sub_(lr * m / (v.sqrt() + eps))

    return step


def fused_adam_like(
    lr: float = LR, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decay: float = 0.0
) -> Callable[[int, Tensor, Tensor, dict[str, Tensor]], None]:
    """The same as libraries write it: moments in place, the correction in the step's size."""

    def step(number: int, p: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        m, v = (state.setdefault(name, torch.zeros_like(p)) for name in ("m", "v"))
        m.lerp_(gradient, 1.0 - betas[0])
        v.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])
        root = v.sqrt().div_(math.sqrt(1.0 - betas[1] ** number)).add_(eps)
        p.add_(p, alpha=-lr * decay)
        p.addcdiv_(m, root, value=-lr / (1.0 - betas[0] ** number))

    return step


def sgd(
    lr: float = LR, momentum: float = 0.0, decay: float = 0.0, nesterov: bool = False
) -> Callable[[int, Tensor, Tensor, dict[str, Tensor]], None]:
    def step(number: int, p: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        gradient = gradient + decay * p
        buffer = state["buffer"] = momentum * state.get("buffer", torch.zeros_like(p)) + gradient
        p.data -= lr * (gradient + momentum * buffer if nesterov else buffer)

    return step


class ByHand(nn.Module):
    """Trains a copy of its layer and returns the parameters."""

    def __init__(self, layer: nn.Module, step: Any, steps: int = STEPS) -> None:
        super().__init__()
        self.layer, self.step, self.steps = layer, step, steps

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        layer = copy.deepcopy(self.layer)
        states: dict[str, dict[str, Tensor]] = {name: {} for name, _ in layer.named_parameters()}
        for number in range(1, self.steps + 1):
            with torch.enable_grad():
                (layer(x) - target).square().mean().backward()
            with torch.no_grad():
                for name, p in layer.named_parameters():
                    self.step(number, p, p.grad, states[name])
                    p.grad = None
        return {name: p.detach() for name, p in layer.named_parameters()}


class Fused(nn.Module):
    """The same by an optimizer of TE's."""

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
        return {name: p.detach() for name, p in layer.named_parameters()}


class Functional(nn.Module):
    """Descends along gradients that it asks for, weights in new tensors, as meta learning does; returns a result."""

    def __init__(self, layer: nn.Module, lr: float, momentum: float = 0.0) -> None:
        super().__init__()
        self.layer, self.lr, self.momentum = layer, lr, momentum

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weight, bias = (p.detach().requires_grad_() for p in (self.layer.weight, self.layer.bias))
        buffers = [0.0, 0.0]
        for _ in range(STEPS):
            with torch.enable_grad():
                loss = (F.linear(x.detach(), weight, bias) - target.detach()).square().mean()
                gradients = torch.autograd.grad(loss, [weight, bias])
            buffers = [self.momentum * b + g for b, g in zip(buffers, gradients, strict=True)]
            weight, bias = (
                (p - self.lr * b).detach().requires_grad_() for p, b in zip((weight, bias), buffers, strict=True)
            )
        return F.linear(x, weight, bias)


def compared(plain: Any, port: Callable[[Any], nn.Module], precision: str, **more: Any) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        return parity.Pair(
            plain(nn.Linear(IN, OUT)),
            port(te),
            lambda rng: (rng.normal(TOKENS, IN), rng.normal(TOKENS, OUT)),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    (result,) = parity.compare(parity.Case("by_hand", factory, sizes=({},)), [precision], **more)
    return result


def by_hand(right: Any, port: Any, precision: str, **more: Any) -> parity.Result:
    """Of two modules whose steps are written out."""
    return compared(lambda layer: ByHand(layer, right), lambda te: ByHand(te.Linear(IN, OUT), port), precision, **more)


DECAY = dict(decay=0.1)


@pytest.mark.parametrize("port", [adam, fused_adam_like])
def test_the_same_steps_written_in_two_ways_pass(port):
    assert by_hand(adam(**DECAY), port(**DECAY), "fp32").passed


@pytest.mark.parametrize(
    ("right", "port", "told"),
    [
        (adam(**DECAY), adam(lr=2e-2, **DECAY), "its learning rate is 0.02"),
        (adam(**DECAY), fused_adam_like(betas=(0.9, 0.95), **DECAY), "beta2 is 0.95"),
        (adam(**DECAY), adam(betas=(0.8, 0.999), **DECAY), "beta1 is 0.8"),
        (adam(eps=1e-4), adam(eps=1e-2), "its eps is 0.01"),
        (fused_adam_like(decay=0.5), adam(), "its weight decay is 0"),
        (adam(decay=0.5), adam(decay=0.5, decoupled=False), "adds the decay to the gradient"),
        (adam(decay=0.5, decoupled=False), adam(decay=0.5), "decouples the decay"),
        (fused_adam_like(**DECAY), adam(corrected=False, **DECAY), "corrects no bias"),
        (sgd(lr=1.0), sgd(lr=0.5), "its learning rate is 0.5"),
        (sgd(momentum=0.9, decay=0.1), sgd(momentum=0.8, decay=0.1), "its momentum is 0.8"),
        (sgd(momentum=0.9), sgd(momentum=0.9, nesterov=True), "has Nesterov's momentum"),
        (sgd(momentum=0.9, nesterov=True), sgd(momentum=0.9), "has plain momentum"),
    ],
)
def test_a_setting_of_steps_by_hand_is_told(right, port, told):
    result = by_hand(right, port, "fp32")
    assert [finding.title for finding in result.findings] == ["optimizer"]
    assert told in result.findings[0].message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("right", "optimizer", "told"),
    [
        (
            adam(decay=1.0),
            lambda te, parameters: te.optimizers.FusedAdam(parameters, lr=LR, master_weights=True),
            "its weight decay is 0",
        ),
        (
            fused_adam_like(decay=1.0),
            lambda te, parameters: te.optimizers.FusedAdam(
                parameters, lr=LR, weight_decay=1.0, bias_correction=False, master_weights=True
            ),
            "corrects no bias",
        ),
    ],
)
def test_a_wrong_setting_of_fused_adam_is_told_where_the_reference_steps_by_hand(right, optimizer, told, precision):
    result = compared(
        lambda layer: ByHand(layer, right),
        lambda te: Fused(te.Linear(IN, OUT), lambda parameters: optimizer(te, parameters)),
        precision,
    )
    assert [finding.title for finding in result.findings] == ["optimizer"]
    assert told in result.findings[0].message


def test_moments_of_less_than_fp32_are_told_where_the_reference_steps_by_hand():
    half = dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    result = compared(
        lambda layer: ByHand(layer, adam(**DECAY)),
        lambda te: Fused(
            te.Linear(IN, OUT), lambda parameters: te.optimizers.FusedAdam(parameters, lr=LR, weight_decay=0.1, **half)
        ),
        "fp32",
    )
    assert "holds exp_avg and exp_avg_sq in bfloat16" in result.findings[0].message


@pytest.mark.parametrize(
    ("port", "told"), [(dict(lr=0.5, momentum=0.9), "learning rate is 0.5"), (dict(lr=1.0), "its momentum is 0")]
)
def test_steps_along_gradients_that_are_asked_for_are_told(port, told):
    result = compared(
        lambda layer: Functional(layer, 1.0, 0.9), lambda te: Functional(te.Linear(IN, OUT), **port), "fp32"
    )
    assert [finding.title for finding in result.findings] == ["optimizer"]
    assert told in result.findings[0].message
