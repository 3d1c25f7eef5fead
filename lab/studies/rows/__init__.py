"""Build wrong ports and right ones, for the studies that count which mistakes are detected and named."""
