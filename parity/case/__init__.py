"""Declare pairs: what a user writes of them, their sizes and weight maps, and whether all of it fits together."""
