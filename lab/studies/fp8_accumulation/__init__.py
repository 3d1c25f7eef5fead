"""What the short sums of a Hopper's FP8 tensor cores cost, over the length of the sum."""
