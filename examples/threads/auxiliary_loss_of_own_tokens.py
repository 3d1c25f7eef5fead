"""NVIDIA/Megatron-LM#1652 (https://github.com/NVIDIA/Megatron-LM/issues/1652)

Context parallel ranks route their tokens. The loss that balances experts was scaled by the number of a rank's own
tokens where gradients were divided by that of all ranks. So its gradient was too small by the number of ranks, and that
of the model's own loss was right.

parity says ``gradient-scale`` (PAR401): this loss counts 0.5 times instead of once.

Repair: scale it by the tokens of all ranks.
"""

import torch
from torch import distributed, nn
from torch.nn import functional as F

import parity

EXPERTS = 8


class Sum(torch.autograd.Function):
    """Adds up over ranks; each rank goes on with the gradient of its own part, times a factor."""

    @staticmethod
    def forward(ctx, x, group, factor):
        x, ctx.factor = x.clone(), factor
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None, None


def losses(logits, values, group=None, factor=1.0):
    """Return a loss of what experts make of tokens, and one that is least where all experts get as many."""
    shares = logits.float().softmax(-1)
    chosen = F.one_hot(shares.argmax(-1), EXPERTS).float().sum(0)
    sums = [(shares * values).sum(), shares.sum(0)]
    tokens = len(shares)
    if group is not None:
        tokens *= distributed.get_world_size(group)
        distributed.all_reduce(chosen, group=group)
        sums = [Sum.apply(sums[0], group, 1.0), Sum.apply(sums[1], group, factor)]
    return sums[0] / tokens, EXPERTS * (chosen / tokens) @ (sums[1] / tokens)


def router(te, ranks, counts_all):
    def finish(module):
        distributed.all_reduce(module.weight.grad, group=ranks.cp.group)

    factor = 1.0 if counts_all else 1 / ranks.cp.size
    along = [parity.over("cp", 0)]
    return parity.Pair(
        reference=nn.Linear(64, EXPERTS, bias=False),
        candidate=te.Linear(64, EXPERTS, bias=False),
        inputs=lambda rng: (rng.normal(64, 64), rng.normal(64, EXPERTS)),
        weights={"weight": "weight"},
        call_reference=lambda module, x, values: losses(module(x), values),
        call_candidate=lambda module, x, values: losses(module(x), values, ranks.cp.group, factor),
        parallel=parity.Parallel({"x": along, "values": along}, finish=finish),
    )


@parity.pair("auxiliary_loss_of_own_tokens_wrong", ranks=[dict(cp=2)], precisions=["bf16"])
def wrong(te, ranks):
    return router(te, ranks, counts_all=False)


@parity.pair("auxiliary_loss_of_own_tokens_right", ranks=[dict(cp=2)], precisions=["bf16"])
def right(te, ranks):
    return router(te, ranks, counts_all=True)
