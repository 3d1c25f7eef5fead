"""Run every check that needs a GPU, by one command into one folder: ``parity gpu-report``, ``scripts/gpu_report.sh``.

Each step is a process of its own with a time limit, so that one that fails or hangs stops no other. ``command.py``
defines and runs the steps, and draws a page with the verdict of each and links to the files that it left.
"""
