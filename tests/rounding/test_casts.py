"""Casts of a reference in FP32 round as they do in one of a 16-bit dtype."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parity.numerics.plain import Casts

DTYPES = [torch.bfloat16, torch.float16]


def rms_norm(x: Tensor) -> Tensor:
    """As Hugging Face's Llama has it."""
    dtype = x.dtype
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)


LINES: dict[str, Callable[[Tensor], Tensor]] = {
    "float and type_as": lambda x: (x.float() * 0.3).type_as(x),
    "float alone": lambda x: x.float().exp(),
    "to FP32 and back": rms_norm,
    "twice": lambda x: rms_norm(rms_norm(x)),
    "softmax in FP32": lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    "cross-entropy in FP32": lambda x: F.cross_entropy(x.float(), torch.arange(len(x)), reduction="none"),
    "a part of FP32 values": lambda x: x.float()[1:].sin().type_as(x),
    "like a tensor in FP32": lambda x: x.to(x.float()).cos().type_as(x),
    "back by keyword": lambda x: (x.float() + 0.1).to(dtype=x.dtype),
    "a device is no dtype": lambda x: (x.float().to("cpu") * 3.3).type_as(x),
}


def run(line: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """What a line returns, and the gradient of its input, in FP32."""
    x = x.clone().requires_grad_()
    output = line(x)
    weights = torch.linspace(0.3, 1.7, output.numel()).bfloat16().to(output.dtype)
    (gradient,) = torch.autograd.grad(output, x, weights.view(output.shape))
    return output.detach().float(), gradient.float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_lines_that_compute_in_fp32_give_the_bits_that_they_give_in_the_dtype(line, dtype):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Casts(lambda y: y.to(dtype).float(), alone=nullcontext):
        modelled = run(line, x.float())
    for got, right in zip(modelled, run(line, x), strict=True):
        assert torch.equal(got, right)


def test_without_it_the_model_rounds_neither_values_nor_gradients():
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    for got, right in zip(run(rms_norm, x.float()), run(rms_norm, x), strict=True):
        assert not torch.equal(got, right)


def test_a_table_without_a_gradient_is_left_as_it_is():
    angles = torch.linspace(0.0, 3.0, 16)
    with Casts(lambda y: y.bfloat16().float(), alone=nullcontext):
        assert torch.equal(angles.float().cos().to(torch.float32), angles.cos())
