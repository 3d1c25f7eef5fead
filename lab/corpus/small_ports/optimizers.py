"""Parameters after some steps of torch.optim's optimizers, or of steps written by hand, against TE's or others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from lab.corpus.small import Host, normal

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


def fused(name: str, kind: type, given: dict[str, Any], port: dict[str, Any] | None = None, **schedule: Any) -> Host:
    """Return the host of an optimizer of PyTorch's, whose port is TE's fused one.

    Args:
        name: the host's name.
        kind: PyTorch's optimizer.
        given: its settings, which are the port's as well.
        port: settings of the port alone.
        schedule: what the reference's training does besides, which the port leaves out.
    """
    of_te = "FusedSGD" if kind is SGD else "FusedAdam"

    def steps(te: Any, **settings: Any) -> nn.Module:
        make = getattr(te.optimizers, of_te)
        return Trained(te.Linear(IN, OUT), lambda parameters: make(parameters, **settings))

    return Host(
        name,
        lambda **_: Trained(nn.Linear(IN, OUT), lambda parameters: kind(parameters, lr=LR, **given), **schedule),
        steps,
        INPUTS,
        {"lr": LR, **given, **(port or {})},
    )


def in_groups(parameters: list[nn.Parameter]) -> AdamW:
    weight, bias = parameters
    return AdamW([dict(params=[weight], weight_decay=0.5), dict(params=[bias], weight_decay=0.0)], lr=LR)


BFLOAT16, DECAY, ALL_DECAY = torch.bfloat16, dict(weight_decay=0.1), dict(weight_decay=1.0)
MOMENTUM = dict(momentum=0.9)
IN_BFLOAT16: dict[str, Any] = dict(exp_avg_dtype=BFLOAT16, exp_avg_sq_dtype=BFLOAT16)

ADAM = fused("adam", Adam, DECAY, dict(adam_w_mode=False))
ADAMW = fused("adamw", AdamW, DECAY)
ADAMW_OF_NO_DECAY = fused("adamw_of_no_decay", AdamW, dict(weight_decay=0.0))
ADAMW_OF_MUCH_DECAY = fused("adamw_of_much_decay", AdamW, ALL_DECAY)
SGD_WITH_MOMENTUM = fused("sgd", SGD, MOMENTUM)
NESTEROV = fused("nesterov", SGD, dict(nesterov=True, **MOMENTUM))
DECAYING_SGD = fused("decaying_sgd", SGD, ALL_DECAY | MOMENTUM)
HALVED = fused("adamw_of_halved_rate", AdamW, DECAY, halves=True)
CLIPPED = fused("clipped_sgd", SGD, MOMENTUM, largest_norm=0.05)
GROUPS = Host(
    "adamw_of_groups",
    lambda **_: Trained(nn.Linear(IN, OUT), in_groups),
    lambda te, **settings: Trained(te.Linear(IN, OUT), lambda own: te.optimizers.FusedAdam(own, lr=LR, **settings)),
    INPUTS,
)

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

    def __init__(self, layer: Any, lr: float, momentum: float = 0.0) -> None:
        super().__init__()
        self.layer, self.lr, self.momentum = layer, lr, momentum

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weight, bias = (p.detach().requires_grad_() for p in (self.layer.weight, self.layer.bias))
        buffers: list[Any] = [0.0, 0.0]
        for _ in range(STEPS):
            with torch.enable_grad():
                loss = (F.linear(x.detach(), weight, bias) - target.detach()).square().mean()
                gradients = torch.autograd.grad(loss, [weight, bias])
            buffers = [self.momentum * b + g for b, g in zip(buffers, gradients, strict=True)]
            weight, bias = (
                (p - self.lr * b).detach().requires_grad_() for p, b in zip((weight, bias), buffers, strict=True)
            )
        return F.linear(x, weight, bias)


HALF: dict[str, Any] = dict(decay=0.5)
TENTH: dict[str, Any] = dict(decay=0.1)


def by_hand(name: str, step: Step) -> Host:
    return Host(
        name,
        lambda step: ByHand(nn.Linear(IN, OUT), step),
        lambda te, step: ByHand(te.Linear(IN, OUT), step),
        INPUTS,
        dict(step=step),
    )


def by_fused_adam(name: str, step: Step) -> Host:
    """Return the host of steps that are written out, whose port takes those of TE's FusedAdam."""
    return Host(
        name,
        lambda **_: ByHand(nn.Linear(IN, OUT), step),
        lambda te, **settings: Trained(te.Linear(IN, OUT), lambda own: te.optimizers.FusedAdam(own, lr=LR, **settings)),
        INPUTS,
    )


HAND_ADAM, HAND_SGD = by_hand("adam_by_hand", adam(**TENTH)), by_hand("sgd_by_hand", sgd(momentum=0.9, decay=0.1))
HAND_NESTEROV = by_hand("nesterov_by_hand", sgd(momentum=0.9, nesterov=True))
INPLACE_ADAM = by_hand("adam_in_place_by_hand", fused_adam_like(**HALF))
HAND_COUPLED = by_hand("coupled_adam_by_hand", adam(decoupled=False, **HALF))
TO_FUSED = by_fused_adam("adam_by_hand_to_fused", adam(decay=1.0))
INPLACE_TO_FUSED = by_fused_adam("adam_in_place_to_fused", fused_adam_like(decay=1.0))
FUNCTIONAL = Host(
    "functional_sgd",
    lambda **given: Functional(nn.Linear(IN, OUT), **given),
    lambda te, **given: Functional(te.Linear(IN, OUT), **given),
    INPUTS,
    dict(lr=1.0, momentum=0.9),
)
FP32 = ("fp32",)

PORTS = (
    ADAMW.right(),
    ADAM.right(),
    DECAYING_SGD.right(precisions=FP32),
    ADAMW.right(capturable=True),
    ADAMW.right(master_weights=True),
    HAND_ADAM.right(step=fused_adam_like(**TENTH), name="in place"),
    ADAM.wrong("optimizer", "decouples the decay", adam_w_mode=True, precisions=FP32),
    ADAMW.wrong("optimizer", "adds the decay to the gradient", adam_w_mode=False, precisions=FP32),
    ADAMW.wrong("optimizer", "corrects no bias", bias_correction=False, precisions=FP32),
    ADAMW.wrong("optimizer", "beta2 is 0.95", betas=(0.9, 0.95), master_weights=True, precisions=("bf16",)),
    ADAMW.wrong("optimizer", "its eps is 1e-05", eps=1e-5, precisions=("bf16",)),
    ADAMW.wrong("optimizer", "holds exp_avg and exp_avg_sq in bfloat16", **IN_BFLOAT16, precisions=FP32),
    ADAMW_OF_MUCH_DECAY.wrong("optimizer", "its weight decay is 0", weight_decay=0.0, precisions=FP32),
    ADAMW_OF_NO_DECAY.wrong("optimizer", "its learning rate is 0.001", lr=1e-3, precisions=FP32),
    SGD_WITH_MOMENTUM.wrong("optimizer", "has Nesterov's momentum", nesterov=True, precisions=FP32),
    SGD_WITH_MOMENTUM.wrong("optimizer", "its dampening is 0.5", dampening=0.5, precisions=FP32),
    SGD_WITH_MOMENTUM.wrong("optimizer", "its momentum is 0.8", momentum=0.8, precisions=FP32),
    NESTEROV.wrong("optimizer", "has plain momentum", nesterov=False, precisions=FP32),
    DECAYING_SGD.wrong("optimizer", "adds the decay after momentum", wd_after_momentum=True, precisions=FP32),
    DECAYING_SGD.wrong("optimizer", "FusedSGD skips BF16 parameters", precisions=("bf16",), others=True, name="BF16"),
    HALVED.wrong("optimizer", "learning rate stays at 0.01", name="no schedule", precisions=("bf16",), others=True),
    CLIPPED.wrong("optimizer", "the port clips none", name="no clipping", precisions=("fp16",), others=True),
    GROUPS.wrong("optimizer", "weight decay 0.5 for all parameters", weight_decay=0.5, precisions=FP32, others=True),
    HAND_ADAM.wrong("optimizer", "its learning rate is 0.02", name="lr", step=adam(lr=2e-2, **TENTH), precisions=FP32),
    HAND_ADAM.wrong("optimizer", "beta1 is 0.8", name="beta1", step=adam(betas=(0.8, 0.999), **TENTH), precisions=FP32),
    HAND_ADAM.wrong("optimizer", "its eps is 0.01", name="eps", step=adam(eps=1e-2, **TENTH), precisions=FP32),
    INPLACE_ADAM.wrong(
        "optimizer",
        "adds the decay to the gradient",
        name="coupled decay",
        step=adam(decoupled=False, **HALF),
        precisions=FP32,
    ),
    HAND_COUPLED.wrong("optimizer", "decouples the decay", name="decoupled decay", step=adam(**HALF), precisions=FP32),
    INPLACE_ADAM.wrong("optimizer", "its weight decay is 0", name="no decay", step=adam(), precisions=FP32),
    INPLACE_ADAM.wrong(
        "optimizer", "corrects no bias", name="no correction", step=adam(corrected=False, **HALF), precisions=FP32
    ),
    HAND_SGD.wrong(
        "optimizer", "its momentum is 0.8", name="momentum", step=sgd(momentum=0.8, decay=0.1), precisions=FP32
    ),
    HAND_NESTEROV.wrong(
        "optimizer", "has plain momentum", name="plain momentum", step=sgd(momentum=0.9), precisions=FP32
    ),
    TO_FUSED.wrong("optimizer", "its weight decay is 0", weight_decay=0.0, master_weights=True),
    INPLACE_TO_FUSED.wrong(
        "optimizer", "corrects no bias", master_weights=True, bias_correction=False, weight_decay=1.0
    ),
    FUNCTIONAL.wrong("optimizer", "learning rate is 0.5", lr=0.5, precisions=FP32),
    FUNCTIONAL.wrong("optimizer", "its momentum is 0", momentum=0.0, precisions=FP32),
)
