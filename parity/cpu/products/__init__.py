"""Matrix products: plain, grouped by expert, and with the accumulation of the tensor cores."""
