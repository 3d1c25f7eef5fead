"""What is wrong with a weight map: what TE would hold if an entry packed its parameters otherwise."""
