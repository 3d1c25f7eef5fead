"""Suggest a weight map for a pair that has none, from names and shapes, and by running both modules."""

from parity.weights.suggest.proposal import Alternative, Decision, Suggestion, suggest_map

__all__ = ["Alternative", "Decision", "Suggestion", "suggest_map"]
