"""Pairs that each rank makes anew, in a file of their own because a rank imports all that a pair's file imports."""

from __future__ import annotations

import os
import time

from torch import nn

import parity
from lab.corpus.ranked_ports.ranks import add_up
from parity.ranks.layout import over


def linear(te, ranks, mishap=""):
    def call(module, x):
        if ranks.world.rank == 1 and ranks.world.size > 1:
            if mishap == "raises":
                raise RuntimeError("no memory left")
            if mishap == "dies":
                os._exit(3)
            if mishap == "hangs":
                time.sleep(1000)
        y = module(x)
        if mishap == "drifts":
            y = y * (1.0 + 2.0**-7 * ranks.world.rank)
        return y * 1.1 if mishap == "is wrong by itself" else y

    return parity.Pair(
        reference=nn.Linear(32, 32),
        candidate=te.Linear(32, 32),
        inputs=lambda rng: rng.normal(16, 32),
        weights={"weight": "weight", "bias": "bias"},
        call_candidate=call,
        parallel=parity.Parallel(
            splits={"x": []} if mishap == "names no input" else {},
            weights={"weigth": [over("tp", dim=0)]} if mishap == "names no weight" else {},
        ),
    )


def dropping(te, ranks, p=0.5, is_declared=True):
    module = nn.Sequential(te.Linear(32, 32), nn.Dropout(p))
    return parity.Pair(
        reference=nn.Sequential(nn.Linear(32, 32), nn.Dropout(p)),
        candidate=module,
        inputs=lambda rng: rng.normal(16, 32),
        weights={"0.weight": "0.weight", "0.bias": "0.bias"},
        parallel=parity.Parallel(
            splits={"input": [over("dp")], "output": [over("dp")]},
            finish=lambda module: ranks and add_up(list(module.parameters()), ranks.dp.group),
            dropout=is_declared,
        ),
    )


def faked(te, ranks, folder):
    import nvdlfw_inspect.api as debug_api

    if debug_api.DEBUG_MANAGER is None:
        of_layer = {"gemms": ["fprop"], "tensors": ["activation", "weight"], "quant_format": "FP8E5M2"}
        fake = {"FakeQuant": {"enabled": True, **of_layer}}
        config = {"one": {"enabled": True, "layers": {"layer_types": ["linear"]}, "transformer_engine": fake}}
        features = os.path.join(os.path.dirname(os.path.dirname(te.__file__)), "debug", "features")
        debug_api.initialize(config, feature_dirs=[features], log_dir=folder)
    return parity.Pair(
        reference=nn.Linear(32, 32),
        candidate=te.Linear(32, 32, name="linear"),
        inputs=lambda rng: rng.normal(16, 32),
        weights={"weight": "weight", "bias": "bias"},
        parallel=parity.Parallel(
            splits={"input": [over("dp")], "output": [over("dp")]},
            finish=lambda module: ranks and add_up(list(module.parameters()), ranks.dp.group),
        ),
    )
