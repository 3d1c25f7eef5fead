"""How TransformerEngine's own Python, and a user's script, are read so that they compute on the CPU."""
