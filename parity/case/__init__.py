"""What a user declares: pairs, their sizes and weight maps, and whether all of it fits together."""
