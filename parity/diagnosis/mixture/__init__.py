"""Mixtures of experts in a reference, and what ports get wrong about routing."""
