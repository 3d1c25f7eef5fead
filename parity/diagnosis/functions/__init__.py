"""Single functions of a reference, and ports that have others: activations, factors, biases, lookups."""
