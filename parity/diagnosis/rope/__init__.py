"""Rotary embeddings in a reference, and what ports get wrong about them."""
