"""TransformerEngine's kernels on a CPU: a ``transformer_engine_torch`` in PyTorch, and a loader for TE's Python.

One file a kernel family, named as in TE's ``csrc/extensions``, in a folder for each subject; ``extension.py`` makes one
module of them, ``versions.py`` knows how TE's versions differ, ``cuda.py`` is the GPU that is emulated.
"""
