"""Prove a port on a checkpoint's own weights, one block of the model in memory at a time."""
