"""LSTMs by their steps: on a CPU PyTorch has one kernel for all of a layer in FP32, and none in FP16.

The kernel (``mkldnn_rnn_layer``) shows nothing of what it computes, so the rounding model could put no rounding in. By
its steps an LSTM is products, sums, sigmoids and tangents like a GRU, which each dtype computes so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import rnn

_FUNCTIONS: Any = rnn._VF
_MKLDNN: Any = torch.backends.mkldnn


@contextmanager
def step_by_step() -> Iterator[None]:
    """Within the context ``nn.LSTM`` calls no kernel of a whole layer on a CPU."""
    whole = _FUNCTIONS.lstm

    def by_steps(*args: Any) -> Any:
        before = _MKLDNN.enabled
        _MKLDNN.enabled = False
        try:
            return whole(*args)
        finally:
            _MKLDNN.enabled = before

    _FUNCTIONS.lstm = by_steps
    try:
        yield
    finally:
        _FUNCTIONS.lstm = whole
