"""FP8 recipes side by side: by distribution and module, and when a tensor's magnitude jumps."""
