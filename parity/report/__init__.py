"""The record of a run, and the reports that are drawn from it."""
