"""NVIDIA-NeMo/RL#3716 (https://github.com/NVIDIA-NeMo/RL/issues/3716)

Queries are normalised head by head, with one weight for all heads. Tensor parallel ranks have some heads each, so each
has a part of that weight's gradient, also without sequence parallelism. A training step of its own left out the
function that adds such gradients up.

parity says ``reduction-missing`` (PAR701): the gradient is a part on each rank, and right once these are added up.

Repair: all-reduce it over the tensor parallel ranks.
"""

from torch import distributed, nn

import parity


class Queries(nn.Module):
    def __init__(self, project, norm):
        super().__init__()
        self.project, self.norm = project, norm

    def forward(self, x):
        return self.norm(self.project(x).unflatten(-1, (-1, 16)))


def queries(te, ranks, adds_up):
    def finish(module):
        if adds_up:
            distributed.all_reduce(module.norm.weight.grad, group=ranks.tp.group)

    column = dict(parallel_mode="column", tp_group=ranks.tp.group, tp_size=ranks.tp.size)
    return parity.Pair(
        reference=Queries(nn.Linear(64, 64, bias=False), nn.RMSNorm(16, eps=1e-6)),
        candidate=Queries(te.Linear(64, 64, bias=False, **column), te.RMSNorm(16, eps=1e-6)),
        inputs=lambda rng: rng.normal(32, 2, 64),
        weights={"project.weight": "project.weight", "norm.weight": "norm.weight"},
        parallel=parity.Parallel({"output": [parity.over("tp", 2)]}, finish=finish),
    )


@parity.pair("query_norm_of_own_heads_wrong", ranks=[dict(tp=2)], precisions=["bf16"])
def wrong(te, ranks):
    return queries(te, ranks, adds_up=False)


@parity.pair("query_norm_of_own_heads_right", ranks=[dict(tp=2)], precisions=["bf16"])
def right(te, ranks):
    return queries(te, ranks, adds_up=True)
