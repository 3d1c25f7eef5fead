"""``parity throughput``: measure what a port buys: time, memory and error of the plain module and of TE's side by side.

One process makes all measurements and writes each row as soon as it has it (``measure.py``); if a kernel ends that
process, another goes on with the next workload (``command.py``), which draws the report from the rows each time.
"""
