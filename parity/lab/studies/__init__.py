"""Numerical experiments: one folder a study, one command (``parity study NAME``), one report in ``reports/studies``.

A study is a folder that ``catalogue.STUDIES`` names; its module ``study`` has

* ``Settings``, a frozen dataclass whose fields are the study's options;
* ``FULL`` and ``QUICK``, the settings of a whole run and of one that takes less than a minute;
* ``RECORD``, the name of its record in a folder, if it keeps one (``record``);
* ``run(settings, folder)``, which does what ``folder`` has no record of yet, writes the report there and returns its
  path.

Beside it lie what its report is made of (``report``, ``claims``, ``plots``) and what it alone computes with.
``training``, ``stepwise`` and the modules of this folder are what studies share.
"""
