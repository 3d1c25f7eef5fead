"""NVIDIA/TransformerEngine#1190 (https://github.com/NVIDIA/TransformerEngine/issues/1190)

The first module within an FP8 context updates the scales of all gradients, and a forward pass that is
computed again in the backward pass runs outside of it. So no module was the first, and the scales of
gradients stayed 1, whatever their size.

parity says ``scale-not-updated`` (PAR607): the scale of the output gradient does not follow from its history.

Repair: remember in the forward pass which module is the first; TE 1.12 and later do.
"""

from torch import nn

import parity


def without_new_scales(model, optimizer, x):
    optimizer.zero_grad()
    loss = model.loss(x)
    loss.backward()
    model.module.fp8_meta["scaling_bwd"].scale.fill_(1.0)  # as it was built, whatever gradients there were
    optimizer.step()
    return loss


def linear(te, step):
    return parity.Pair(
        reference=nn.Linear(64, 64),
        candidate=te.Linear(64, 64),
        inputs=lambda rng: rng.normal(64, 32, 64),
        weights={"weight": "weight", "bias": "bias"},
        training=parity.Training(
            loss=lambda output, x: output.float().square().mean(),  # so its gradients are small
            candidate_step=step,
        ),
    )


@parity.pair("recompute_backward_scales_wrong", steps=2, switches=["recompute"], precisions=["fp8_delayed"])
def wrong(te):
    return linear(te, without_new_scales)


@parity.pair("recompute_backward_scales_right", steps=2, switches=["recompute"], precisions=["fp8_delayed"])
def right(te):
    return linear(te, None)
