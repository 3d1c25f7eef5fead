"""Optimizer steps and the kernels on lists of tensors that they use."""
