"""How far faithful ports stray from the rounding model, and the limits that follow.

``aim.py`` says how rare a false alarm is to be, ``law.py`` fits and extrapolates, ``table.py`` stores;
``packaged.json`` is the table that runs use by default. ``parity.lab.calibration`` measures what it holds.
"""
