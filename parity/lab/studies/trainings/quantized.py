"""Trainings whose port holds its weight matrices quantized, by ``te.quantized_model_init``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from parity.case.case import Pair, Training
from parity.case.training import ADAM, Model

RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""The recipe of each precision in which TE holds parameters."""


def quantized(precision: str, pair: Pair, te: ModuleType, make: Callable[[], nn.Module]) -> Pair:
    """Return the pair with another candidate, which is made with quantized parameters."""
    recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), RECIPES[precision])
    with te.quantized_model_init(enabled=True, recipe=recipe()):
        return dataclasses.replace(pair, candidate=make())


def fused_adam(te: ModuleType) -> Callable[[nn.Module], Optimizer]:
    """Return what makes TE's Adam with FP32 master weights."""

    def make(model: nn.Module) -> Optimizer:
        made: Optimizer = te.optimizers.FusedAdam(model.parameters(), **ADAM, master_weights=True)
        return made

    return make


def with_caches(te: ModuleType) -> Training:
    """Step FP8 parameters by TE's Adam, and leave their transposes as they are."""
    return Training(candidate_optimizer=fused_adam(te))


def caches_reset(te: ModuleType, by: str = "_reset_caches") -> Training:
    """Step FP8 parameters by TE's Adam, and have their transposes made again by one of their methods."""

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
    """Steps FP32 copies of quantized parameters.

    Attributes:
        copies: in the order of the module's parameters.
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
    """Return a training of copies, which are written to parameters where ``is_written`` says so."""

    def training(te: ModuleType) -> Training:
        own = Copies(is_written)
        return Training(candidate_optimizer=own.optimizer, candidate_step=own)

    return training
