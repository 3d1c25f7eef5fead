"""Numerical experiments: ``python -m lab study NAME`` runs one and writes its report to ``reports/studies``.

A study is a folder, whose docstring tells its topic, and which can be deleted. Its module ``study`` has

* ``Settings``, a frozen dataclass whose fields are the study's options;
* ``FULL`` and ``QUICK``, the settings of a full run and of a run that takes less than a minute;
* ``RECORD``, the file name of its record, if it keeps one (see ``parity.measuring.record``);
* ``measured(settings, folder)``, which measures what is missing from the record in ``folder`` and returns the results.

``write`` takes these results and writes the report into the folder. It is at the end of ``study`` or, if it is long, in
the module ``report`` beside it. The code that measures never imports it, so that a record names only the code that
computed it. ``names``, ``trainings`` and ``ranks`` judge ports of ``lab/corpus``. Studies share the modules of this
folder: ``settings``, ``stepwise``, ``te_modules`` and ``training``; reports share ``reporting``.
"""
