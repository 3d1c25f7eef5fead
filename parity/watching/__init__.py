"""What modules do in a pass, seen from outside: calls, products, optimizers, kernels, random numbers."""
