"""All that a GPU machine can tell, by one command and in one folder: ``parity gpu-report``, ``scripts/gpu_report.sh``.

Each step is a process of its own with a limit of time, so that one which fails or hangs stops no other
(``process.py``). Which steps there are stands in ``steps.py``, what they came to in ``verdicts.py``, and the page that
links it all is drawn by ``index.py``.
"""
