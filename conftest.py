"""Loads the plugin where the package is not installed, nothing else."""

pytest_plugins = ["parity.plugin"]
