"""Measure how far faithful ports stray from the rounding model, for the laws of ``parity.judge.limits``.

``right_ports.py`` and ``drawn_models.py`` are what is measured, ``measure.py`` draws the samples,
``report.py`` shows how well the laws fit them. ``docs/statistics.md`` explains it to its reader.
"""
