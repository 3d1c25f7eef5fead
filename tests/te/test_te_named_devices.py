"""A pair that names a GPU is built on the CPU if there is no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.shown import raised
from parity.te.devices import cuda_is_cpu_without_gpu

TOLD = "this machine has no GPU: use the device of an existing tensor (x.device)"
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
        lambda: torch.ones(2, device=0),
        lambda: torch.ones(2).to(0),
        lambda: torch.ones(2).cuda(0),
        lambda: nn.Linear(2, 2, device=0).weight,
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
            reference=nn.Linear(32, 32, device="cuda").to(torch.device("cuda", 0)),
            candidate=te.Linear(32, 32, device=0).to("cuda"),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: rng.normal(32, 32).cuda().to(0),
        )

    (result,) = parity.compare(on_a_gpu, precisions=["bf16"])
    assert result.passed, result.reason


WITHOUT_CUDA = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="a PyTorch that is built for CUDA makes it without a GPU"
)

# Code that cannot run on the CPU instead of a GPU ends in an error that says what to do.


def asked(where: str, ask: Callable[[], object]) -> parity.Case:
    """Return a case that asks for a GPU at one place."""

    def at(place: str, value: Any) -> Any:
        if place == where:
            ask()
        return value

    @parity.pair(f"asked_in_{where}")
    def pair(te):
        return parity.Pair(
            reference=at("reference", nn.Linear(32, 32)),
            candidate=at("candidate", te.Linear(32, 32)),
            weights={"weight": "weight", "bias": "bias"},
            inputs=lambda rng: at("inputs", rng.normal(32, 32)),
            call_reference=lambda module, x: module(at("call_reference", x)),
            call_candidate=lambda module, x: module(at("call_candidate", x)),
        )

    return pair


@pytest.mark.parametrize("where", ["reference", "candidate", "inputs"])
@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda: torch.cuda.current_device(), id="current_device"),
        pytest.param(lambda: nn.Linear(2, 2).to(0), id="module.to(0)", marks=WITHOUT_CUDA),
    ],
)
def test_a_pair_that_cannot_be_built_is_refused_with_what_to_do(where: str, ask: Callable[[], object]) -> None:
    with pytest.raises(parity.UserError, match=re.escape(TOLD)):
        parity.compare(asked(where, ask), precisions=["bf16"])


@pytest.mark.parametrize("where", ["call_reference", "call_candidate"])
@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda: torch.ones(2).cuda(), id=".cuda()"),
        pytest.param(lambda: torch.ones(2).to("cuda"), id='.to("cuda")'),
        pytest.param(lambda: torch.ones(2, device=torch.device("cuda")), id='torch.device("cuda")'),
        pytest.param(lambda: torch.ones(2, device=0), id="device=0"),
        pytest.param(lambda: torch.cuda.current_device(), id="current_device"),
    ],
)
def test_a_call_is_not_made_on_the_cpu_but_told_what_to_do(where: str, ask: Callable[[], object]) -> None:
    (result,) = parity.compare(asked(where, ask), precisions=["bf16"])
    assert result.status == "error"
    assert TOLD in result.reason


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda: torch.device(0), id="torch.device(0)", marks=WITHOUT_CUDA),
        pytest.param(lambda: torch.cuda.device(0).__enter__(), id="torch.cuda.device(0)"),
        pytest.param(lambda: torch.cuda.set_device(0), id="set_device"),
        pytest.param(lambda: torch.cuda.synchronize(), id="synchronize"),
        pytest.param(lambda: torch.cuda.get_device_capability(), id="get_device_capability"),
        pytest.param(lambda: torch.cuda.reset_peak_memory_stats(), id="reset_peak_memory_stats", marks=WITHOUT_CUDA),
        pytest.param(lambda: torch.cuda.Stream(), id="Stream"),
        pytest.param(lambda: torch.cuda.Event(), id="Event", marks=WITHOUT_CUDA),
        pytest.param(lambda: torch.Generator(device="cuda"), id="Generator"),
        pytest.param(lambda: torch.ones(2).type("torch.cuda.FloatTensor"), id="FloatTensor"),
    ],
)
def test_pytorch_says_in_many_ways_that_there_is_no_gpu(ask: Callable[[], object]) -> None:
    with pytest.raises((AssertionError, AttributeError, RuntimeError)) as error, cuda_is_cpu_without_gpu():
        ask()
    assert TOLD in raised(error.value)
