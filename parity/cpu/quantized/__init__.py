"""FP8 and FP4: codes, scales, TE's quantized tensors, and the casts to and from them."""
