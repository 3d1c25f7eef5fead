"""A tensor is a multiple of another one only if its factor is the same in every slice and block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parity.numerics.factors import uneven

SHAPE = (4, 64, 256)
NOISE = {
    "none": lambda x: x,
    "bf16": lambda x: x.bfloat16().float(),
    "e4m3": lambda x: x.to(torch.float8_e4m3fn).float(),
    "alike": lambda x: x + 0.02 * torch.randn(x.shape),
    "in proportion": lambda x: x * (1 + 0.02 * torch.randn(x.shape)),
}


def blocks(height: int, width: int) -> Tensor:
    """Return factors of a matrix's blocks, some of which are right."""
    factors = torch.tensor([1.0, 0.7, 0.9, 1.0, 0.8, 1.3]).repeat(SHAPE[1] * SHAPE[2])
    count = (SHAPE[0] * SHAPE[1] // height, SHAPE[2] // width)
    made = factors[: count[0] * count[1]].view(count).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return made.view(SHAPE)


UNEVEN = {
    "sequence": (torch.tensor([1, 0.8, 1, 1.1])[:, None, None], "2 of its 4 slices of dimension 0 (1, 3)"),
    "position": (torch.where(torch.arange(64) < 60, 1.0, 0.5)[:, None], "4 of its 64 slices of dimension 1 (60, 61"),
    "head": (torch.where(torch.arange(256) // 32 == 2, 0.9, 1.0), "32 of its 256 slices of dimension 2 (64, 65, 66"),
    "128 x 128": (blocks(128, 128), "of its 4 blocks of 128 x 128"),
    "1 x 128": (blocks(1, 128), "of its 512 blocks of 1 x 128"),
    "1 x 32": (blocks(1, 32), "of its 2048 blocks of 1 x 32"),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("shape", [SHAPE, (64, 256), (33, 7), (1000,), (2, 3, 4, 64), ()])
def test_rounding_makes_no_factor_of_a_slice_differ(shape, noise):
    right = torch.randn(shape)
    assert uneven(0.37 * NOISE[noise](right), right) is None


def test_what_rounding_does_to_whole_slices_is_no_factor_of_theirs():
    """The rounding of a weight moves all rows alike, so the residue of a column does not tell how far it is off."""
    x, weight = torch.randn(2048, 16), torch.randn(32, 16)
    right = x @ weight.T
    rounded = [x @ (weight * (1 + 0.03 * torch.randn(weight.shape))).T for _ in range(3)]
    assert uneven(rounded[0], right) is not None
    assert uneven(rounded[0], right, rounded[1:]) is None


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("by", UNEVEN)
def test_factors_that_differ_are_told_where_they_do(by, noise):
    factors, told = UNEVEN[by]
    right = torch.randn(SHAPE)
    found = uneven(factors * NOISE[noise](right), right)
    assert found is not None
    assert told in found.told
    assert found.left < 0.05


def test_rows_that_are_zero_have_no_factor():
    right = torch.randn(SHAPE)
    right[3] = 0.0
    assert uneven(0.5 * right, right) is None
    assert uneven(torch.zeros(SHAPE), right) is None
