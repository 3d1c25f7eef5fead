"""Test that functions that TE compiles for a GPU compute the same here: in FP32, rounded where a value is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_on_cpu.loading import stand_ins
from te_on_cpu.loading.stand_ins import fuse

HALF = [torch.float16, torch.bfloat16]


def _drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_a_result_is_rounded_once_and_has_the_dtype_that_it_has_eagerly(dtype: torch.dtype) -> None:
    x = _drawn(dtype, 64)
    exact = x.float() * 3 / 7 + 1
    result, total = fuse(lambda x: (x * 3 / 7 + 1, x.float().sum()))(x)
    assert torch.equal(result, exact.to(dtype))
    assert not torch.equal(x * 3 / 7 + 1, result)
    assert total.dtype == torch.float32
    assert torch.equal(fuse(lambda x: x * 3 / 7 + 1)(x.float()), exact)


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
    assert torch.equal(start.grad, scale.detach().bfloat16())
    assert torch.equal(scale.grad, start.detach().float())


def _gelu_and_bias_gradient(x: Tensor, bias: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    product = torch.tanh(x + bias) * gradient
    return product, product.sum(dim=0)


def _dropped(x: Tensor, bias: Tensor, gradient: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x + bias, 0.5) * gradient


def _normed(x: Tensor, bias: Tensor, gradient: Tensor) -> Tensor:
    return (x + bias).softmax(-1) * gradient


def _added_in_place(x: Tensor, bias: Tensor, gradient: Tensor) -> Tensor:
    return x.add_(bias * gradient)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(
    ("function", "in_parts"),
    [(_gelu_and_bias_gradient, True), (_dropped, False), (_normed, False), (_added_in_place, False)],
)
def test_large_tensors_are_computed_by_columns_where_these_do_not_depend_on_each_other(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, function: Callable[..., Any], in_parts: bool
) -> None:
    widths: list[int] = []

    def seen(x: Tensor, bias: Tensor, gradient: Tensor) -> Any:
        widths.append(x.shape[1])
        return function(x, bias, gradient)

    x, bias, gradient = _drawn(dtype, 40, 1000), _drawn(dtype, 1000), _drawn(dtype, 40, 1000)
    torch.manual_seed(0)
    whole = fuse(function)(x.clone(), bias, gradient)
    monkeypatch.setattr(stand_ins, "_ELEMENTS_AT_ONCE", 40 * 128)
    torch.manual_seed(0)
    parts = fuse(seen)(x.clone(), bias, gradient)
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    assert (widths[1:] == [128] * 7 + [104]) == in_parts


def test_autograd_follows_large_tensors_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_ELEMENTS_AT_ONCE", 128)
    x = torch.randn(8, 256).bfloat16().requires_grad_()
    y = fuse(lambda x: x * x)(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient, 2 * x)
