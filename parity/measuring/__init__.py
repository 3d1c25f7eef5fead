"""Measure what a machine's kernels do: limits, false alarms, throughput, and a whole report from a GPU; see README."""
