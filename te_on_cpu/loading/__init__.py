"""Load TransformerEngine's own Python, and run a user's script, so that they compute on the CPU."""
