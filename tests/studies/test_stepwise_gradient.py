"""Gradients of both algorithms, and both in a model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from parity.lab.studies.stepwise import ALGORITHMS, Algorithm, Arithmetic, StepwiseCore
from parity.numerics.rounding import rounded
from parity.reference import Attention, CoreAttention
from parity.te import PRECISIONS

CASES = list(itertools.product(ALGORITHMS, (False, True)))


def passed(core: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of grouped-query attention."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 37, heads, 16, generator=generator, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    output = core(query, key, value)
    output.backward(torch.randn(output.shape, generator=generator, dtype=dtype))
    return [output.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]


@pytest.mark.parametrize(("algorithm", "everywhere"), CASES)
def test_in_fp64_output_and_gradients_are_autograd_s_of_plain_attention(algorithm: Algorithm, everywhere: bool) -> None:
    expected = passed(CoreAttention(causal=True), torch.float64)
    found = passed(StepwiseCore(Arithmetic(algorithm, "fp64", everywhere, tile=8)), torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("algorithm", "everywhere"), CASES)
def test_in_bf16_they_deviate_by_its_roundings(algorithm: Algorithm, everywhere: bool) -> None:
    expected = passed(CoreAttention(causal=True), torch.float32)
    found = passed(StepwiseCore(Arithmetic(algorithm, "bf16", everywhere, tile=8)), torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert 2**-10 < ((ours - theirs).norm() / theirs.norm()).item() < 2**-6


def test_a_rounding_model_around_a_network_leaves_the_attention_s_inside_alone() -> None:
    attention = Attention(32, 2, 2, rope=False)
    attention.core = StepwiseCore(Arithmetic("flash", "fp32"))  # type: ignore[assignment]
    seen: list[Tensor] = []
    attention.core.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with rounded(PRECISIONS["bf16"].rounding, attention.parameters()):
        attention(torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(seen[0], seen[0].bfloat16().float())
