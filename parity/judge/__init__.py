"""Turn tensors into a verdict: statistics, limits, matched filters, and a second look at failures."""
