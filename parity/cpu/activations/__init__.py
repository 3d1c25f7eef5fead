"""Activations: functions and their gradients, plain, gated, and scaled by row."""
