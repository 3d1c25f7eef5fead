"""Run golden, the rounding model and the candidate over the same numbers."""
