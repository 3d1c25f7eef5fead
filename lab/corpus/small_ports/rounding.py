"""Numbers that rounding decides, in ports that are right."""

from __future__ import annotations

from torch import nn

from lab.corpus.small import Host

# LayerNorms of constant rows subtract the mean and divide by what rounding left.
CONSTANT_ROWS = Host(
    "norm_of_constant_rows",
    lambda: nn.LayerNorm(64),
    lambda te: te.LayerNorm(64),
    lambda rng: rng.normal(8, 1).expand(8, 64).clone(),
)

PORTS = (CONSTANT_ROWS.wrong("ill-conditioned", name="rows without variance", precisions=("fp32",)),)
