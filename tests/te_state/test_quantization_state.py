"""What TE keeps of earlier modules is no part of a comparison, and comparisons leave none of it behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from parity import te
from parity.case.case import Case, Pair
from parity.case.validate import check_case
from parity.comparison import compare_at
from parity.judge.limits import packaged
from parity.te import state
from parity.te.precision import PRECISIONS

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
    with state.fresh_quantization():
        run_linear()
        once = buffers(manager)
        run_linear()
        assert buffers(manager) == 2 * once > 0
        with state.fresh_quantization():
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


class Deep(nn.Module):
    """Layers one behind another, and the mean of what they return."""

    def __init__(self, linear: Any, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(linear(64, 64, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def deep(layers: int, scale: float = 1.0) -> Case:
    def factory(te: Any, **_: Any) -> Pair:
        reference = Deep(nn.Linear, layers)
        return Pair(
            reference,
            Deep(te.Linear, layers),
            inputs=lambda rng, tokens: rng.normal(tokens, 64),
            weights={name: name for name, _ in reference.named_parameters()},
            call_candidate=lambda module, x: scale * module(x),
        )

    return Case("deep", factory, sizes=(dict(tokens=1024),), path=Path("pairs.py"))


@pytest.mark.parametrize("layers", [2, 6])
def test_small_gradients_are_judged_when_every_layer_has_its_scale(layers: int) -> None:
    (right,) = parity.compare(deep(layers), ["fp8_delayed"])
    (wrong,) = parity.compare(deep(layers, scale=1.1), ["fp8_delayed"])
    assert (right.status, wrong.status) == ("passed", "failed")


def passes_of(layers: int, tokens: int, scale: float) -> int:
    passes: list[int] = []
    torch.manual_seed(0)
    with state.fresh_quantization():
        module = Deep(KERNELS.te.Linear, layers).bfloat16()

        def once() -> None:
            passes.append(len(passes))
            with DELAYED.autocast(KERNELS):
                loss = scale * module(torch.ones(tokens, 64, dtype=torch.bfloat16))
            loss.backward()

        state.settled(once, DELAYED.warmup_passes)
    return len(passes)


def test_a_layer_more_takes_a_pass_more_where_gradients_are_too_small_for_a_scale_of_1() -> None:
    small = [passes_of(layers, tokens=32, scale=1e-9) for layers in (4, 5)]
    assert small[1] == small[0] + 1
    assert small[0] > 1 + DELAYED.warmup_passes


def test_scales_that_fit_take_no_pass_more() -> None:
    assert passes_of(1, tokens=32, scale=1e6) == 1 + DELAYED.warmup_passes


def test_where_scales_move_the_numbers_of_the_next_layer_each_takes_a_pass_more_at_the_most() -> None:
    assert passes_of(4, tokens=32, scale=1e6) <= 1 + DELAYED.warmup_passes + 4


def test_without_a_warm_up_one_pass_is_enough() -> None:
    passes: list[int] = []
    state.settled(lambda: passes.append(0), 0)
    assert passes == [0]


@pytest.mark.parametrize(
    ("last", "passes"),
    [(1.5, 4), (1.02, 3), (0.6, 3)],
    ids=[
        "what would saturate has its scale first",
        "rounding saturates as well",
        "a smaller number needs no other scale",
    ],
)
def test_a_pass_counts_whose_largest_number_its_scale_holds(last: float, passes: int) -> None:
    magnitudes: list[float] = []
    with state.fresh_quantization():
        linear = KERNELS.te.Linear(32, 32, params_dtype=torch.bfloat16)

        def once() -> None:
            magnitudes.append(1.0 if len(magnitudes) < DELAYED.warmup_passes else last)
            with DELAYED.autocast(KERNELS):
                linear(magnitudes[-1] * torch.ones(32, 32, dtype=torch.bfloat16)).sum().backward()

        state.settled(once, DELAYED.warmup_passes)
    assert len(magnitudes) == passes


class CopiedEachPass(nn.Module):
    """Computes with a copy of its layer that each pass makes anew, as where a pass makes steps of an optimizer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.0 * copy.deepcopy(self.layer)(x)


def test_a_candidate_whose_modules_are_new_in_each_pass_warms_up_as_long_as_another() -> None:
    passes = []

    class Counted(CopiedEachPass):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(x)
            return super().forward(x)

    case = Case(
        "copied",
        lambda te, width: Pair(
            CopiedEachPass(nn.Linear(width, width)),
            Counted(te.Linear(width, width)),
            inputs=lambda rng, width: rng.normal(32, width),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        ),
        sizes=(dict(width=32),),
        path=Path("pairs.py"),
    )
    (checked,) = check_case(case, KERNELS.te)
    assert compare_at(case, checked, DELAYED, 0, KERNELS, packaged()).status == "passed"
    assert len(passes) < 50
