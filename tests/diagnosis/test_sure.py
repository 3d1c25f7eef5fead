"""A finding is a fact only if it was checked as what it says: a factor, an order, a number, gradients alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from lab.corpus.small import normal, twins
from parity.judge import directions
from parity.mistakes import activations, attention, attention_mistakes
from parity.mistakes.alternatives import is_written
from parity.mistakes.hypothesis import Hypothesis, to_be_bounded
from parity.search.held_weights import _as_it_is
from parity.search.in_full import Explanation
from parity.search.misplaced import _moved
from parity.search.search import _find_rivals, is_unusual
from parity.trace.calls import Misfit
from parity.trainings.step_verdicts import multiple_moved
from parity.trainings.why_steps import gradients_explained, guesses_of_any_step

WIDTH = 64

# Factors: every place that says one, with one factor for all and with another for some rows, columns or blocks.


def of_output(factor: Tensor, precision: str) -> str:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x) * factor.to(x.dtype)

    return said(call, precision)


def of_gradient(factor: Tensor, precision: str) -> str:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x)
        y.register_hook(lambda gradient: gradient * factor.to(gradient.dtype))
        return y

    return said(call, precision)


def said(call: Callable[..., Any], precision: str) -> str:
    host = twins(
        lambda linear: linear(WIDTH, WIDTH, bias=False),
        normal((WIDTH, WIDTH)),
        "linear",
        options=dict(call_candidate=call),
    )
    (result,) = parity.compare(host.case(), [precision])
    assert not result.passed
    return " ".join(one.message for one in result.findings if one.sure)


def of_held_weight(factor: Tensor, precision: str) -> str:
    right = torch.randn(WIDTH, WIDTH)
    return _as_it_is("w", SimpleNamespace(unlike={"w": right * factor}, candidate_weights={"w": right}))  # type: ignore


def of_step(factor: Tensor, precision: str) -> str:
    golden = {"w": torch.randn(WIDTH, WIDTH), "v": torch.randn(WIDTH, WIDTH)}
    candidate, limits = {name: x * factor for name, x in golden.items()}, dict.fromkeys(golden, 0.05)
    found = gradients_explained(limits, candidate, guesses_of_any_step(1, candidate, golden, limits))
    return "" if found is None else found.message


def of_some_of_a_step(factor: Tensor, precision: str) -> str:
    golden = {"w": torch.randn(WIDTH, WIDTH), "v": torch.randn(WIDTH, WIDTH)}
    candidate, limits = golden | {"w": factor * golden["w"]}, dict.fromkeys(golden, 0.05)
    found = gradients_explained(limits, candidate, guesses_of_any_step(1, candidate, golden, limits))
    return "" if found is None else found.message


def of_buffer(factor: Tensor, precision: str) -> str:
    begun, due = torch.zeros(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    moved = multiple_moved((begun, factor * due), (begun, due))
    return "" if moved == 1.0 else f"{moved:g} times"


PLACES = [of_output, of_gradient, of_held_weight, of_step, of_some_of_a_step, of_buffer]
EVEN = {"everywhere": torch.full((WIDTH, WIDTH), 0.5)}
rows = torch.arange(WIDTH)[:, None].expand(WIDTH, WIDTH)
UNEVEN = {
    "by row": 0.5 + 0.2 * (rows % 8 == 0),
    "by column": 0.5 + 0.2 * (rows.T >= 48),
    "by block": 0.5 + 0.2 * ((rows // 32 + rows.T // 32) % 2),
}


@pytest.mark.parametrize(
    ("place", "precision"),
    [*((place, "bf16") for place in PLACES), (of_output, "fp8_current"), (of_gradient, "fp8_current")],
)
@pytest.mark.parametrize("by", [*EVEN, *UNEVEN])
def test_a_factor_is_told_if_it_is_the_same_everywhere(by, place, precision):
    torch.manual_seed(0)
    told = place((EVEN | UNEVEN)[by], precision)
    if by in EVEN:
        assert re.search(r"(0\.5|1/2) times|multiplies it by 0\.5", told), told
    else:
        assert not re.search(r"(?<!to )\b(0\.\d+|1/\d) times", told), told
        assert place not in (of_output, of_held_weight) or "times what it should be in" in told, told


# Orders: every place that says one.


ORDERS = {
    "two rows exchanged": ([0, 2, 1, *range(3, 20)], True),
    "in reverse": (list(range(20))[::-1], True),
    "shifted": ([*range(3, 20), 0, 0, 0], True),
    "three copies": ([0, 1, 2, 3, 14, 14, 14, *range(7, 20)], False),
    "one for all": ([7] * 20, False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_rows_are_exchanged_only_if_each_is_in_one_place(name):
    order, is_told = ORDERS[name]
    golden = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    assert bool(_moved(golden[order], golden, 0.01)) == is_told
    golden[5] = golden[6]  # rows that are equal, as of padding
    assert name == "shifted" or bool(_moved(golden[order], golden, 0.01)) == is_told


@pytest.mark.parametrize(
    ("held", "is_told"),
    [
        (lambda x, y: x.flip(0), True),
        (lambda x, y: x.flip(0).bfloat16(), True),
        (lambda x, y: 0.5 * x.flip(0), False),
        (lambda x, y: y, False),
    ],
)
@pytest.mark.parametrize("spread", [1.0, 0.1, 0.001])
def test_weights_are_in_another_order_only_if_they_are_the_same_numbers(held, is_told, spread):
    x, y = (1.0 + spread * torch.randn(2, 512, generator=torch.Generator().manual_seed(0))).unbind()
    prepared: Any = SimpleNamespace(unlike={"w": held(x, y)}, candidate_weights={"w": x})
    told = _as_it_is("w", prepared)
    assert ("in an order" in told) == (is_told and (spread > 0.001 or prepared.unlike["w"].dtype is x.dtype)), told
    assert " times what it should" not in told, told


# Numbers: a fitted one is written by people, and a bound leaves something to be seen.


@pytest.mark.parametrize(("value", "is_sure"), [(4.0, True), (3.996, False), (0.125, True), (0.12512, False)])
def test_a_number_that_is_only_near_to_one_that_people_write_is_unusual(value, is_sure):
    def made(value: float) -> Hypothesis:
        return Hypothesis("factor", "factor", "", value=value, tuned=made)

    assert is_unusual(made(value)) != is_sure
    assert is_written(value) == is_sure


@pytest.mark.parametrize(
    ("title", "value", "is_sure"),
    [("factor", 4e-11, False), ("factor", 1e-5, True), ("norm-eps", 1e-12, True), ("norm-eps", 0.5, False)],
)
def test_a_number_that_nobody_writes_for_this_mistake_is_unusual(title, value, is_sure):
    def made(value: float) -> Hypothesis:
        return Hypothesis(title, title, "", value=value, tuned=made)

    assert is_unusual(made(value)) != is_sure


X = torch.randn(4, 2, 16, 16, generator=torch.Generator().manual_seed(0))
BOUNDS: dict[str, Callable[[float], Tensor]] = {
    "any": lambda bound: to_be_bounded(X, bound),
    "cap": lambda bound: attention_mistakes._capped(X, bound),
    "gated unit": lambda bound: activations.GatedUnit(None, None, None, "silu", bound).compute(X, X),  # type: ignore
    "scores": lambda bound: attention.Attention(None, None, None, None, (), softcap=bound).compute(X, X, X),  # type: ignore
}


@pytest.mark.parametrize("of", BOUNDS)
@pytest.mark.parametrize(
    ("bound", "is_one"), [(0.0003, False), (0.007, False), (4.0, True), (7.0, True), (math.inf, True)]
)
def test_a_bound_that_nearly_all_values_exceed_is_none(of, bound, is_one):
    if is_one:
        assert BOUNDS[of](bound).isfinite().all()
    else:
        with pytest.raises(Misfit):
            BOUNDS[of](bound)


# Gradients alone are wrong only if outputs passed in the verdict.


class OwnSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beyond: float) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up * torch.where(x.abs().amax() > beyond, 1.02, 1.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        sigmoid = gate.sigmoid()
        return torch.cat((gradients[0] * up * sigmoid, gradients[0] * gate * sigmoid), -1), None  # without d sigmoid


@pytest.mark.parametrize(("beyond", "passed"), [(math.inf, True), (0.0, False)])
def test_gradients_alone_are_blamed_only_if_outputs_passed(beyond, passed, monkeypatch):
    tried = []

    def noted(failure: Any, *rest: Any) -> list[Any]:
        tried.append(failure.outputs_passed)
        return []

    monkeypatch.setattr("parity.search.explanation.gradient_findings", noted)
    monkeypatch.setattr("parity.search.explanation.partly_scaled_findings", noted)

    class Unit(nn.Module):
        def __init__(self, linear: Any, own: bool = False) -> None:
            super().__init__()
            self.up, self.own = linear(WIDTH, 2 * WIDTH, bias=False), own

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            gate, up = y.chunk(2, -1)
            return OwnSwiGLU.apply(y, beyond) if self.own else F.silu(gate) * up  # type: ignore[no-any-return]

    (result,) = parity.compare(twins(Unit, normal((32, WIDTH))).case(own=True), ["bf16"])
    outputs = [one for one in result.tensors if one.kind == "output" or one.probed]
    assert all(one.passed for one in outputs) == passed
    assert bool(tried) == passed


# What two mistakes explain equally well is told as two.


@pytest.mark.parametrize(
    ("recipe", "share", "title", "misfit", "is_rival"),
    [
        ("Float8CurrentScaling", 0.1, "factor", 1.0, True),
        ("Float8CurrentScaling", 0.1, "factor", 1.1, False),
        ("Float8CurrentScaling", 0.2, "factor", 1.0, False),
        ("Float8CurrentScaling", 0.1, "norm-eps", 1.0, False),
        (None, 0.1, "factor", 1.0, False),
    ],
)
def test_in_fp8_mistakes_that_fit_as_well_as_the_first_are_rivals(recipe, share, title, misfit, is_rival):
    def explained(title: str, misfit: float) -> Explanation:
        return Explanation((Hypothesis(title, title, ""),), None, misfit, "output", 1.0, 0.1, ())

    first, other = explained("norm-eps", 1.0), explained(title, misfit)
    budget = SimpleNamespace(spent=lambda: False)
    failure = SimpleNamespace(precision=SimpleNamespace(recipe=recipe), budget=lambda checks: budget)
    search: Any = SimpleNamespace(failure=failure, explanation=lambda combination: other)
    entries = [(share, other.hypotheses)]
    assert [*_find_rivals(search, first, (0.1, first.hypotheses), entries)] == [other] * is_rival


@pytest.mark.parametrize("titles", [("norm-eps",), ("norm-eps", "factor")])
def test_of_several_mistakes_that_filters_find_none_is_a_fact(titles, monkeypatch):
    tensor, check = SimpleNamespace(label="output"), SimpleNamespace(coefficient=1.0, value=9.0, limit=5.0)
    found = [(tensor, check, SimpleNamespace(mistake=Hypothesis(title, title, ""))) for title in titles]
    monkeypatch.setattr(directions, "found_by_filter", lambda tensors, known: found)
    assert [one.sure for one in directions.findings((), ())] == [len(titles) == 1] * len(titles)
