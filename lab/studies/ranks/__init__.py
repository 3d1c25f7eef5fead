"""Which mistakes over ranks are detected and named, and whether right ports pass."""
