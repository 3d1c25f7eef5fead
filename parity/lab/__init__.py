"""Calibrate, measure and study parity. Only the command line imports this package, and only when it is needed."""
