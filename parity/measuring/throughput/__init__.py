"""``parity throughput``: measure what a port gains: time, memory and error of the plain module and of TE's module.

One process makes all measurements and writes each row as soon as it has it (``measure.py``). If a kernel kills that
process, ``command.py`` starts another, which goes on with what is left. It draws the report after each workload.
"""
