"""Run NVIDIA's own PyTorch tests of TransformerEngine on the CPU kernels; see docs/without-a-gpu.md.

``checkout`` finds out from NVIDIA's scripts how to run the tests. ``measure`` runs them in processes that a ``host``
forks, each with the pytest ``plugin``. ``rules.json`` says which tests no CPU can run and why others fail. ``command``
ties all of this together and draws the report.
"""
