"""Softmax in FP16, BF16 and FP32: error, overflow, gradient and cost by the size of scores."""
