"""All that a GPU machine can tell, by one command and in one folder: ``parity gpu-report``, ``scripts/gpu_report.sh``.

Each step is a process of its own with a limit of time, so that one which fails or hangs stops no other
(``step.py``). Which steps there are stands in ``steps.py``, and the page that links it all, with what they
came to, is drawn by ``index.py``.
"""
