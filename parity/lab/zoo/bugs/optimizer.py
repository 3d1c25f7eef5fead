"""Mistakes in the settings of TE's optimizer, and in its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from parity.case.case import Pair
from parity.lab.zoo.hosts.optimizer import SETTINGS, Trained
from parity.lab.zoo.planting import Bug, Plant

HOSTS = ("trained_linear",)


def _with(**changes: Any) -> Plant:
    """Return the port with other settings of FusedAdam."""
    return _by(lambda te, weights: te.optimizers.FusedAdam(weights, **{**SETTINGS, "master_weights": True, **changes}))


def _by(optimizer: Callable[[Any, Iterable[nn.Parameter]], Optimizer]) -> Plant:
    def plant(pair: Pair, te: Any) -> Pair:
        assert isinstance(pair.candidate, Trained)
        pair.candidate.optimizer = lambda weights: optimizer(te, weights)
        return pair

    return plant


def _with_epsilon_hat(te: Any, weights: Iterable[nn.Parameter]) -> Optimizer:
    """``(sqrt(v) + eps) / sqrt(1 - beta2**t)``, the shorter form at the end of section 2 of arXiv 1412.6980."""
    optimizer: Optimizer = te.optimizers.FusedAdam(weights, **SETTINGS, master_weights=True)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            step = group.get("step", 0) + 1
            group["eps"] = optimizer.defaults["eps"] / math.sqrt(1.0 - group["betas"][1] ** step)

    optimizer.register_step_pre_hook(before_step)
    return optimizer


BUGS = (
    Bug(
        "decay-added-to-gradient",
        "FusedAdam(adam_w_mode=False) where the reference has AdamW: the decay is divided by the second moment's root.",
        HOSTS,
        _with(adam_w_mode=False),
        "optimizer",
    ),
    Bug(
        "moments-bias-uncorrected",
        "FusedAdam(bias_correction=False): first steps are those of moments that began at 0.",
        HOSTS,
        _with(bias_correction=False),
        "optimizer",
    ),
    Bug(
        "betas-of-another-optimizer",
        "FusedAdam has the betas (0.9, 0.95), as language models are trained with, for PyTorch's (0.9, 0.999).",
        HOSTS,
        _with(betas=(0.9, 0.95)),
        "optimizer",
    ),
    Bug(
        "epsilon-before-correction",
        "The optimizer adds eps to the second moment's root before it corrects its bias (epsilon hat).",
        HOSTS,
        _by(_with_epsilon_hat),
        "optimizer",
    ),
)
