"""NVIDIA/Megatron-LM#4495 (https://github.com/NVIDIA/Megatron-LM/pull/4495)

Sequences were padded before they were packed. A head that predicts the token after the next shifted its labels within
each sequence, at the ends that sequences have without padding. So tokens of one sequence were moved to another.

parity says ``unexplained`` (PAR501): labels are integers, in which it looks for no mistake but a shift of them all.

Repair: shift them at the ends that sequences have in the pack.
"""

import torch
from torch import nn
from torch.nn import functional as F

import parity

REAL, PADDED = (21, 27, 13), (24, 32, 16)  # tokens of each sequence, and places in the pack


def rolled(labels, lengths):
    """Move the labels of each sequence by one; the last gets none."""
    *parts, rest = labels.split([*lengths, len(labels) - sum(lengths)])
    return torch.cat([*(F.pad(part[1:], (0, 1), value=-100) for part in parts), rest])


def head(te, lengths):
    def inputs(rng):
        labels = rng.integers(sum(PADDED), high=96)
        start = 0
        for real, padded in zip(REAL, PADDED, strict=True):
            labels[start + real : start + padded] = -100
            start += padded
        return rng.normal(sum(PADDED), 64), labels

    return parity.Pair(
        reference=nn.Linear(64, 96, bias=False),
        candidate=te.Linear(64, 96, bias=False),
        inputs=inputs,
        weights={"weight": "weight"},
        call_reference=lambda module, x, labels: F.cross_entropy(module(x), rolled(labels, PADDED)),
        call_candidate=lambda module, x, labels: F.cross_entropy(module(x).float(), rolled(labels, lengths)),
    )


@parity.pair("packed_rows_rolled_at_real_ends_wrong", precisions=["bf16"])
def wrong(te):
    return head(te, REAL)


@parity.pair("packed_rows_rolled_at_real_ends_right", precisions=["bf16"])
def right(te):
    return head(te, PADDED)
