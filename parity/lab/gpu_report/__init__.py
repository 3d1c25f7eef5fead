"""All that a GPU machine can tell, by one command and in one folder: ``parity gpu-report``, ``scripts/gpu_report.sh``.

Each step is a process of its own with a limit of time, so that one which fails or hangs stops no other
(``steps.py``). ``command.py`` runs them and draws the page that links what they left, with what each came to.
"""
