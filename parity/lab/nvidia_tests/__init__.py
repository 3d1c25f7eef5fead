"""Run NVIDIA's own PyTorch tests of TransformerEngine on the CPU kernels; see docs/without-a-gpu.md.

``checkout`` reads from NVIDIA's scripts how they run them, ``measure`` runs them in processes that a ``host`` forks,
``plugin`` is pytest's in each, ``rules.json`` says which no CPU can run and why others fail, and ``command`` begins all
of that and draws the report.
"""
