"""Numerical experiments: one folder a study, one command (``parity study NAME``), one report in ``reports/studies``.

A study is a folder that ``catalogue.STUDIES`` names; its module ``study`` has

* ``Settings``, a frozen dataclass whose fields are the study's options;
* ``FULL`` and ``QUICK``, the settings of a whole run and of one that takes less than a minute;
* ``RECORD``, the name of its record in a folder, if it keeps one (``record``);
* ``measured(settings, folder)``, which measures what ``folder`` has no record of yet and returns what the report says.

Beside it lies ``report``, whose ``write`` is given that and writes the report into the folder. The study does not
import the report, so that a record names the code that computed it and no other. The modules of this folder are what
studies share; ``reporting`` is for their reports alone.
"""
