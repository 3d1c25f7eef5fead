"""TransformerEngine's kernels on a CPU: a ``transformer_engine_torch`` in PyTorch, and a loader for TE's Python.

One file a kernel family, named as in TE's ``csrc/extensions``; see ``extension.py`` for how they become a module.
"""
