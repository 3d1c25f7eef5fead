"""Parameters after some steps of torch.optim's optimizers, or of steps written by hand, against TE's or others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, normal, tells_only
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import parity

IN, OUT, TOKENS, STEPS, LR = 48, 32, 64, 3, 1e-2
INPUTS = normal((TOKENS, IN), (TOKENS, OUT))

# The reference uses an optimizer of torch.optim, the port one of TE's.


class Trained(nn.Module):
    """Trains a copy of its layer and returns the parameters; the learning rate may be halved after each step."""

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


def stepped(
    right: Callable[[Any], Any], port: Callable[[Any, Any], Any], precision: str, **reference: Any
) -> parity.Result:
    """Compare two trainings; each function makes an optimizer from parameters, the port's also from TE's module."""
    return compared(
        lambda: Trained(nn.Linear(IN, OUT), right, **reference),
        lambda te: Trained(te.Linear(IN, OUT), lambda parameters: port(te.optimizers, parameters)),
        INPUTS,
        precision,
    )


def found(
    kind: type, right: dict[str, Any], fused: str, port: dict[str, Any], precision: str, **reference: Any
) -> parity.Result:
    """Compare an optimizer of PyTorch's with one of TE's, and their settings."""
    return stepped(
        lambda parameters: kind(parameters, lr=LR, **right),
        lambda optimizers, parameters: getattr(optimizers, fused)(parameters, **{"lr": LR, **port}),
        precision,
        **reference,
    )


BFLOAT16, DECAY = torch.bfloat16, dict(weight_decay=0.1)
MOMENTUM = dict(momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "right", "fused", "port", "title", "phrase"),
    [
        (AdamW, DECAY, "FusedAdam", DECAY, "passed", ""),
        (SGD, MOMENTUM | DECAY, "FusedSGD", MOMENTUM | DECAY, "passed", ""),
        (Adam, DECAY, "FusedAdam", DECAY, "optimizer", "decouples the decay"),
        (AdamW, DECAY, "FusedAdam", dict(adam_w_mode=False, **DECAY), "optimizer", "adds the decay to the gradient"),
        (AdamW, DECAY, "FusedAdam", dict(bias_correction=False, **DECAY), "optimizer", "corrects no bias"),
        (AdamW, dict(weight_decay=1.0), "FusedAdam", {}, "optimizer", "its weight decay is 0"),
        (AdamW, {}, "FusedAdam", dict(lr=1e-3, weight_decay=0.01), "optimizer", "its learning rate is 0.001"),
        (SGD, MOMENTUM, "FusedSGD", dict(nesterov=True, **MOMENTUM), "optimizer", "has Nesterov's momentum"),
        (SGD, dict(nesterov=True, **MOMENTUM), "FusedSGD", MOMENTUM, "optimizer", "has plain momentum"),
        (SGD, MOMENTUM, "FusedSGD", dict(dampening=0.5, **MOMENTUM), "optimizer", "its dampening is 0.5"),
        (SGD, MOMENTUM, "FusedSGD", dict(momentum=0.8), "optimizer", "its momentum is 0.8"),
        (
            SGD,
            dict(weight_decay=1.0, **MOMENTUM),
            "FusedSGD",
            dict(weight_decay=1.0, wd_after_momentum=True, **MOMENTUM),
            "optimizer",
            "adds the decay after momentum",
        ),
        (
            AdamW,
            DECAY,
            "FusedAdam",
            dict(exp_avg_dtype=BFLOAT16, exp_avg_sq_dtype=BFLOAT16, **DECAY),
            "optimizer",
            "holds exp_avg and exp_avg_sq in bfloat16",
        ),
    ],
)
def test_another_setting_is_told(kind, right, fused, port, title, phrase):
    tells_only(found(kind, right, fused, port, "fp32"), title, phrase)


def test_parameters_that_fused_sgd_does_not_step_are_told():
    result = found(SGD, dict(momentum=0.9, weight_decay=1.0), "FusedSGD", dict(momentum=0.9, weight_decay=1.0), "bf16")
    assert "FusedSGD skips BF16 parameters" in result.findings[0].message


@pytest.mark.parametrize(
    ("kind", "right", "port", "precision"),
    [
        (AdamW, DECAY, DECAY, "bf16"),
        (AdamW, DECAY, DECAY, "fp16"),
        (Adam, DECAY, dict(adam_w_mode=False, **DECAY), "bf16"),
        (AdamW, dict(eps=1e-6, **DECAY), dict(eps=1e-6, **DECAY), "fp16"),
        (AdamW, DECAY, dict(master_weights=True, **DECAY), "fp16"),
        (AdamW, DECAY, dict(master_weights=True, store_param_remainders=True, **DECAY), "bf16"),
        (AdamW, DECAY, dict(master_weights=True, master_weight_dtype=torch.float16, **DECAY), "fp16"),
        (AdamW, DECAY, dict(exp_avg_dtype=BFLOAT16, exp_avg_sq_dtype=BFLOAT16, **DECAY), "bf16"),
        (AdamW, DECAY, dict(exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16, **DECAY), "fp16"),
        (AdamW, DECAY, dict(capturable=True, **DECAY), "bf16"),
    ],
)
def test_right_steps_on_16_bit_weights_pass(kind, right, port, precision):
    result = found(kind, right, "FusedAdam", port, precision)
    assert result.passed, result.findings


def test_what_weights_of_16_bits_lose_is_noted():
    result = found(Adam, DECAY, "FusedAdam", dict(adam_w_mode=False, **DECAY), "bf16")
    assert "the port's optimizer keeps weights in bfloat16, so the rounding of its steps is expected" in result.notes


def test_pytorchs_own_optimizer_may_step_on_16_bit_weights():
    result = stepped(
        lambda parameters: AdamW(parameters, lr=LR, **DECAY),
        lambda optimizers, parameters: AdamW(parameters, lr=LR, **DECAY),
        "bf16",
    )
    assert result.passed, result.findings


@pytest.mark.parametrize(
    ("port", "phrase"),
    [
        (dict(betas=(0.9, 0.95), master_weights=True, **DECAY), "beta2 is 0.95"),
        (dict(eps=1e-5, **DECAY), "its eps is 1e-05"),
    ],
)
def test_small_mistakes_are_told_in_bf16(port, phrase):
    tells_only(found(AdamW, DECAY, "FusedAdam", port, "bf16"), "optimizer", phrase)


def test_a_learning_rate_that_never_changes_is_told():
    result = found(AdamW, DECAY, "FusedAdam", DECAY, "bf16", halves=True)
    assert "learning rate stays at 0.01" in result.findings[0].message


def test_a_decay_of_all_groups_is_told():
    def groups(parameters):
        weight, bias = parameters
        return [dict(params=[weight], weight_decay=0.5), dict(params=[bias], weight_decay=0.0)]

    def decaying_all(optimizers, parameters):
        return optimizers.FusedAdam(parameters, lr=LR, weight_decay=0.5)

    result = stepped(lambda parameters: AdamW(groups(parameters), lr=LR), decaying_all, "fp32")
    assert "weight decay 0.5 for all parameters" in result.findings[0].message


def test_gradients_that_are_not_clipped_are_told():
    result = found(SGD, dict(momentum=0.9), "FusedSGD", dict(momentum=0.9), "fp16", largest_norm=0.05)
    assert "the port clips none" in result.findings[0].message


# The reference writes out its steps, and the port writes them differently or uses TE's optimizers.

Step = Callable[[int, Tensor, Tensor, dict[str, Tensor]], None]  # number, parameter, gradient, state


def adam(
    lr: float = LR,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    decoupled: bool = True,
    corrected: bool = True,
) -> Step:
    """Return a step of Adam as in the paper, which updates the parameter and the state; steps are counted from 1."""

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
) -> Step:
    """Return the same step as libraries write it: moments in place, with the correction in the step's size."""

    def step(number: int, p: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        m, v = (state.setdefault(name, torch.zeros_like(p)) for name in ("m", "v"))
        m.lerp_(gradient, 1.0 - betas[0])
        v.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])
        root = v.sqrt().div_(math.sqrt(1.0 - betas[1] ** number)).add_(eps)
        p.add_(p, alpha=-lr * decay)
        p.addcdiv_(m, root, value=-lr / (1.0 - betas[0] ** number))

    return step


def sgd(lr: float = LR, momentum: float = 0.0, decay: float = 0.0, nesterov: bool = False) -> Step:
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


class Functional(nn.Module):
    """Descends along gradients from ``torch.autograd.grad``, with new weight tensors, as in meta learning."""

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


def by_hand(right: Step, port: Step) -> parity.Result:
    """Compare two modules whose steps are written out."""
    return compared(
        lambda: ByHand(nn.Linear(IN, OUT), right), lambda te: ByHand(te.Linear(IN, OUT), port), INPUTS, "fp32"
    )


def by_fused_adam(right: Step, precision: str, **settings: Any) -> parity.Result:
    """Compare steps that are written out with those of TE's FusedAdam."""
    return compared(
        lambda: ByHand(nn.Linear(IN, OUT), right),
        lambda te: Trained(
            te.Linear(IN, OUT), lambda parameters: te.optimizers.FusedAdam(parameters, lr=LR, **settings)
        ),
        INPUTS,
        precision,
    )


TENTH = dict(decay=0.1)


@pytest.mark.parametrize(
    ("right", "port", "title", "phrase"),
    [
        (adam(**TENTH), adam(**TENTH), "passed", ""),
        (adam(**TENTH), fused_adam_like(**TENTH), "passed", ""),
        (adam(**TENTH), adam(lr=2e-2, **TENTH), "optimizer", "its learning rate is 0.02"),
        (adam(**TENTH), fused_adam_like(betas=(0.9, 0.95), **TENTH), "optimizer", "beta2 is 0.95"),
        (adam(**TENTH), adam(betas=(0.8, 0.999), **TENTH), "optimizer", "beta1 is 0.8"),
        (adam(eps=1e-4), adam(eps=1e-2), "optimizer", "its eps is 0.01"),
        (fused_adam_like(decay=0.5), adam(), "optimizer", "its weight decay is 0"),
        (adam(decay=0.5), adam(decay=0.5, decoupled=False), "optimizer", "adds the decay to the gradient"),
        (adam(decay=0.5, decoupled=False), adam(decay=0.5), "optimizer", "decouples the decay"),
        (fused_adam_like(**TENTH), adam(corrected=False, **TENTH), "optimizer", "corrects no bias"),
        (sgd(lr=1.0), sgd(lr=0.5), "optimizer", "its learning rate is 0.5"),
        (sgd(momentum=0.9, decay=0.1), sgd(momentum=0.8, decay=0.1), "optimizer", "its momentum is 0.8"),
        (sgd(momentum=0.9), sgd(momentum=0.9, nesterov=True), "optimizer", "has Nesterov's momentum"),
        (sgd(momentum=0.9, nesterov=True), sgd(momentum=0.9), "optimizer", "has plain momentum"),
    ],
)
def test_a_setting_of_steps_by_hand_is_told(right, port, title, phrase):
    tells_only(by_hand(right, port), title, phrase)


@in_turn(
    ("right", "settings", "phrase"),
    [
        (adam(decay=1.0), {}, "its weight decay is 0"),
        (fused_adam_like(decay=1.0), dict(weight_decay=1.0, bias_correction=False), "corrects no bias"),
    ],
)
def test_a_wrong_setting_of_fused_adam_is_told_where_the_reference_steps_by_hand(right, settings, phrase, precision):
    tells_only(by_fused_adam(right, precision, master_weights=True, **settings), "optimizer", phrase)


def test_moments_of_less_than_fp32_are_told_where_the_reference_steps_by_hand():
    half = dict(exp_avg_dtype=BFLOAT16, exp_avg_sq_dtype=BFLOAT16)
    result = by_fused_adam(adam(**TENTH), "fp32", **DECAY, **half)
    assert "holds exp_avg and exp_avg_sq in bfloat16" in result.findings[0].message


@pytest.mark.parametrize(
    ("port", "phrase"), [(dict(lr=0.5, momentum=0.9), "learning rate is 0.5"), (dict(lr=1.0), "its momentum is 0")]
)
def test_steps_along_gradients_that_are_asked_for_are_told(port, phrase):
    result = compared(
        lambda: Functional(nn.Linear(IN, OUT), 1.0, 0.9),
        lambda te: Functional(te.Linear(IN, OUT), **port),
        INPUTS,
        "fp32",
    )
    tells_only(result, "optimizer", phrase)
