"""Convert checkpoints by a pair's weight map, from the reference's layout to TE's and back."""

from parity.weights.conversion.conversion import convert

__all__ = ["convert"]
