"""Whether results depend on how tokens are batched, padded, packed, cut, decoded or recomputed, and why."""
