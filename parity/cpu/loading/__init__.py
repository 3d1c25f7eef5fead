"""Read TransformerEngine's own Python, and a user's script, so that they compute on the CPU."""
