"""How far faithful ports stray from the rounding model: measured, fitted, stored, and turned into limits.

``law.py`` fits and extrapolates, ``table.py`` stores, ``measure.py`` draws the samples, ``report.py`` shows the fit;
``packaged.json`` is the table that runs use by default. ``docs/statistics.md`` explains it to its reader.
"""
