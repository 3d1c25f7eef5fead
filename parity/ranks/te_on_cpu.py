"""Imports TE on the CPU kernels; a process that is forked after it need not."""

from parity import te

te.kernels("cpu")
