"""Losses in a reference, and what ports get wrong about averages and labels."""
