"""Build wrong ports and right ones, for the studies that count what is detected and named."""
