"""Suggest a weight map for a pair that has none, from names and shapes, and by running both modules."""

from parity.suggest.proposal import suggest_map
from parity.suggest.suggestion import Alternative, Decision, Suggestion

__all__ = ["Alternative", "Decision", "Suggestion", "suggest_map"]
