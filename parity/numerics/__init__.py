"""Number formats, the FP64 golden pass, and the reference as a faithful kernel would round it."""
