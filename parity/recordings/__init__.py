"""Records steps of a running training, and judges them elsewhere: stage by stage, without the candidate."""
