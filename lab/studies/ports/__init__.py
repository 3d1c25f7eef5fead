"""Whether ports that ``parity port`` writes are right, and mistakes planted in them are detected and named."""
