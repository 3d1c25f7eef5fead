"""Test whether TE models train as the plain models do, recipe by recipe."""
