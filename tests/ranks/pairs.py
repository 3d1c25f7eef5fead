"""Pairs over ranks, right and wrong ones, each built by its name in every rank."""

from __future__ import annotations

from functools import partial
from types import ModuleType

from torch import distributed, nn

import parity
from parity.case.case import Case
from parity.ranks.layout import Ranks

HIDDEN, FFN, SEQ, BATCH = 64, 128, 16, 2


def swiglu(te: ModuleType, ranks: Ranks, mistake: str = "") -> parity.Pair:
    """An MLP whose weights tensor parallel ranks divide, with sequence parallelism or without."""
    candidate = te.LayerNormMLP(
        HIDDEN,
        FFN,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        tp_group=ranks.tp.group,
        tp_size=ranks.tp.size,
        set_parallel_mode=True,
        sequence_parallel=ranks.sequence_parallel,
    )

    def finish(module: nn.Module) -> None:
        if ranks.sequence_parallel and mistake != "norm not reduced":
            distributed.all_reduce(module.layer_norm_weight.grad, group=ranks.tp.group)

    along = [parity.over("tp", 0)] if ranks.sequence_parallel else []
    return parity.Pair(
        reference=Swiglu(),
        candidate=candidate,
        inputs=lambda rng: rng.normal(SEQ, BATCH, HIDDEN),
        weights={
            "norm.weight": "layer_norm_weight",
            parity.stack("gate.weight", "up.weight"): "fc1_weight",
            "down.weight": "fc2_weight",
        },
        parallel=parity.Parallel(splits={"input": along, "output": along}, finish=finish),
    )


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


PAIRS = {"swiglu": swiglu}


def case_of(name: str, mistake: str = "") -> Case:
    return Case(name, partial(PAIRS[name], mistake=mistake), sizes=({},))
