"""Pairs that are measured in no time; loaded from their file, like a user's."""

import torch
from torch import nn

import parity


@parity.pair("tiny_linear", sizes=[dict(batch=16, hidden=16)])
def tiny_linear(te, hidden, **_):
    return parity.Pair(
        reference=nn.Linear(hidden, 32),
        candidate=te.Linear(hidden, 32),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, hidden: rng.normal(batch, hidden),
    )


class Doubled(nn.Module):
    """Doubles its input; no formula knows its FLOPs."""

    def __init__(self, hidden):
        super().__init__()
        self.linear = nn.Linear(hidden, 32, bias=False)

    def forward(self, x):
        return 2 * self.linear(x)


@parity.pair("unknown_flops", sizes=[dict(batch=16, hidden=16)])
def unknown_flops(te, hidden, **_):
    return parity.Pair(
        reference=Doubled(hidden),
        candidate=te.Linear(hidden, 32, bias=False),
        weights={"linear.weight": "weight"},
        inputs=lambda rng, batch, hidden: rng.normal(batch, hidden),
        call_candidate=lambda module, x: 2 * module(x),
    )


class FloatOnly(nn.Linear):
    """A plain module that refuses BF16."""

    def forward(self, x):
        if x.dtype is torch.bfloat16:
            raise RuntimeError("no BF16 here\nand a long trace")
        return super().forward(x)


@parity.pair("refuses_bf16", sizes=[dict(batch=16, hidden=16)])
def refuses_bf16(te, hidden, **_):
    return parity.Pair(
        reference=FloatOnly(hidden, 32),
        candidate=te.Linear(hidden, 32),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng, batch, hidden: rng.normal(batch, hidden),
    )
