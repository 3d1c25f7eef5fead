"""NVIDIA/TransformerEngine#1190 (https://github.com/NVIDIA/TransformerEngine/issues/1190)

TODO
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
        inputs=lambda rng: rng.normal(64, 16, 64),
        weights={"weight": "weight", "bias": "bias"},
        training=parity.Training(
            loss=lambda output, x: output.float().square().mean(),  # small gradients, as any mean has
            candidate_step=step,
        ),
    )


@parity.pair("recompute_backward_scales_wrong", steps=2, switches=["recompute"], precisions=["fp8_delayed"])
def wrong(te):
    return linear(te, without_new_scales)


@parity.pair("recompute_backward_scales_right", steps=2, switches=["recompute"], precisions=["fp8_delayed"])
def right(te):
    return linear(te, None)
