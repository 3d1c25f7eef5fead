"""The record of a run, and what is drawn from it."""
