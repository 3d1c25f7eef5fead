"""TensorAuto/OpenTau#181 (https://github.com/TensorAuto/OpenTau/issues/181)

TODO
"""

import torch
from torch import nn

import parity


def linear(te, candidate_optimizer):
    return parity.Pair(
        reference=nn.Linear(64, 64),
        candidate=te.Linear(64, 64),
        inputs=lambda rng: rng.normal(4, 32, 64),
        weights={"weight": "weight", "bias": "bias"},
        training=parity.Training(
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1),
            candidate_optimizer=candidate_optimizer,
        ),
    )


@parity.pair("adam_in_bf16_wrong", steps=2, precisions=["bf16"])
def wrong(te):
    return linear(te, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1))


@parity.pair("adam_in_bf16_right", steps=2, precisions=["bf16"])
def right(te):
    return linear(
        te, lambda model: te.optimizers.FusedAdam(model.parameters(), lr=1e-4, weight_decay=0.1, master_weights=True)
    )
