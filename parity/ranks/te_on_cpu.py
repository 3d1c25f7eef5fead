"""Import TE on the CPU kernels, so that processes that are forked afterwards need not."""

from parity import te

te.kernels("cpu")
