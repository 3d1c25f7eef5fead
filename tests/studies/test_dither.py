"""Dithered rounding errs as plain rounding does, but elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parity.lab.studies.training_curves import dithered, unit_roundoff
from parity.numerics.formats import Rounding
from parity.te import PRECISIONS

RECIPES = [name for name, precision in PRECISIONS.items() if precision.rounding.inputs and precision.recipe]


def values(seed: int = 0) -> Tensor:
    return torch.randn(256, 128, generator=torch.Generator().manual_seed(seed))


def compare(error: Tensor, dithered_error: Tensor) -> tuple[float, float]:
    """The ratio of the norms, and the correlation."""
    product = (error * dithered_error).sum() / (error.norm() * dithered_error.norm())
    return (dithered_error.norm() / error.norm()).item(), product.item()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("operand", ["inputs", "weights"])
def test_errors_of_operands_keep_their_size_and_lose_their_sign(name: str, operand: str) -> None:
    rounding, x = PRECISIONS[name].rounding, values()
    plain, shaken = getattr(rounding, operand), getattr(dithered(rounding, 1), operand)
    size, correlation = compare(plain(x, 1) - x, shaken(x, 1) - x)
    assert size == pytest.approx(1, abs=0.05)
    assert abs(correlation) < 0.2


def test_errors_of_storage_keep_their_size_and_lose_their_sign() -> None:
    rounding, x = Rounding(torch.bfloat16), values()
    size, correlation = compare(rounding.store(x) - x, dithered(rounding, 1).store(x) - x)
    assert size == pytest.approx(1, abs=0.02)
    assert abs(correlation) < 0.05


def test_realisations_differ_by_their_seeds_alone() -> None:
    rounding, x = PRECISIONS["fp8_current"].rounding, values()
    first, again, other = (dithered(rounding, seed).store(x) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_zeros_and_what_is_stored_already_stay() -> None:
    rounding = dithered(Rounding(torch.bfloat16), 3)
    assert torch.equal(rounding.store(torch.zeros(8)), torch.zeros(8))
    stored = values().bfloat16()
    assert rounding.store(stored) is stored
    assert rounding.inputs is None


@pytest.mark.parametrize(("name", "bits"), [("fp8_current", 4), ("mxfp8", 4)])
def test_a_unit_roundoff_is_that_of_the_format(name: str, bits: int) -> None:
    inputs = PRECISIONS[name].rounding.inputs
    assert inputs is not None
    assert unit_roundoff(inputs) == pytest.approx(2.0**-bits, rel=0.1)
