"""Which of its two passes a module is in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_BACKWARD = -1
"""Of autograd's passes, outside of each."""


@dataclass
class Phase:
    """Whether the backward pass runs; GEMM operands that the forward pass has not seen are gradients then."""

    backward: bool = False

    @property
    def differentiates(self) -> bool:
        """Whether autograd runs: the backward pass, or one that a step of training makes in the forward pass."""
        return self.backward or torch._C._current_graph_task_id() != NO_BACKWARD

    def begin_backward(self) -> None:
        self.backward = True
