"""Golden is FP64 throughout, also where the reference asks for FP32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parity
from parity.numerics.golden import in_fp64

te = parity.te.kernels("cpu").te
X = torch.randn(4, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: F.layer_norm(x.float(), (8,)),
    ],
)
def test_what_is_asked_for_in_fp32_is_computed_in_fp64(compute):
    with in_fp64():
        found = compute(X)
    assert found.dtype is torch.float64
    assert torch.allclose(found, compute(X).double(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(found, compute(X).double())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3),
        lambda: torch.full((3,), 0.1),
        lambda: torch.arange(3).float() / 7,
        lambda: torch.ones(3, dtype=torch.float32),
    ],
)
def test_numbers_that_the_reference_makes_join_fp64(make):
    with in_fp64():
        assert make().dtype is torch.float64


def test_numbers_that_the_reference_draws_are_those_of_fp32():
    plain = torch.randn(16, generator=torch.Generator().manual_seed(3))
    with in_fp64():
        wide = torch.randn(16, generator=torch.Generator().manual_seed(3))
    assert torch.equal(wide, plain.double())


def test_half_precision_and_integers_are_left_to_the_reference():
    with in_fp64():
        assert X.to(torch.bfloat16).dtype is torch.bfloat16
        assert X.long().dtype is torch.int64
        assert torch.arange(3).dtype is torch.int64


def test_what_the_reference_holds_in_fp32_stays_as_it_is():
    held = torch.full((8,), 0.1)
    with in_fp64():
        assert (held * 2).dtype is torch.float32
        assert (held * X).dtype is torch.float64


def test_a_gradient_goes_through_such_a_cast_that_the_backward_pass_makes_again():
    x = X.clone().requires_grad_()
    with in_fp64():
        loss = checkpoint(lambda x: (x.float() ** 2).sum(), x, use_reentrant=False)
        torch.autograd.backward(loss)
    assert torch.equal(x.grad, 2 * X)


class NormInFp32(nn.Module):
    """As a model's author writes one that must not run in half precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x.float(), (x.shape[-1],), self.weight.float(), self.bias.float()).type_as(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_reference_that_computes_in_fp32_has_an_expected_error(precision):
    pair = parity.Pair(
        NormInFp32(1024),
        te.LayerNorm(1024, eps=1e-5),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng: rng.normal(64, 1024),
    )
    for result in parity.compare(pair, [precision], seeds=range(3)):
        assert result.passed
        assert all(tensor.expected.relative_l2 > 0 for tensor in result.tensors if tensor.name != "bias")
        assert not result.notes


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.norm, self.linear = NormInFp32(32), nn.Linear(32, 32)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(lambda x: self.linear(self.norm(x)), x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_reference_with_checkpoints_is_compared(use_reentrant):
    pair = parity.Pair(
        Checkpointed(use_reentrant),
        te.LayerNormLinear(32, 32, eps=1e-5),
        weights={f"norm.{name}": f"layer_norm_{name}" for name in ("weight", "bias")}
        | {f"linear.{name}": name for name in ("weight", "bias")},
        inputs=lambda rng: rng.normal(16, 32),
        fill=True,
    )
    assert [result.status for result in parity.compare(pair, ["fp32", "bf16"])] == ["passed", "passed"]
