"""pytorch/torchtitan#2416 (https://github.com/pytorch/torchtitan/pull/2416)

Each rank has some experts, and all have the router. A rank's gradient of the routing weights comes from its own experts
alone. The router's gradient was taken for whole, so the ranks' routers drifted apart from the first step on.

parity says ``reduction-missing`` (PAR701): the router's gradient is a part on each rank, and right once these are added
up.

Repair: all-reduce it over the ranks that have experts.
"""

import torch
from torch import distributed, nn

import parity

EXPERTS = 4


class Mixture(nn.Module):
    """Adds what all experts make of a token up, weighted by its router; the first of them is expert ``first``."""

    def __init__(self, router, experts, first=0):
        super().__init__()
        self.router, self.experts, self.first = router, nn.ModuleList(experts), first

    def forward(self, x):
        weights = self.router(x).float().softmax(-1).to(x.dtype)[:, self.first :, None]
        return sum(weights[:, i] * expert(x) for i, expert in enumerate(self.experts))


class Sum(torch.autograd.Function):
    """Adds up over ranks; the gradient, which all of them have, stays."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Copied(torch.autograd.Function):
    """Hands all ranks the same, and adds the gradients of what they make of it up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def mixture(te, ranks, adds_up):
    local = EXPERTS // ranks.ep.size

    def call(module, x):
        if ranks.ep.size == 1:
            return module(x)
        return Sum.apply(module(Copied.apply(x, ranks.ep.group)), ranks.ep.group)

    def finish(module):
        if adds_up:
            distributed.all_reduce(module.router.weight.grad, group=ranks.ep.group)

    return parity.Pair(
        reference=Mixture(nn.Linear(64, EXPERTS, bias=False), (nn.Linear(64, 64, bias=False) for _ in range(EXPERTS))),
        candidate=Mixture(
            te.Linear(64, EXPERTS, bias=False),
            (te.Linear(64, 64, bias=False) for _ in range(local)),
            first=ranks.ep.rank * local,
        ),
        inputs=lambda rng: rng.normal(64, 64),
        weights={"router.weight": "router.weight"}
        | {f"experts.{i}.weight": f"experts.{i}.weight" for i in range(EXPERTS)},
        call_candidate=call,
        parallel=parity.Parallel(finish=finish),
    )


@parity.pair("router_gradient_of_own_experts_wrong", ranks=[dict(ep=2)], precisions=["bf16"])
def wrong(te, ranks):
    return mixture(te, ranks, adds_up=False)


@parity.pair("router_gradient_of_own_experts_right", ranks=[dict(ep=2)], precisions=["bf16"])
def right(te, ranks):
    return mixture(te, ranks, adds_up=True)
