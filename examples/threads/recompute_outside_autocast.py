"""NVIDIA/TransformerEngine#24 (https://github.com/NVIDIA/TransformerEngine/pull/24)

A checkpointed module is computed again in the backward pass, after the FP8 context has been left. So the
forward pass ran in FP8, and its activations and the backward pass were in BF16; Megatron-LM#7538 is the same
elsewhere.

parity passes it, since nothing is less exact than FP8 allows, and notes ``recipe-disabled`` (PAR308): weight
gradients have less error than FP8 costs, as if part of the candidate ran without it.

Repair: ``te.checkpoint``, which enters the context again.
"""

from torch import nn
from torch.utils.checkpoint import checkpoint

import parity


def mlp(te, checkpointed):
    return parity.Pair(
        reference=nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(approximate="tanh"), nn.Linear(256, 64)),
        candidate=te.LayerNormMLP(64, 256),
        inputs=lambda rng: rng.normal(4, 32, 64),
        weights={
            "0.weight": "layer_norm_weight",
            "0.bias": "layer_norm_bias",
            "1.weight": "fc1_weight",
            "1.bias": "fc1_bias",
            "3.weight": "fc2_weight",
            "3.bias": "fc2_bias",
        },
        call_candidate=lambda module, x: checkpointed(module, x, use_reentrant=True),
    )


@parity.pair("recompute_outside_autocast_wrong", steps=2, precisions=["fp8_current"])
def wrong(te):
    return mlp(te, checkpoint)


@parity.pair("recompute_outside_autocast_right", steps=2, precisions=["fp8_current"])
def right(te):
    return mlp(te, te.checkpoint)
