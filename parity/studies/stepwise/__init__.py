"""Baseline and flash attention with a number format for each intermediate result."""
