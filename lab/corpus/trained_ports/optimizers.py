"""Trainings whose port has its own optimizer, or whose weights are quantized or written by other code."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from parity.case.case import Pair, Training
from parity.case.training import ADAM, Model


class Lion(Optimizer):
    """Step by the sign of a moving average of gradients, with FP32 copies of 16-bit weights under a name of its own.

    The algorithm is that of Chen et al., *Symbolic Discovery of Optimization Algorithms*, 2023.
    """

    def __init__(self, parameters: Iterable[Any], **settings: Any) -> None:
        """Take the parameters, or groups of them, and ``lr``, ``betas`` and ``weight_decay``."""
        super().__init__(parameters, dict(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1) | settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self._step(one, one.grad, **{key: group[key] for key in self.defaults})

    def _step(self, one: Tensor, gradient: Tensor, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        state = self.state[one]
        if not state:
            wide = torch.promote_types(one.dtype, torch.float32)
            state["weights_in_fp32"] = one.detach().to(wide, copy=True)
            state["average"] = torch.zeros_like(one, dtype=wide)
        weights, average, gradient = state["weights_in_fp32"], state["average"], gradient.to(state["average"])
        mixed = betas[0] * average + (1.0 - betas[0]) * gradient
        weights.mul_(1.0 - lr * weight_decay).sub_(lr * mixed.sign())
        average.mul_(betas[1]).add_(gradient, alpha=1.0 - betas[1])
        one.copy_(weights)


def lion(**settings: Any) -> Callable[[ModuleType], Training]:
    """Return a training by Lion whose candidate has other settings than the reference."""
    return lambda te: Training(
        lambda model: Lion(model.parameters()), lambda model: Lion(model.parameters(), **settings)
    )


class Muon(Optimizer):
    """Step matrices by the orthogonal matrix nearest to a moving sum of gradients, and vectors by that sum.

    The algorithm is that of Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024, with a
    singular value decomposition instead of its iteration. 16-bit weights have FP32 copies.
    """

    def __init__(self, parameters: Iterable[Any], **settings: Any) -> None:
        """Take the parameters, or groups of them, and ``lr``, ``momentum`` and ``weight_decay``."""
        super().__init__(parameters, dict(lr=1e-2, momentum=0.9, weight_decay=0.1) | settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state, wide = self.state[one], torch.promote_types(one.dtype, torch.float32)
                if not state:
                    state["copy"], state["sum"] = one.detach().to(wide, copy=True), torch.zeros_like(one, dtype=wide)
                state["sum"].mul_(group["momentum"]).add_(one.grad)
                along = state["sum"]
                if along.dim() == 2:
                    u, _, v = torch.linalg.svd(along, full_matrices=False)
                    along = u @ v
                state["copy"].mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * along)
                one.copy_(state["copy"])


def muon(te: ModuleType) -> Training:
    """Return a training in which both sides step each matrix as a whole."""
    return Training(lambda model: Muon(model.parameters()), lambda model: Muon(model.parameters()))


def adagrad(te: ModuleType) -> Training:
    """Return a training by an optimizer that makes its state, in the parameters' shapes, before its first step."""
    return Training(lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2), None)


def remainders(te: ModuleType) -> Training:
    """Return a training by TE's FusedAdam that only keeps those bits of master weights that BF16 drops."""

    def make(model: nn.Module) -> Optimizer:
        narrow = next(model.parameters()).dtype is not torch.float32
        fused: Optimizer = te.optimizers.FusedAdam(
            model.parameters(), **ADAM, master_weights=narrow, store_param_remainders=True
        )
        return fused

    return Training(lambda model: AdamW(model.parameters(), **ADAM), make)


def groups_exchanged(te: ModuleType) -> Training:
    """Decay the norms and biases instead of the matrices."""

    def groups(model: nn.Module, of_matrices: float, of_others: float) -> list[dict[str, Any]]:
        matrices = [one for one in model.parameters() if one.dim() > 1]
        others = [one for one in model.parameters() if one.dim() < 2]
        return [dict(params=matrices, weight_decay=of_matrices), dict(params=others, weight_decay=of_others)]

    def make(model: nn.Module) -> Optimizer:
        narrow = next(model.parameters()).dtype is not torch.float32
        fused: Optimizer = te.optimizers.FusedAdam(groups(model, 0.0, 0.1), **ADAM, master_weights=narrow)
        return fused

    return Training(lambda model: AdamW(groups(model, 0.1, 0.0), **ADAM), make)


class Averaging:
    """Continue training with moving averages of the weights, which are meant for evaluation."""

    def __init__(self) -> None:
        self.averages: list[Tensor] = []

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Make a right step, and leave the averages in the module."""
        optimizer.zero_grad()
        loss = model.loss(x)
        loss.backward()
        optimizer.step()
        weights = [one.detach() for one in model.parameters()]
        self.averages = self.averages or [one.float().clone() for one in weights]
        for one, average in zip(weights, self.averages, strict=True):
            one.copy_(average.lerp_(one.float(), 0.1))
        return loss


# A port whose weight matrices are held quantized, by ``te.quantized_model_init``.


RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""The recipe of each precision in which TE holds parameters."""


def quantized(precision: str, pair: Pair, te: ModuleType, make: Callable[[], nn.Module]) -> Pair:
    """Return the pair with a new candidate, which is made with quantized parameters."""
    recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), RECIPES[precision])
    with te.quantized_model_init(enabled=True, recipe=recipe()):
        return dataclasses.replace(pair, candidate=make())


def fused_adam(te: ModuleType) -> Callable[[nn.Module], Optimizer]:
    """Return a function that makes TE's Adam with FP32 master weights."""

    def make(model: nn.Module) -> Optimizer:
        made: Optimizer = te.optimizers.FusedAdam(model.parameters(), **ADAM, master_weights=True)
        return made

    return make


def with_caches(te: ModuleType) -> Training:
    """Step FP8 parameters by TE's Adam, and leave their transposes as they are."""
    return Training(candidate_optimizer=fused_adam(te))


def caches_reset(te: ModuleType, by: str = "_reset_caches") -> Training:
    """Step FP8 parameters by TE's Adam, and renew their transposes by one of their methods."""

    def step(model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(x)
        loss.backward()
        optimizer.step()
        for one in model.parameters():
            made_again = getattr(one, by, None)
            if made_again is not None:
                made_again()
        return loss

    return Training(candidate_optimizer=fused_adam(te), candidate_step=step)


class Copies:
    """Step FP32 copies of quantized parameters.

    Attributes:
        copies: the copies, in the order of the module's parameters.
        is_written: which copies are written to their parameters after each step.
    """

    def __init__(self, is_written: Callable[[nn.Parameter], bool] = lambda one: True) -> None:
        self.copies: list[nn.Parameter] = []
        self.is_written = is_written

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the copies and their optimizer."""
        self.copies = [nn.Parameter(one.detach().float().clone()) for one in model.parameters()]
        return AdamW(self.copies, **ADAM)

    def __call__(self, model: Model, optimizer: Optimizer, x: Tensor) -> Tensor:
        """Make a step."""
        pairs = list(zip(model.parameters(), self.copies, strict=True))
        self._clear(one for one, _ in pairs)
        loss = model.loss(x)
        loss.backward()
        with torch.no_grad():
            for one, copy in pairs:
                copy.grad = None if one.grad is None else one.grad.float()
            optimizer.step()
            for one, copy in pairs:
                if self.is_written(copy):
                    one.copy_(copy)
        return loss

    def _clear(self, parameters: Iterable[nn.Parameter]) -> None:
        for one in parameters:
            one.grad = None


def copied(is_written: Callable[[nn.Parameter], bool] = lambda one: True) -> Callable[[ModuleType], Training]:
    """Return a training of copies, which are written to the parameters for which ``is_written`` is true."""

    def training(te: ModuleType) -> Training:
        own = Copies(is_written)
        return Training(candidate_optimizer=own.optimizer, candidate_step=own)

    return training
