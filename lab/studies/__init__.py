"""Numerical experiments: ``python -m lab study NAME`` runs one and writes its report to ``reports/studies``.

A study is a module that ``catalogue.STUDIES`` lists. It has

* ``Settings``, a frozen dataclass whose fields are the study's options;
* ``FULL`` and ``QUICK``, the settings of a full run and of a run that takes less than a minute;
* ``RECORD``, the file name of its record, if it keeps one (see ``parity.measuring.record``);
* ``measured(settings, folder)``, which measures what is missing from the record in ``folder`` and returns the results.

``write`` takes these results and writes the report into the folder. It is at the end of the study's module or, in long
studies, in a separate module whose name ends in ``_report``. The code that measures never imports it, so that a record
names only the code that computed it. ``rows/`` has the wrong and right ports that ``names``, ``trainings`` and
``ranks`` judge. Studies share ``settings``, ``stepwise``, ``te_modules`` and ``training``; reports share ``reporting``.
"""
