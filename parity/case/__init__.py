"""Declare pairs: what a user writes, their sizes and weight maps, and whether all of it fits together."""
