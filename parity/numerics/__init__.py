"""Round to number formats, and compute the reference in FP64 (golden) or with the roundings of a faithful port."""
