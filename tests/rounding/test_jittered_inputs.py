"""The noise of a jittered pass's inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from parity.numerics.formats import Rounding
from parity.numerics.freedom import FUSED
from parity.passes.all_passes import jittered

FP32, JITTER = Rounding(torch.float32), dataclasses.replace(FUSED, jitter=1)


def test_numbers_move_by_up_to_two_roundoffs_of_fp32():
    x = torch.randn(256, 64)
    moved = (jittered({"x": x}, FP32, JITTER)["x"] / x - 1.0).abs()
    assert 0.0 < moved.mean() < moved.max() <= 2.0 * torch.finfo(torch.float32).eps


def test_whole_numbers_flags_and_infinities_stay():
    kept = torch.tensor([0.0, 1.0, -3.0, float("-inf")]), torch.arange(4), torch.tensor([True, False])
    for left, right in zip(jittered(kept, FP32, JITTER), kept, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("rounding", "freedom"), [(FP32, FUSED), (Rounding(torch.bfloat16), JITTER)])
def test_inputs_stay_in_other_passes(rounding, freedom):
    x = torch.randn(8)
    assert jittered(x, rounding, freedom) is x
