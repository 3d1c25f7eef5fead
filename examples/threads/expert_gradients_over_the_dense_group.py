"""NVIDIA/Megatron-LM#1628 (https://github.com/NVIDIA/Megatron-LM/issues/1628)

Experts were divided over more tensor parallel ranks than the rest of the model. Their weights were not told from
others, and so their gradients were reduced over the data parallel ranks of the rest, which have other parts of them.

parity says ``parts-added-up`` (PAR711): each rank has the sum of all parts of the experts' gradients.

Repair: reduce experts' gradients over ranks that have the same part of the same experts.
"""

import torch
from torch import distributed, nn

import parity

EXPERTS, TOKENS = 2, 32


class Experts(nn.Module):
    """Gives each expert its tokens, which are sorted by expert."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 128, bias=False) for _ in range(EXPERTS))

    def forward(self, x):
        return torch.cat([expert(part) for expert, part in zip(self.experts, x.chunk(EXPERTS), strict=True)])


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


def experts(te, ranks, reduces):
    def call(module, x):
        return module(x if ranks.tp.size == 1 else Copied.apply(x, ranks.tp.group), [TOKENS] * EXPERTS)

    def finish(module):
        for weight in module.parameters() if reduces else ():
            distributed.all_reduce(weight.grad, group=ranks.tp.group)

    return parity.Pair(
        reference=Experts(),
        candidate=te.GroupedLinear(EXPERTS, 64, 128 // ranks.tp.size, bias=False),
        inputs=lambda rng: rng.normal(EXPERTS * TOKENS, 64),
        weights={f"experts.{i}.weight": f"weight{i}" for i in range(EXPERTS)},
        call_candidate=call,
        parallel=parity.Parallel(
            {"output": [parity.over("tp", -1)]},
            {f"weight{i}": [parity.over("tp", 0)] for i in range(EXPERTS)},
            finish,
        ),
    )


@parity.pair("expert_gradients_over_the_dense_group_wrong", ranks=[dict(tp=2)], precisions=["bf16"])
def wrong(te, ranks):
    return experts(te, ranks, reduces=True)


@parity.pair("expert_gradients_over_the_dense_group_right", ranks=[dict(tp=2)], precisions=["bf16"])
def right(te, ranks):
    return experts(te, ranks, reduces=False)
