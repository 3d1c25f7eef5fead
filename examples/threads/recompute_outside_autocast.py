"""NVIDIA/TransformerEngine#24 (https://github.com/NVIDIA/TransformerEngine/pull/24)

TODO
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
