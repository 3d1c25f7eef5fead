"""Round to number formats, and compute golden in FP64 and the reference as a faithful kernel would round it."""
