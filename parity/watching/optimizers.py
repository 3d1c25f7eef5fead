"""Which optimizers a module makes steps with in its forward pass, and their settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


@dataclass
class Stepped:
    """An optimizer that makes steps.

    Attributes:
        kind: its class.
        groups: the settings of each group of parameters at its first step.
        rates: the first group's learning rate at each step.
    """

    kind: type[Optimizer]
    groups: list[dict[str, Any]]
    rates: list[float]


@contextmanager
def optimizers_recorded() -> Iterator[list[Stepped]]:
    """Appends each optimizer that makes a step inside of the context."""
    seen: list[Stepped] = []
    known: list[Optimizer] = []

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        place = next((i for i, one in enumerate(known) if one is optimizer), len(known))
        if place == len(known):
            known.append(optimizer)
            seen.append(Stepped(type(optimizer), [settings_of(group) for group in optimizer.param_groups], []))
        seen[place].rates.append(float(optimizer.param_groups[0]["lr"]))

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield seen
    finally:
        handle.remove()
        known.clear()


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer knows of a group of parameters, but for these."""
    return {name: value for name, value in group.items() if name != "params"}
