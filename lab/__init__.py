"""Measure te-parity itself: planted bugs, studies, NVIDIA's tests. Not in the wheel; ``python -m lab`` runs it."""
