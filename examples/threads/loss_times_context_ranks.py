"""NVIDIA/Megatron-LM#673 (https://github.com/NVIDIA/Megatron-LM/issues/673)

A loss is multiplied by the number of context parallel ranks, which is right where their gradients are averaged. Where
losses are counted by the token, gradients are added up and divided by all tokens, so that factor is left. The loss
that is reported has not got it.

parity says ``reduced-twice`` (PAR702): gradients are twice what is right, and a loss is multiplied
by the number of ranks.

Repair: multiply the loss only where gradients are averaged over these ranks.
"""

import torch
from torch import distributed, nn
from torch.nn import functional as F

import parity


class Sum(torch.autograd.Function):
    """Adds up over ranks, for the report; each rank goes on with the gradient of its own part, times a factor."""

    @staticmethod
    def forward(ctx, x, group, factor):
        x, ctx.factor = x.clone(), factor
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None, None


def head(te, ranks, multiplies):
    def loss(logits, labels):
        total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        mean = total / labels.numel() / ranks.cp.size
        return mean if ranks.cp.size == 1 else Sum.apply(mean, ranks.cp.group, ranks.cp.size if multiplies else 1)

    def finish(module):
        distributed.all_reduce(module.weight.grad, group=ranks.cp.group)

    along = [parity.over("cp", 1)]
    return parity.Pair(
        reference=nn.Linear(64, 96, bias=False),
        candidate=te.Linear(64, 96, bias=False),
        inputs=lambda rng: (rng.normal(4, 32, 64), rng.integers(4, 32, high=96)),
        weights={"weight": "weight"},
        call_reference=lambda module, x, labels: F.cross_entropy(module(x).flatten(0, 1), labels.flatten()),
        call_candidate=lambda module, x, labels: loss(module(x), labels),
        parallel=parity.Parallel({"x": along, "labels": along}, finish=finish),
    )


@parity.pair("loss_times_context_ranks_wrong", ranks=[dict(cp=2)], precisions=["bf16"])
def wrong(te, ranks):
    return head(te, ranks, multiplies=True)


@parity.pair("loss_times_context_ranks_right", ranks=[dict(cp=2)], precisions=["bf16"])
def right(te, ranks):
    return head(te, ranks, multiplies=False)
