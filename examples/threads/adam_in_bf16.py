"""TensorAuto/OpenTau#181 (https://github.com/TensorAuto/OpenTau/issues/181)

A policy was cast to BF16 before its AdamW was made, so weights and moments were in BF16 alone. DeepSpeed had
replaced the optimizer by one with FP32 master weights, so only runs without it failed.

parity says ``master-weights`` (PAR309): weights are held in BF16 alone, which loses most of a small step.

Repair: an optimizer with FP32 master weights and moments.
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
