"""NVIDIA/TransformerEngine#435 (https://github.com/NVIDIA/TransformerEngine/issues/435)

Under sequence parallelism each rank's norm sees a part of the sequence, and TE leaves it to the port to add the
gradients of the norm's weight up.

parity says ``reduction-missing`` (PAR701): the gradient is a part on each rank, and right once these are added up.

Repair: all-reduce it over the tensor parallel ranks, after the backward pass.
"""

from torch import distributed, nn

import parity


def norm_and_linear(te, ranks, adds_up):
    def finish(module):
        if adds_up:
            distributed.all_reduce(module.layer_norm_weight.grad, group=ranks.tp.group)

    return parity.Pair(
        reference=nn.Sequential(nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 128, bias=False)),
        candidate=te.LayerNormLinear(
            64,
            128,
            normalization="RMSNorm",
            bias=False,
            parallel_mode="column",
            tp_group=ranks.tp.group,
            tp_size=ranks.tp.size,
            sequence_parallel=ranks.sequence_parallel,
        ),
        inputs=lambda rng: rng.normal(32, 2, 64),
        weights={"0.weight": "layer_norm_weight", "1.weight": "weight"},
        parallel=parity.Parallel({"input": [parity.over("tp", 0)], "output": [parity.over("tp", -1)]}, finish=finish),
    )


@parity.pair("norm_gradient_of_a_shard_wrong", ranks=[dict(tp=2, sequence_parallel=True)], precisions=["bf16"])
def wrong(te, ranks):
    return norm_and_linear(te, ranks, adds_up=False)


@parity.pair("norm_gradient_of_a_shard_right", ranks=[dict(tp=2, sequence_parallel=True)], precisions=["bf16"])
def right(te, ranks):
    return norm_and_linear(te, ranks, adds_up=True)
