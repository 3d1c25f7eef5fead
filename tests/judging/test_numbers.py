"""Python's own numbers beside a module's tensors are judged, or said to differ."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor, nn

import parity

HIDDEN = 64
PRECISIONS = ["fp32", "bf16", "fp16", "fp8_current"]


class WithNumber(nn.Module):
    """A layer, and what a function makes of its result and its input beside it."""

    def __init__(self, layer: nn.Module, number, returned=lambda y, number: (y, number)) -> None:
        super().__init__()
        self.layer, self.number, self.returned = layer, number, returned

    def forward(self, x: Tensor):
        y = self.layer(x)
        return self.returned(y, self.number(y, x))


@dataclass
class Output:
    hidden: Tensor
    metrics: dict[str, float]


RETURNED = {
    "a tuple": (lambda y, number: (y, number), "[1]"),
    "a dict": (lambda y, number: {"y": y, "loss": number}, "['loss']"),
    "a dataclass": (lambda y, number: Output(y, {"loss": number}), ".metrics['loss']"),
    "a list in a tuple": (lambda y, number: (y, [1.0, number]), "[1][1]"),
}


def compared(of_reference, of_candidate, precisions=PRECISIONS, returned=RETURNED["a tuple"][0]):
    def factory(te, **_):
        return parity.Pair(
            WithNumber(nn.Linear(HIDDEN, HIDDEN), of_reference, returned),
            WithNumber(te.Linear(HIDDEN, HIDDEN), of_candidate, returned),
            inputs=lambda rng: rng.normal(32, HIDDEN),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    return parity.compare(parity.Case("numbers", factory, sizes=({},)), precisions, seeds=range(2))


def loss(y: Tensor, x: Tensor) -> float:
    return y.float().square().mean().item()


RIGHT = {
    "a constant": lambda y, x: 1e-5,
    "a loss": loss,
    "a mean near zero": lambda y, x: y.float().mean().item(),
    "a mean in the precision's dtype": lambda y, x: y.mean().item(),
    "a norm": lambda y, x: float(y.float().norm()),
    "of the input": lambda y, x: x.abs().max().item(),
    "infinite": lambda y, x: float("inf"),
    "not a number": lambda y, x: float("nan"),
    "a count": lambda y, x: x.numel(),
    "a switch": lambda y, x: True,
    "a text": lambda y, x: "train",
    "nothing": lambda y, x: None,
}


@pytest.mark.parametrize("number", RIGHT.values(), ids=RIGHT)
def test_a_port_that_returns_the_same_numbers_passes_without_a_word(number):
    for result in compared(number, number):
        assert (result.status, result.notes) == ("passed", ())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (RIGHT["a constant"], lambda y, x: 1e-6),
        (lambda y, x: 3.0, lambda y, x: 4.0),
        (loss, lambda y, x: 2 * loss(y, x)),
        (loss, lambda y, x: y.float().square().sum().item()),
        (loss, lambda y, x: float("nan")),
        (lambda y, x: 0.0, lambda y, x: 1.0),
    ],
    ids=["a constant", "another constant", "twice", "a sum for a mean", "not a number", "not zero"],
)
def test_floats_that_no_rounding_explains_fail(right, wrong):
    for result in compared(right, wrong):
        assert result.status == "failed"
        (found,) = result.findings
        assert (found.code, found.title) == ("PAR274", "number")
        assert found.message.startswith("the candidate returns ")
        assert " at [1] where the reference returns " in found.message


@pytest.mark.parametrize(("returned", "place"), RETURNED.values(), ids=RETURNED)
def test_the_place_is_told(returned, place):
    result, _ = compared(lambda y, x: 3.0, lambda y, x: 4.0, ["bf16"], returned)
    assert result.findings[0].message.startswith(
        f"the candidate returns 4 at {place} where the reference returns 3, which no rounding at bf16 explains"
    )


@pytest.mark.parametrize(("right", "wrong"), [(3, 4), (True, False), (3, 3.5)])
def test_other_numbers_that_differ_are_said(right, wrong):
    for result in compared(lambda y, x: right, lambda y, x: wrong, ["bf16"]):
        assert result.passed
        (note,) = result.notes
        assert note.startswith(f"the candidate returns {wrong} at [1] where the reference returns {right}; ")


def test_a_number_that_the_port_leaves_out_is_said():
    result, _ = compared(lambda y, x: 3.0, lambda y, x: None, ["bf16"])
    assert result.passed
    assert result.notes == ("the reference returns a number at [1], which the candidate does not",)


def test_beside_tensors_that_fail_it_is_noted():
    class Wrong(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return 2 * self.layer(x), 4.0

    def factory(te, **_):
        return parity.Pair(
            WithNumber(nn.Linear(HIDDEN, HIDDEN), lambda y, x: 3.0),
            Wrong(te.Linear(HIDDEN, HIDDEN)),
            inputs=lambda rng: rng.normal(32, HIDDEN),
            weights={"layer.weight": "layer.weight", "layer.bias": "layer.bias"},
        )

    (result,) = parity.compare(parity.Case("numbers", factory, sizes=({},)), ["bf16"])
    assert result.status == "failed"
    assert any("returns 4 at [1]" in note for note in result.notes)
