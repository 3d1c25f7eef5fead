"""Run golden, the rounding model and the candidate on the same weights and inputs."""
