"""LSTMs by their steps: on a CPU PyTorch has one kernel for all of a layer in FP32, and none in FP16.

The kernel (``mkldnn_rnn_layer``) shows nothing of what it computes, so the rounding model could put no rounding in. By
its steps an LSTM is products, sums, sigmoids and tangents like a GRU, which each dtype computes so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_MKLDNN: Any = torch.backends.mkldnn


@contextmanager
def step_by_step() -> Iterator[None]:
    """Within the context ``nn.LSTM`` calls no kernel of a whole layer on a CPU.

    By hooks, which run wherever the module does: also where a checkpoint runs it again, without any mode.
    """
    before: list[bool] = []  # of the LSTMs that are running

    def enter(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.LSTM):
            before.append(_MKLDNN.enabled)
            _MKLDNN.enabled = False

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(module, nn.LSTM):
            _MKLDNN.enabled = before.pop()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
