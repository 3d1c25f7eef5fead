"""Mixtures of experts: the router and its losses, tokens sent to experts and back."""
