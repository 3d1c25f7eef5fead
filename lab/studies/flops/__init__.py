"""FLOPs of a layer by component, and the formulas next to PyTorch's counter on every case."""
