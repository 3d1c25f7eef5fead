"""What a comparison keeps for the next one of its case, and how it is let go."""

from __future__ import annotations

from parity.directions import directions
from parity.passes import model_tensors
from parity.prepare import prepare


def forget() -> None:
    """Let go of golden, of the model's tensors, and of what each mistake would change."""
    for kept in (prepare, model_tensors, directions):
        kept.cache_clear()
