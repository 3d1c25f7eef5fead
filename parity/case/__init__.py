"""Declare pairs with their sizes and weight maps, and check that everything fits together."""
