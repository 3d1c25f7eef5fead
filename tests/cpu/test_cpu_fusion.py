"""Test what TE compiles for a GPU computes here as the compiled code does: in FP32, and rounded where it is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parity.cpu.loading.stand_ins import fuse

HALF = [torch.float16, torch.bfloat16]


def _drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_a_result_is_rounded_once(dtype: torch.dtype) -> None:
    x = _drawn(dtype, 64)
    exact = x.float() * 3 / 7 + 1
    assert torch.equal(fuse(lambda x: x * 3 / 7 + 1)(x), exact.to(dtype))
    assert not torch.equal(x * 3 / 7 + 1, exact.to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_what_is_written_in_place_is_rounded_once(dtype: torch.dtype) -> None:
    @fuse
    def merge(out: Tensor, step: Tensor, scale: Tensor) -> None:
        out.mul_(scale)
        out.add_(step * scale)

    out, step, scale = _drawn(dtype, 4, 8), _drawn(dtype, 4, 8), torch.rand(4, 1)
    exact = (out.float() * scale + step.float() * scale).to(dtype)
    kept = step.clone()
    assert merge(out, step, scale) is None
    assert torch.equal(out, exact)
    assert torch.equal(step, kept)


def _through_a_view(x: Tensor) -> None:
    x.select(0, 1).mul_(2)


def _by_copying(x: Tensor) -> None:
    x[1].copy_(x[1] * 2)


def _by_an_index(x: Tensor) -> None:
    x[1] = x[1] + x[1]


@pytest.mark.parametrize("double_second_row", [_through_a_view, _by_copying, _by_an_index])
@pytest.mark.parametrize("start", ["whole", "slice", "transposed", "inference"])
def test_every_way_to_write_reaches_the_argument(double_second_row: Any, start: str) -> None:
    with torch.inference_mode(start == "inference"):
        whole = _drawn(torch.bfloat16, 4, 4)
        x = {"slice": whole[1:, :3], "transposed": whole.T}.get(start, whole)
        expected = x.clone()
        double_second_row(expected)
        fuse(double_second_row)(x)
    assert torch.equal(x, expected)


def test_a_returned_argument_is_the_argument() -> None:
    x = _drawn(torch.bfloat16, 4)
    expected = x * 2
    assert fuse(lambda x: x.mul_(2))(x) is x
    assert torch.equal(x, expected)


def test_a_returned_view_is_the_argument_s_memory() -> None:
    whole = _drawn(torch.bfloat16, 4, 6)
    x = whole[:, 2:]
    view, number = fuse(lambda x: (x.add_(1)[1:, 1], 3))(x)
    assert (view.data_ptr(), view.stride(), number) == (x[1:, 1].data_ptr(), x[1:, 1].stride(), 3)
    assert torch.equal(view, x[1:, 1])


def test_one_tensor_given_twice_is_one() -> None:
    x = _drawn(torch.bfloat16, 4)
    expected = (x.float() * 4).bfloat16()

    @fuse
    def quadruple(a: Tensor, b: Tensor) -> None:
        a.mul_(2)
        a.add_(b)

    quadruple(x, x)
    assert torch.equal(x, expected)


def test_gradients_pass_through_what_is_written_in_place() -> None:
    start, scale = _drawn(torch.bfloat16, 4).requires_grad_(), torch.rand(4, requires_grad=True)

    @fuse
    def multiply(x: Tensor, scale: Tensor) -> None:
        x.mul_(scale)

    x = start.clone()
    multiply(x, scale)
    x.float().sum().backward()
    assert start.grad is not None
    assert torch.equal(start.grad, scale.detach().bfloat16())
    assert torch.equal(scale.grad, start.detach().float())
