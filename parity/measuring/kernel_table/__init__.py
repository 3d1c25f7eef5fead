"""``parity kernels``: compare the CPU kernels with TransformerEngine's compiled ones, kernel by kernel.

Two processes make the same calls on the same seeded inputs, one on each kind of kernels, since a process can load
TransformerEngine for only one of them. A third compares their results (``table.py``).
"""
