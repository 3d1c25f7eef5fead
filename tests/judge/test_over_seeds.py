"""Seeds that each pass show a bias together, and gradients that are zero in the port alone are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import result, tensor
from torch import Tensor, nn

import parity
from parity.api import compare
from parity.judge.over_seeds import judge_together
from parity.result import Check, Result

HIDDEN, SEEDS = 64, 8
LIMIT = 5.0

Change = Callable[[Tensor], Tensor]

# The statistic.


def at_seeds(values: list[float], where: str = "", **changes: Any) -> list[Result]:
    """Return passing results whose output has these components along one direction."""
    statistic = "mistake" if where else "gain"
    return [
        result(
            "pair",
            seed=seed,
            tensors=(replace(tensor(), checks=(Check(statistic, value, LIMIT, where, value / 1000),)),),
            **changes,
        )
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "is_bias"),
    [
        ([4.0] * 4, True),  # (4 - 1) * 2 = 6
        ([3.0] * 4, False),  # (3 - 1) * 2 = 4
        ([3.0] * 8, True),
        ([-3.0] * 8, True),
        ([3.0, -3.0] * 8, False),
        ([1.0] * 400, False),  # no more than kernels lean by themselves
        ([4.9], False),
    ],
)
def test_what_chance_and_kernels_leave_of_a_mean_over_seeds_is_judged_by_the_limit_of_one_seed(values, is_bias):
    *others, last = judge_together(at_seeds(values))
    assert all(one.passed for one in others)
    assert [one.name for one in last.findings] == ["PAR313 bias"] * is_bias
    assert last.passed != is_bias


def test_a_bias_is_told_with_its_size_and_confidence_and_the_seeds_that_show_it():
    *_, last = judge_together(at_seeds([3.0, 4.0, 5.0, 4.0]))
    (finding,) = last.findings
    assert "over 4 seeds, the error of output contains +0.004 (95 % interval ± 0.001) times" in finding.message
    assert "--parity-seeds=0,1,2,3" in finding.message


def test_the_change_of_a_mistake_that_is_too_small_for_one_seed_is_told_as_well():
    *_, last = judge_together(at_seeds([4.0] * 4, where="eps 1e-5"))
    assert "the change that eps 1e-5 would make" in last.findings[0].message


def test_seeds_are_not_judged_together_if_one_failed():
    results = [*at_seeds([4.0] * 4), result("pair", "failed")]
    assert judge_together(results) == results


# Ports.


class Rounded(torch.autograd.Function):
    """GELU in FP32, whose result and gradient are changed before they are rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change, change_gradient: Change) -> Tensor:
        ctx.save_for_backward(x)
        ctx.change = change_gradient
        return change(F.gelu(x.float())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.change(torch.ops.aten.gelu_backward(gradients[0].float(), x.float())).to(x.dtype), None, None


def unchanged(x: Tensor) -> Tensor:
    return x


def times(factor: float) -> Change:
    return lambda x: x * factor


def stochastic(lean: float) -> Change:
    """Round to BF16 at random; without ``lean`` the mean is right."""

    def rounded(x: Tensor) -> Tensor:
        drawn = ((torch.rand(x.shape) + lean) * 2**16).clamp(0, 2**16 - 1).int()
        return ((x.contiguous().view(torch.int32) + drawn) >> 16 << 16).view(torch.float32)

    return rounded


class Layers(nn.Module):
    def __init__(self, linear: Any, change: Change = unchanged, change_gradient: Change = unchanged) -> None:
        super().__init__()
        self.first, self.second = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.changes = change, change_gradient

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        is_port = hidden.dtype is not torch.float64 and self.changes != (unchanged, unchanged)
        return self.second(Rounded.apply(hidden, *self.changes) if is_port else F.gelu(hidden))


def judged(precision: str, *changes: Change, hook: Change | None = None, seeds: int = SEEDS) -> list[Result]:
    @parity.pair("layers_over_seeds", sizes=[{}])
    def layers(te: Any) -> parity.Pair:
        plain, port = Layers(nn.Linear), Layers(te.Linear, *changes)
        if hook is not None:
            port.second.weight.register_hook(hook)
        weights = {name: name for name, _ in plain.named_parameters()}
        return parity.Pair(plain, port, inputs=lambda rng: rng.normal(256, HIDDEN), weights=weights)

    return compare(layers, precisions=[precision], seeds=range(seeds), unwritten=False)


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("fp32", (times(1 + 3e-5),)),
        ("bf16", (times(1 + 2e-4),)),
        ("bf16", (unchanged, times(1 - 3e-4))),
        ("bf16", (stochastic(0.1),)),
        ("fp8_current", (unchanged, times(1 - 0.008))),
    ],
    ids=["a factor", "in BF16", "of a gradient", "stochastic rounding", "in FP8"],
)
def test_a_bias_that_every_seed_passes_is_found_by_all_together(precision, changes):
    *others, last = judged(precision, *changes)
    assert all(one.passed for one in others)
    assert [one.title for one in last.findings] == ["bias"]


def test_stochastic_rounding_without_a_bias_passes():
    assert all(one.passed for one in judged("bf16", stochastic(0.0)))


def zeroed(gradient: Tensor, smallest: float) -> Tensor:
    """Lose the smallest elements, this share of them, as where a scale underflows."""
    limit = gradient.abs().float().quantile(smallest)
    return torch.where(gradient.abs() <= limit, 0.0, gradient).to(gradient.dtype)


@pytest.mark.parametrize(("smallest", "is_told"), [(0.1, False), (0.7, True)])
def test_gradients_that_are_zero_in_the_port_alone_are_told_if_they_hold_something(smallest, is_told):
    (one,) = judged("fp8_current", hook=partial(zeroed, smallest=smallest), seeds=1)
    told = [finding.message for finding in one.findings if finding.name == "PAR404 gradient-zeroed"]
    assert bool(told) == is_told
    assert all("of d second.weight's squares" in message for message in told)
