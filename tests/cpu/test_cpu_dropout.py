"""Dropout's bit mask, its probability, and TE's ``ops.Dropout`` on it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parity import te
from te_on_cpu import dropout

BF16, FP16 = torch.bfloat16, torch.float16
probabilities = st.floats(0, 0.99)


def bits(mask: Tensor) -> list[bool]:
    """Return the entries of a mask: bit i of byte j is entry 8 j + i."""
    return [bool(byte >> place & 1) for byte in mask.tolist() for place in range(8)]


@settings(max_examples=60)
@given(st.sampled_from([BF16, FP16]), probabilities, st.integers(1, 8), st.integers(0, 2**31))
def test_kept_entries_are_scaled_and_the_others_zero_as_the_mask_says(
    dtype: torch.dtype, probability: float, chunks: int, seed: int
) -> None:
    torch.manual_seed(seed)
    values = torch.randn(chunks, 16).to(dtype)
    result, mask = dropout.dropout_fwd(values, probability)
    kept = torch.tensor(bits(mask)).view(values.shape)
    scale = (1 / (1 - torch.tensor(probability))).double()
    torch.testing.assert_close(result, torch.where(kept, values.double() * scale, 0).to(dtype), rtol=0, atol=0)
    gradient = torch.randn(chunks, 16).to(dtype)
    expected = torch.where(kept, gradient.double() * scale, 0).to(dtype)
    assert torch.equal(dropout.dropout_bwd(gradient, mask, probability), expected)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_entries_are_dropped_with_the_probability_rounded_down_to_a_byte(probability: float) -> None:
    entries = 1 << 20
    result, _ = dropout.dropout_fwd(torch.ones(entries).to(BF16), probability)
    dropped = (result == 0).double().mean().item()
    expected = math.floor(256 * probability) / 256
    assert abs(dropped - expected) <= 5 * math.sqrt(expected * (1 - expected) / entries)


def test_neighbours_are_dropped_independently() -> None:
    entries = 1 << 18
    kept = (dropout.dropout_fwd(torch.ones(entries).to(BF16), 0.5)[0] != 0).double() - 0.5
    for distance in (1, 2, 7, 8, 16):
        correlation = 4 * (kept[distance:] * kept[:-distance]).mean().item()
        assert abs(correlation) <= 5 / math.sqrt(entries)


def test_a_dropped_nan_is_zero() -> None:
    result, mask = dropout.dropout_fwd(torch.full((64,), float("nan")).to(BF16), 0.5)
    kept = torch.tensor(bits(mask))
    assert torch.equal(result.isnan(), kept)
    assert not result[~kept].any()


def test_the_seed_decides_what_is_dropped() -> None:
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(dropout.dropout_fwd(torch.ones(256).to(BF16), 0.5)[1])
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize(
    ("values", "probability", "message"),
    [
        (torch.ones(16), 0.5, "not torch.float32"),
        (torch.ones(24).to(BF16), 0.5, "multiple of 16 entries, but there are 24"),
        (torch.ones(16).to(BF16), 1.0, "below 1, but got 1.0"),
    ],
)
def test_dropout_refuses_what_the_cuda_kernel_refuses(values: Tensor, probability: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dropout.dropout_fwd(values, probability)


def test_a_mask_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="mask of 1 bytes does not fit 16 entries"):
        dropout.dropout_bwd(torch.ones(16).to(BF16), torch.zeros(1, dtype=torch.uint8), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_te_dropout_operation_passes_the_gradient_of_kept_entries_alone(
    dtype: torch.dtype,
) -> None:
    module = te.kernels("cpu").te.ops.Dropout(0.25)
    x = torch.randn(32, 16).to(dtype).requires_grad_()
    y = module(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    kept = y != 0
    assert torch.equal(gradient != 0, kept)
    assert 0.6 < kept.double().mean() < 0.9
    torch.testing.assert_close(y[kept], (x.double() / 0.75).to(dtype)[kept], rtol=torch.finfo(dtype).eps, atol=0.0)
    assert torch.equal(module.eval()(x), x)
