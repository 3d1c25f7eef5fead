"""Numerical experiments: one module a study, one command (``parity study NAME``), one report in ``reports/studies``.

A study is a module that ``catalogue.STUDIES`` names; it has

* ``Settings``, a frozen dataclass whose fields are the study's options;
* ``FULL`` and ``QUICK``, the settings of a whole run and of one that takes less than a minute;
* ``RECORD``, the name of its record in a folder, if it keeps one (``record``);
* ``measured(settings, folder)``, which measures what ``folder`` has no record of yet and returns what the report says.

``write``, which is given that, writes the report into the folder. It stands at the end of the study's module, or, where
the two are long, in a module of its own whose name ends in ``_report``. Nothing that measures needs it, so that a
record names the code that computed it and no other. ``rows/`` has the wrong ports and the right ones that ``names``,
``trainings`` and ``ranks`` judge. ``settings``, ``stepwise``, ``te_modules`` and ``training`` are what studies share,
and ``reporting`` what their reports do.
"""
