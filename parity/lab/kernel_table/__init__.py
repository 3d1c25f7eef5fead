"""Compare the CPU kernels with TransformerEngine's compiled ones, kernel by kernel; the command ``parity kernels``.

Two processes make the same calls on the same seeded inputs, one on each kind of kernels, since a process can load
TransformerEngine for one of them only. A third compares what they wrote (``table.py``).
"""
