"""Gate and up that take turns in blocks, as TE's fused grouped MLP has them (``glu_interleave_size``)."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.case.weight_map import reorder

HIDDEN, FFN = 64, 96
IN_BLOCKS_OF_32 = (0, 3, 1, 4, 2, 5)  # of gate's and up's three blocks each


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 2 * FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)


def result(size: int | None, in_blocks: bool, precision: str):
    def factory(te, **_):
        from transformer_engine.pytorch import ops

        module = ops.Sequential(
            ops.Linear(HIDDEN, 2 * FFN), ops.SwiGLU(glu_interleave_size=size), ops.Linear(FFN, HIDDEN)
        )
        weights = {}
        for kind in ("weight", "bias"):
            of_fc1 = f"fc1.{kind}"
            weights[reorder(of_fc1, IN_BLOCKS_OF_32) if in_blocks else of_fc1] = f"0.{kind}"
            weights[f"fc2.{kind}"] = f"2.{kind}"
        return parity.Pair(Gated(), module, lambda rng: rng.normal(48, HIDDEN), weights)

    (one,) = parity.compare(parity.Case("blocks", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_lack_the_blocks_are_told(precision):
    (finding,) = result(32, False, precision).findings
    assert finding.title == "gate-up-interleaved"
    assert 'lay out "0.weight" with te.interleave_glu_tensor' in finding.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_that_te_does_not_know_of_are_told(precision):
    first = result(None, True, precision).findings[0]
    assert first.code in ("PAR101", "PAR107")


@pytest.mark.parametrize(("size", "in_blocks"), [(32, True), (None, False)])
def test_right_ports_pass(size, in_blocks):
    assert result(size, in_blocks, "bf16").passed
