"""NVIDIA/Megatron-LM#7452, finding 9 (https://github.com/NVIDIA/Megatron-LM/issues/7452)

Context parallel ranks divide a sequence whose prompt has no loss. Each rank divided the losses of its part by the
number of its own tokens that have one, and the ranks' gradients were averaged. So tokens of the rank that has the
prompt weighed more than the other's.

parity says ``shares-of-ranks`` (PAR712): by which factor the gradient is wrong on each rank.

Repair: divide by the number of tokens of all ranks.
"""

import torch
from torch import distributed, nn
from torch.nn import functional as F

import parity

PROMPT = 10


class Sum(torch.autograd.Function):
    """Adds up over ranks; each rank goes on with its own part of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def head(te, ranks, counts_all):
    def loss(logits, labels):
        total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        tokens = (labels >= 0).sum()
        if ranks.cp.size == 1:
            return total / tokens
        if counts_all:
            distributed.all_reduce(tokens, group=ranks.cp.group)
            return Sum.apply(total / tokens, ranks.cp.group)
        return Sum.apply(total / tokens / ranks.cp.size, ranks.cp.group)

    def finish(module):
        distributed.all_reduce(module.weight.grad, group=ranks.cp.group)

    def inputs(rng):
        labels = rng.integers(4, 32, high=96)
        labels[:, :PROMPT] = -100
        return rng.normal(4, 32, 64), labels

    along = [parity.over("cp", 1)]
    return parity.Pair(
        reference=nn.Linear(64, 96, bias=False),
        candidate=te.Linear(64, 96, bias=False),
        inputs=inputs,
        weights={"weight": "weight"},
        call_reference=lambda module, x, labels: F.cross_entropy(module(x).flatten(0, 1), labels.flatten()),
        call_candidate=lambda module, x, labels: loss(module(x), labels),
        parallel=parity.Parallel({"x": along, "labels": along}, finish=finish),
    )


@parity.pair("masked_loss_by_own_tokens_wrong", ranks=[dict(cp=2)], precisions=["bf16"])
def wrong(te, ranks):
    return head(te, ranks, counts_all=False)


@parity.pair("masked_loss_by_own_tokens_right", ranks=[dict(cp=2)], precisions=["bf16"])
def right(te, ranks):
    return head(te, ranks, counts_all=True)
