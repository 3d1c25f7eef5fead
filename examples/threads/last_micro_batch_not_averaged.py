"""deepspeedai/DeepSpeed#7985 (https://github.com/deepspeedai/DeepSpeed/pull/7985)

Gradients were averaged over ranks before those of the last micro-batch had been added to them. So each rank
stepped with gradients of which this part was its own alone.

parity says ``state-between-steps`` (PAR605), from the first step on, and to look at what the training step
does besides one pass; it does not say that a micro-batch is wrong.

Repair: add first, then average.
"""

from torch import nn

import parity


def on_two_ranks(averages_all):
    """Return the step of the first of two ranks that have half of each of four micro-batches."""

    def step(model, optimizer, x):
        optimizer.zero_grad()
        losses = []
        for number, part in enumerate(x.chunk(4)):
            mine, others = part.chunk(2)
            is_averaged = averages_all or number < 3
            loss = (model.loss(mine) + model.loss(others)) / 2
            (loss if is_averaged else model.loss(mine)).div(4).backward()
            losses.append(loss.detach() / 4)
        optimizer.step()
        return sum(losses)

    return step


def linear(te, step):
    return parity.Pair(
        reference=nn.Linear(64, 64),
        candidate=te.Linear(64, 64),
        inputs=lambda rng: rng.normal(8, 16, 64),
        weights={"weight": "weight", "bias": "bias"},
        training=parity.Training(candidate_step=step),
    )


@parity.pair("last_micro_batch_not_averaged_wrong", steps=2, precisions=["fp32"])
def wrong(te):
    return linear(te, on_two_ranks(averages_all=False))


@parity.pair("last_micro_batch_not_averaged_right", steps=2, precisions=["fp32"])
def right(te):
    return linear(te, on_two_ranks(averages_all=True))
