"""Use weight maps: propose one for a pair, and convert checkpoints by it; see README."""
