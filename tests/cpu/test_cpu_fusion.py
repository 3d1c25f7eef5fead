"""The stand-in for compiled pointwise fusions."""

import torch

from parity.cpu.loading.stand_ins import fuse


def scaled_twice(x):
    return x * (1 / 3) * 3


def test_half_precision_is_rounded_once_at_the_end():
    x = torch.linspace(-4, 4, 1001).bfloat16()
    exact = (x.double() * (1 / 3) * 3).bfloat16()
    assert torch.equal(fuse(scaled_twice)(x), exact)
    assert not torch.equal(scaled_twice(x), exact)


def test_results_keep_the_dtypes_that_they_have_eagerly():
    def with_statistics(x):
        return x * 2, x.float().sum()

    doubled, total = fuse(with_statistics)(torch.ones(4, dtype=torch.float16))
    assert doubled.dtype == torch.float16
    assert total.dtype == torch.float32


def test_fp32_runs_as_it_is():
    x = torch.randn(10)
    assert torch.equal(fuse(scaled_twice)(x), scaled_twice(x))


def test_gradients_flow_in_the_dtype_of_the_input():
    x = torch.randn(8, dtype=torch.bfloat16, requires_grad=True)
    fuse(scaled_twice)(x).sum().backward()
    assert x.grad.dtype == torch.bfloat16
