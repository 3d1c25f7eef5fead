"""List wrong ports and right ones in fixed tables, for the studies that count what is detected and named."""
