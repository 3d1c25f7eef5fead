"""Which of its two passes a module is in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Phase:
    """Whether the backward pass runs; GEMM operands that the forward pass has not seen are gradients then."""

    backward: bool = False

    def begin_backward(self) -> None:
        self.backward = True
