"""A call's inputs, kept so that the call can be made again on them, without drawing them, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Tape:
    """The tensors that a call drew, in their order.

    Attributes:
        kept: copies of what was drawn.
        again: what the next call gets in place of drawing; None while drawing.
    """

    kept: list[Tensor] = field(default_factory=list)
    again: list[Tensor] | None = None

    def next(self, draw: Callable[[], Tensor]) -> Tensor:
        """A tensor of the call's own, which it may write to: drawn, or what was drawn in this place before."""
        if self.again is not None:
            return self.again.pop(0)
        drawn = draw()
        self.kept.append(drawn.clone())
        return drawn

    def rewind(self) -> None:
        """Let the next call have copies of all that was drawn."""
        self.again = [tensor.clone() for tensor in self.kept]
