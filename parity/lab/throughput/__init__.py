"""``parity throughput``: measure what a port buys: time, memory and error of the plain module and of TE's side by side.

One process makes all measurements and writes each row as soon as it has it (``measure.py``); if a kernel ends that
process, another goes on with the next workload (``command.py``). The report is drawn from the rows (``report.py``).
"""
