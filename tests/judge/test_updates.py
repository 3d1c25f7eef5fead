"""Test how an optimizer's step is held against that of the reference's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parity.judge.steps import Replay, deviations
from parity.lab.studies.rows.optimizers import Lion
from parity.passes.steps import Update

RATE = 1e-3


def update_of(before, gradient, after):
    """Return the step of one parameter."""
    return Update({"weight": before}, {"weight": gradient}, {"weight": after}, {}, {})


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(("off", "either_is_right"), [(1e-8, True), (-5e-7, True), (1e-4, False), (-1e-4, False)])
def test_a_sign_is_the_ports_where_fp32_arithmetic_decides_it(off, either_is_right, sign):
    """Lion steps by the sign of 0.9 average + 0.1 gradient, whose first element cancels to a few roundings here."""
    replay = Replay(nn.Linear(8, 1, bias=False), lambda model: Lion(model.parameters(), lr=RATE, weight_decay=0.0))
    weights, gradient = torch.ones(8).double(), torch.ones(8).double()
    weights = replay.step(update_of(weights, gradient, weights - RATE))["weight"]  # leaves an average of 0.01
    gradient[0] = -0.09 * (1.0 + off)
    made = weights - RATE
    made[0] = weights[0] - sign * RATE
    update = update_of(weights, gradient, made)
    (deviation,) = deviations(update, replay.step(update), torch.float32)
    assert deviation.is_right == (either_is_right or sign == (-1.0 if off > 0.0 else 1.0))
