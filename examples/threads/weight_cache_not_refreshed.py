"""NVIDIA/Megatron-LM#5641 (https://github.com/NVIDIA/Megatron-LM/issues/5641)

A recipe for some modules alone did not reach the condition under which modules are told of a step's first
micro-batch. So no ``is_first_microbatch`` was ever True, and TE kept the FP8 weights of the first step.

parity says ``weight-cache-stale`` (PAR307): the gradients are those of the weight matrices before the last
update.

Repair: pass True for the first micro-batch of each step, or None.
"""

import torch
from torch import nn

import parity


def in_micro_batches(refreshes):
    def step(model, optimizer, x):
        optimizer.zero_grad()
        losses = []
        for number, part in enumerate(x.chunk(4)):
            losses.append(model.loss(part, is_first_microbatch=refreshes and number == 0) / 4)
            losses[-1].backward()
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
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5), candidate_step=step
        ),
    )


@parity.pair("weight_cache_not_refreshed_wrong", steps=3, precisions=["fp8_current"])
def wrong(te):
    return linear(te, in_micro_batches(refreshes=False))


@parity.pair("weight_cache_not_refreshed_right", steps=3, precisions=["fp8_current"])
def right(te):
    return linear(te, in_micro_batches(refreshes=True))
