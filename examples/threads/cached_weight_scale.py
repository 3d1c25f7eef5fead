"""NVIDIA/TransformerEngine#820 (https://github.com/NVIDIA/TransformerEngine/pull/820)

FP8 weights are cached over the micro-batches of a step, and delayed scaling replaced their scale after each
of these. So all but the first read the cached numbers by a scale with which they had not been made.

parity says ``state-between-steps`` (PAR605): the module that was trained is wrong, a new one with its weights
is not.

Repair: keep the inverse of the scale with the numbers that were made by it, as TE does since.
"""

import torch
from torch import nn

import parity


def in_micro_batches(replaces_scale):
    def step(model, optimizer, x):
        optimizer.zero_grad()
        losses = []
        for number, part in enumerate(x.chunk(4)):
            losses.append(model.loss(part, is_first_microbatch=number == 0) / 4)
            losses[-1].backward()
            if replaces_scale:
                module = model.module
                module._fp8_workspaces["weight"]._scale_inv.copy_(1 / module.fp8_meta["scaling_fwd"].scale[1])
        optimizer.step()
        return sum(losses)

    return step


def linear(te, step):
    return parity.Pair(
        reference=nn.Linear(64, 64),
        candidate=te.Linear(64, 64),
        inputs=lambda rng: rng.normal(8, 16, 64),
        weights={"weight": "weight", "bias": "bias"},
        training=parity.Training(
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),  # the largest weight soon grows
            candidate_step=step,
        ),
    )


@parity.pair("cached_weight_scale_wrong", steps=3, precisions=["fp8_delayed"])
def wrong(te):
    return linear(te, in_micro_batches(replaces_scale=True))


@parity.pair("cached_weight_scale_right", steps=3, precisions=["fp8_delayed"])
def right(te):
    return linear(te, in_micro_batches(replaces_scale=False))
