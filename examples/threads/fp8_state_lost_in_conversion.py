"""NVIDIA/TransformerEngine#304 (https://github.com/NVIDIA/TransformerEngine/issues/304)

A converter loaded a checkpoint into a module and saved it without calling it, and a module saved its FP8
scales only if it had run in FP8. So ``_extra_state`` was empty in the new checkpoint, which loads without a
complaint.

parity says ``state-not-saved`` (PAR606): save and load FP8 scales, which TE keeps in ``_extra_state``.

Repair: save a module that knows that it runs in FP8; TE since keeps ``fp8_checkpoint`` from loading to
saving.
"""

import torch
from torch import nn

import parity


def save_converted(module, optimizer, file):
    module.fp8 = module.fp8_meta["fp8_checkpoint"] = False  # as of a module that was built, loaded, and never called
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)


def load(module, optimizer, file):
    states = torch.load(file, weights_only=False)
    module.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])


def linear(te, **training):
    return parity.Pair(
        reference=nn.Linear(64, 64),
        candidate=te.Linear(64, 64),
        inputs=lambda rng: rng.normal(4, 32, 64),
        weights={"weight": "weight", "bias": "bias"},
        training=parity.Training(**training),
    )


@parity.pair("fp8_state_lost_in_conversion_wrong", steps=3, switches=["resume"], precisions=["fp8_delayed"])
def wrong(te):
    return linear(te, save=save_converted, load=load)


@parity.pair("fp8_state_lost_in_conversion_right", steps=3, switches=["resume"], precisions=["fp8_delayed"])
def right(te):
    return linear(te)
