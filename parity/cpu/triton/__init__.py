"""What takes the place of TransformerEngine's Triton kernels."""
