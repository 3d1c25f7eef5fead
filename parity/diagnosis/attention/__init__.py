"""Attention in a reference, and what ports get wrong about it: masks, scales, heads, biases, packed sequences."""
