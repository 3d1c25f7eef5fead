"""Numerical experiments: one module a study, one command (``parity study NAME``), one report in ``reports/studies``.

A study is a module that ``catalogue.STUDIES`` names; it has

* ``Settings``, a frozen dataclass whose fields are the study's options;
* ``FULL`` and ``QUICK``, the settings of a whole run and of one that takes less than a minute;
* ``RECORD``, the name of its record in a folder, if it keeps one (``record``);
* ``measured(settings, folder)``, which measures what ``folder`` has no record of yet and returns what the report says.

The module of the same name in ``reports/`` has ``write``, which is given that and writes the report into the folder.
The study does not import its report, so that a record names the code that computed it and no other. ``rows/`` has the
fixed tables of wrong ports and right ones that ``names``, ``trainings`` and ``ranks`` judge. ``settings``,
``stepwise``, ``te_modules`` and ``training`` are what studies share, and ``reports/shared`` what their reports do.
"""
