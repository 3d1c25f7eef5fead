"""A cause is a fact only if with it the port agrees as well as a right one; its words say only what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from parity.numerics.factors import uneven

WIDTH = 64
te = parity.te.kernels("cpu").te


def findings(reference: nn.Module, port: nn.Module, inputs: Callable[..., Any], precision: str, **options: Any) -> Any:
    names = {name: name for name, _ in reference.named_parameters()}
    pair = parity.Pair(reference, port, inputs, names, fill=True, **options)
    (result,) = parity.compare(pair, precisions=[precision], backend="cpu", diagnosis_seconds=0)
    assert result.status == "failed"
    return result.findings


def tokens(rng: Any) -> Tensor:
    return rng.normal(2, 32, WIDTH)  # type: ignore[no-any-return]


# A number that is fitted takes a part of any error of its direction, and FP8's limits let the rest pass.


class Attention(nn.Module):
    def __init__(self, linear: Any, scales: Callable[[Tensor], Tensor] = lambda q: q) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.scales = scales
        with torch.no_grad():
            self.q.weight.mul_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (4, 16)).transpose(1, 2) for one in (self.q, self.k, self.v))
        context = F.scaled_dot_product_attention(self.scales(q), k, v, is_causal=True)
        return self.o(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def by_head(amount: float) -> Callable[[Tensor], Tensor]:
    return lambda q: q * (1.0 + amount * torch.arange(4).view(4, 1, 1) / 3).to(q.dtype)


def by_channel(q: Tensor) -> Tensor:
    return q * (1.0 + 0.1 * (torch.arange(16) % 2)).to(q.dtype)


@pytest.mark.parametrize("scales", [by_head(0.2), by_head(0.4), by_channel], ids=["heads", "more", "channels"])
def test_a_number_that_leaves_a_part_of_an_error_is_no_fact(scales: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    found = findings(Attention(nn.Linear), Attention(te.Linear, scales), tokens, "fp8_current")
    assert not any(one.sure for one in found if one.title == "softmax-scale")


def test_a_number_that_leaves_only_rounding_is_a_fact() -> None:
    torch.manual_seed(0)
    found = findings(Attention(nn.Linear), Attention(te.Linear, lambda q: 1.2 * q), tokens, "fp8_current")
    assert [(one.title, one.sure) for one in found] == [("softmax-scale", True)]


# A factor that a tensor holds is known as one in the code is, so that what does the same is told as its rival.


class BeforeNorm(nn.Module):
    def __init__(self, linear: Any, factor: float, as_tensor: bool = True) -> None:
        super().__init__()
        self.first, self.norm = linear(WIDTH, WIDTH, bias=False), nn.RMSNorm(WIDTH, eps=1e-6)
        self.second, self.factor, self.as_tensor = linear(WIDTH, WIDTH, bias=False), factor, as_tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.factor != 1.0:
            y = (torch.tensor(self.factor, dtype=x.dtype) if self.as_tensor else self.factor) * y
        return self.second(x + self.norm(y))  # type: ignore[no-any-return]


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("factor", [0.3, 0.22])
def test_a_factor_left_out_before_a_norm_is_not_told_as_another_norm(factor: float, as_tensor: bool) -> None:
    torch.manual_seed(0)
    found = findings(BeforeNorm(nn.Linear, factor, as_tensor), BeforeNorm(te.Linear, 1.0), tokens, "bf16")
    assert "factor" in {one.title for one in found}
    assert not any(one.sure for one in found if one.title != "factor")


# Of two losses with different averages a repair names the one that is wrong.


class TwoLosses(nn.Module):
    def __init__(self, linear: Any, averages: tuple[str, str]) -> None:
        super().__init__()
        self.body, self.one, self.other = (linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.averages = averages

    def forward(self, x: Tensor, labels: Tensor, others: Tensor) -> Tensor:
        y = self.body(x)
        first, second = (
            F.cross_entropy(z if z.dtype is torch.float64 else z.float(), given, reduction=average)
            for z, given, average in zip((self.one(y), self.other(y)), (labels, others), self.averages, strict=True)
        )
        return first + 0.01 * second


@pytest.mark.parametrize(
    ("averages", "right"),
    [(("mean", "mean"), "the sum over all tokens"), (("sum", "sum"), "the mean over the tokens that count")],
)
def test_the_loss_that_is_wrong_is_told_alone(averages: tuple[str, str], right: str) -> None:
    def inputs(rng: Any) -> tuple[Tensor, ...]:
        return rng.normal(32, WIDTH), rng.integers(32, high=WIDTH), rng.integers(32, high=WIDTH)

    torch.manual_seed(0)
    (found,) = findings(TwoLosses(nn.Linear, ("mean", "sum")), TwoLosses(te.Linear, averages), inputs, "bf16")
    assert found.title == "loss-scale"
    assert f"if you take {right}, as the reference does; the port's is " in found.message


# What a repair says of the reference holds wherever the reference scales.


class Embedded(nn.Module):
    def __init__(self, linear: Any, factor: float) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(96, WIDTH), nn.RMSNorm(WIDTH)
        self.layer, self.head = linear(WIDTH, WIDTH, bias=False), linear(WIDTH, 96, bias=False)
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table.weight * self.factor)
        return self.head(x + self.layer(self.norm(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("evaluation", [True, False])
def test_an_embedding_that_the_reference_scales_is_not_told_as_unscaled(evaluation: bool) -> None:
    torch.manual_seed(0)
    reference, port = Embedded(nn.Linear, 8.32), Embedded(te.Linear, 1.0)
    found = findings(reference, port, lambda rng: rng.integers(2, 32, high=96), "bf16", evaluation=evaluation)
    assert found[0].title in ("factor", "output-scale", "operation")
    assert not any("unscaled" in one.message for one in found)
    assert math.isclose(float(found[0].message.rpartition("the port's is ")[2].split()[0]), 1 / 8.32, rel_tol=0.01)


def test_slices_of_which_none_is_wrong_are_not_told() -> None:
    """Factors may scatter about their mean by more than rounding, and none of them be told from 1."""
    torch.manual_seed(0)
    right = torch.randn(64, 256, dtype=torch.float64)
    factors = 1.0 + 1e-3 * torch.linspace(-1.0, 1.0, 256, dtype=torch.float64)
    for noise in (1e-4, 1e-3, 2e-3, 3e-3, 5e-3):
        own = right * factors * (1.0 + noise * torch.randn_like(right))
        told = uneven(own, right, [right * (1.0 + noise * torch.randn_like(right))])
        assert told is None or " in 0 of its" not in told.told
