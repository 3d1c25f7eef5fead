"""What TE keeps of earlier modules is no part of a comparison, and comparisons leave none of it behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity import quantization_state, te
from parity.calibration.table import packaged
from parity.case import Case, Pair
from parity.comparison import compare_at
from parity.precision import PRECISIONS
from parity.validate import check_case

KERNELS = te.kernels("cpu")
DELAYED = PRECISIONS["fp8_delayed"]


@pytest.fixture
def manager() -> Any:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return FP8GlobalStateManager


def buffers(manager: Any) -> int:
    """How many tensors' amaxes TE keeps."""
    kept = getattr(manager, "quantization_state", manager).global_amax_buffer
    return sum(len(tensors) for tensors in kept.values())


def run_linear() -> nn.Module:
    linear: nn.Module = KERNELS.te.Linear(32, 32, params_dtype=torch.bfloat16)
    with DELAYED.autocast(KERNELS):
        linear(torch.ones(32, 32, dtype=torch.bfloat16))
    return linear


def compare(candidate: Any) -> str:
    case = Case(
        "linear",
        lambda te, width: Pair(
            nn.Linear(width, width),
            candidate(te, width),
            inputs=lambda rng, width: rng.normal(32, width),
            weights={"weight": "weight", "bias": "bias"},
        ),
        sizes=(dict(width=32),),
        path=Path("pairs.py"),
    )
    (checked,) = check_case(case, KERNELS.te)
    return compare_at(case, checked, DELAYED, 0, KERNELS, packaged()).status


def test_modules_that_ran_before_are_unknown_inside_and_known_again_after(manager: Any) -> None:
    with quantization_state.fresh():
        run_linear()
        once = buffers(manager)
        run_linear()
        assert buffers(manager) == 2 * once > 0
        with quantization_state.fresh():
            assert buffers(manager) == 0
            run_linear()
        assert buffers(manager) == 2 * once


def test_comparisons_leave_no_buffers_behind(manager: Any) -> None:
    before = buffers(manager)
    assert compare(lambda te, width: te.Linear(width, width)) == "passed"
    assert buffers(manager) == before


def test_a_candidate_that_raises_inside_of_its_own_recipe_leaves_fp8_switched_off(manager: Any) -> None:
    class Raises(nn.Module):
        def __init__(self, te: Any, width: int) -> None:
            super().__init__()
            self.linear = te.Linear(width, width)
            self.weight, self.bias = self.linear.weight, self.linear.bias

        def forward(self, x: Tensor) -> Tensor:
            DELAYED.autocast(KERNELS).__enter__()  # and never left
            raise ValueError("of the candidate's own")

    assert compare(Raises) == "error"
    assert not manager.is_fp8_enabled()
