"""NVIDIA/TransformerEngine#869 (https://github.com/NVIDIA/TransformerEngine/pull/869)

After capturing a CUDA graph, ``te.make_graphed_callables`` gave the parameters new gradients. The graph's
backward pass went on to fill those of the capture, and the optimizer read the new ones.

parity says ``stale-gradient`` (PAR602): the optimizer is given no gradients.

Repair: keep the buffers of the capture, and set them to zero in place (``zero_grad(set_to_none=False)``).
"""

import torch
from torch import nn

import parity


class Captured:
    """A training step that is captured once and replayed: its backward pass writes to the buffers of the capture."""

    def __init__(self, keeps_buffers):
        self.keeps_buffers, self.buffers = keeps_buffers, None

    def __call__(self, model, optimizer, x):
        optimizer.zero_grad(set_to_none=False)
        if self.buffers is None:
            self.buffers = [torch.zeros_like(one) for one in model.parameters()]
            for one, buffer in zip(model.parameters(), self.buffers, strict=True):
                one.grad = buffer if self.keeps_buffers else torch.zeros_like(one)
        loss = model.loss(x)
        for buffer, gradient in zip(self.buffers, torch.autograd.grad(loss, model.parameters()), strict=True):
            buffer.copy_(gradient)
        optimizer.step()
        return loss


def linear(te, step):
    return parity.Pair(
        reference=nn.Linear(64, 64),
        candidate=te.Linear(64, 64),
        inputs=lambda rng: rng.normal(4, 32, 64),
        weights={"weight": "weight", "bias": "bias"},
        training=parity.Training(candidate_step=step),
    )


@parity.pair("graph_gradient_buffers_wrong", steps=2, precisions=["bf16"])
def wrong(te):
    return linear(te, Captured(keeps_buffers=False))


@parity.pair("graph_gradient_buffers_right", steps=2, precisions=["bf16"])
def right(te):
    return linear(te, Captured(keeps_buffers=True))
