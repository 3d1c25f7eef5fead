"""A pair that names a GPU is built on the CPU where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.te.named_devices import cuda_is_cpu_without_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="describes machines without a GPU")


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.ones(2, device="cuda"),
        lambda: torch.arange(2, device=torch.device("cuda", 1)),
        lambda: torch.tensor([1.0], device="cuda:0"),
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to("cuda", torch.bfloat16, non_blocking=True),
        lambda: torch.zeros_like(torch.ones(2), device="cuda"),
        lambda: nn.Linear(2, 2, device="cuda").weight,
        lambda: nn.Linear(2, 2).cuda().weight,
        lambda: nn.Linear(2, 2).to(device="cuda", dtype=torch.bfloat16).weight,
    ],
)
def test_what_names_a_gpu_is_made_on_the_cpu(made: Callable[[], Tensor]) -> None:
    with cuda_is_cpu_without_gpu():
        assert made().device.type == "cpu"


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_other_devices_stay(device: str | torch.device) -> None:
    with cuda_is_cpu_without_gpu():
        assert torch.ones(2, device=device).is_meta
        assert torch.ones(2).to(device).is_meta


def test_a_pair_that_was_written_on_a_gpu_is_compared() -> None:
    @parity.pair("on_a_gpu")
    def on_a_gpu(te):
        return parity.Pair(
            reference=nn.Linear(32, 32, device="cuda"),
            candidate=te.Linear(32, 32, device="cuda").to("cuda"),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: rng.normal(32, 32).cuda(),
        )

    (result,) = parity.compare(on_a_gpu, precisions=["bf16"])
    assert result.passed, result.reason


def test_a_call_that_names_a_gpu_is_told_what_to_do() -> None:
    @parity.pair("call_on_a_gpu")
    def call_on_a_gpu(te):
        return parity.Pair(
            reference=nn.Linear(32, 32),
            candidate=te.Linear(32, 32),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: rng.normal(32, 32),
            call_reference=lambda module, x: module(x.cuda()),
        )

    (result,) = parity.compare(call_on_a_gpu, precisions=["bf16"])
    assert result.status == "error"
    assert "this machine has no GPU: take the device of a tensor that is there (x.device)" in result.reason
