"""A port that computes FP32 GEMMs without TF32 passes, and its result says that it is more accurate than expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bad_input import TOKENS, linear, mlp, result_of, te
from torch import Tensor, nn

import parity
from parity.cpu.kernel_choices import kernel_choices

NOTE = "more accurate than expected"


class Chain(nn.Module):
    """Two modules, one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Gram(nn.Module):
    """Products of a norm's rows with each other, which no layer computes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        return rows @ rows.transpose(-1, -2)


def pair(reference: nn.Module, candidate: nn.Module, *names: str) -> parity.Pair:
    weights = {name: name for name in names}
    return parity.Pair(reference, candidate, weights=weights, inputs=lambda rng: rng.normal(2 * TOKENS, 64), fill=True)


def norm() -> nn.Module:
    return nn.RMSNorm(64, eps=1e-5)


HEAD = ("second.weight", "second.bias")
WITH_TE_GEMMS: dict[str, Callable[[], parity.Pair]] = {
    "linear": linear,
    "mlp": lambda: mlp(lambda rng: rng.normal(2, 32, 32)),
    "linear before a layer outside TE": lambda: pair(
        Chain(nn.Linear(64, 64), nn.Linear(64, 32)), Chain(te.Linear(64, 64), nn.Linear(64, 32)),
        "first.weight", "first.bias", *HEAD,
    ),
}  # fmt: skip
WITHOUT: dict[str, Callable[[], parity.Pair]] = {
    "norm": lambda: pair(norm(), te.RMSNorm(64), "weight"),
    "norm before a layer outside TE": lambda: pair(
        Chain(norm(), nn.Linear(64, 32)), Chain(te.RMSNorm(64), nn.Linear(64, 32)), "first.weight", *HEAD
    ),
    "norm before a product of activations": lambda: pair(Gram(norm()), Gram(te.RMSNorm(64)), "norm.weight"),
}


def notes(build: Callable[[], parity.Pair], precision: str, *choices: str) -> str:
    torch.manual_seed(0)
    with kernel_choices(*choices):
        result = result_of(build(), precision)
    assert result.passed
    return " ".join(result.notes)


@pytest.mark.parametrize("name", WITH_TE_GEMMS)
def test_gemms_without_tf32_are_noted_with_the_tensors_that_show_it(name: str) -> None:
    told = notes(WITH_TE_GEMMS[name], "fp32", "fp32-exact")
    assert f"{NOTE}: less than 10% of the error that TF32 costs, as if its FP32 GEMMs were true FP32" in told
    assert "output" in told


@pytest.mark.parametrize("name", [*WITH_TE_GEMMS, *WITHOUT])
def test_right_ports_on_tf32_kernels_are_not(name: str) -> None:
    assert NOTE not in notes((WITH_TE_GEMMS | WITHOUT)[name], "fp32")


@pytest.mark.parametrize("name", WITHOUT)
def test_parts_without_gemms_of_te_are_as_accurate_as_expected(name: str) -> None:
    assert NOTE not in notes(WITHOUT[name], "fp32", "fp32-exact")


def test_other_precisions_have_no_tf32_to_be_without() -> None:
    assert NOTE not in notes(linear, "bf16", "fp32-exact")
