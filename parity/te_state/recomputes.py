"""Modules that a backward pass computes again under another recipe than the forward pass did.

``torch.utils.checkpoint`` keeps PyTorch's own autocast for its recomputation, not TE's: the backward pass of a training
step runs after ``te.autocast`` has been left, so that the layer is computed again without quantization there, and its
gradients are those of another function. ``te.checkpoint`` enters the recipe again (``_CheckpointFunction.backward`` in
``pytorch/distributed.py`` of TE 2.20). No tolerance shows it: what is not quantized is the nearer to FP64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from parity.te_state.quantization import state_manager
from parity.watching.whose import is_of_te

_NO_BACKWARD = -1


@dataclass
class Recomputes:
    """Under which recipes each of TE's modules ran: in the forward pass, and where a backward pass ran it again."""

    _names: dict[nn.Module, str] = field(default_factory=dict)
    _forward: dict[nn.Module, set[str]] = field(default_factory=dict)
    _again: dict[nn.Module, set[str]] = field(default_factory=dict)

    def watch(self, module: nn.Module) -> None:
        """Name modules as this candidate does, which has not run yet."""
        self._names |= {part: name for name, part in module.named_modules()}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note every call of one of TE's modules inside of the context."""
        hook = register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, module: nn.Module, _: Any) -> None:
        if any(is_of_te(kind) for kind in type(module).__mro__):
            in_backward = torch._C._current_graph_task_id() != _NO_BACKWARD
            (self._again if in_backward else self._forward).setdefault(module, set()).add(_recipe())

    @property
    def otherwise(self) -> list[str]:
        """What is wrong with the first module that did not run again as it did before, and what to do; else empty."""
        for module, again in self._again.items():
            before = self._forward.get(module, again)
            if not again <= before:
                name = self._names.get(module) or type(module).__name__
                return [
                    f"{name} runs under {_listed(before)} in the forward pass, and under {_listed(again - before)} "
                    "where the backward pass computes it again, so that gradients belong to numbers that the forward "
                    "pass did not compute; use te.checkpoint in the place of torch.utils.checkpoint, or enter the same "
                    "te.autocast in the second context that its context_fn returns"
                ]
        return []


def _recipe() -> str:
    manager = state_manager()
    if manager is None or not manager.is_fp8_enabled():
        return "no recipe"
    return type(manager.get_fp8_recipe()).__name__


def _listed(recipes: set[str]) -> str:
    return " and ".join(sorted(recipes))
