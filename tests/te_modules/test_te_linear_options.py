"""te.Linear with each of its options is a linear layer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import plain
import pytest
import torch
from agreement import assert_agree, gradient, te_on_cpu
from packaging.version import Version
from weight_maps import kinds

import parity
from parity.case.weight_map import WeightMap
from parity.cpu import versions

IN, OUT = 64, 48
TOKENS = (2, 16)


def agree_with_linear(
    weights: WeightMap, bias: bool = True, bias_apart: bool = False, tokens: tuple[int, ...] = TOKENS, **options: Any
) -> None:
    def build(te: ModuleType) -> parity.Pair:
        candidate = te.Linear(IN, OUT, bias=bias, return_bias=bias_apart, **options)
        return parity.Pair(
            plain.linear(IN, OUT, bias, bias_apart), candidate, lambda rng: rng.normal(*tokens, IN), weights
        )

    assert_agree(build)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_a_linear_layer(bias: bool) -> None:
    agree_with_linear({kind: kind for kind in kinds(bias)}, bias)


@pytest.mark.parametrize("tokens", [(24,), (3, 8), (2, 3, 4), (1,)], ids=str)
def test_linear_takes_any_number_of_leading_dimensions(tokens: tuple[int, ...]) -> None:
    agree_with_linear({"weight": "weight", "bias": "bias"}, tokens=tokens)


@pytest.mark.skipif(
    versions.installed_version() < Version("2.20"),
    reason="the backward pass of TE's Linear takes vectors from 2.20 on",
)
def test_a_vector_counts_as_one_token() -> None:
    def build(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            plain.linear(IN, OUT),
            te.Linear(IN, OUT),
            lambda rng: rng.normal(IN),
            {"weight": "weight", "bias": "bias"},
            call_candidate=lambda module, x: module(x).squeeze(0),
        )

    assert_agree(build)


def test_return_bias_leaves_the_bias_to_the_caller() -> None:
    agree_with_linear({"weight": "weight", "bias": "bias"}, bias_apart=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("split", "names"),
    [
        (("query", "key", "value"), ("query", "key", "value")),
        ({"gate_": 32, "up_": 16}, ("gate", "up")),
        (("only",), ("only",)),
    ],
    ids=["equal", "sizes", "one"],
)
def test_parameters_split_stacks_named_parameters(split: Any, names: tuple[str, ...], bias: bool) -> None:
    weights: WeightMap = {kind: parity.stack(*(f"{name}_{kind}" for name in names)) for kind in kinds(bias)}
    agree_with_linear(weights, bias, parameters_split=split)


def test_save_original_input_changes_nothing() -> None:
    agree_with_linear({"weight": "weight", "bias": "bias"}, save_original_input=True)


@pytest.mark.parametrize("parallel_mode", ["column", "row"])
def test_a_parallel_mode_on_one_device_changes_nothing(parallel_mode: str) -> None:
    agree_with_linear({"weight": "weight", "bias": "bias"}, parallel_mode=parallel_mode, tp_size=1)


def test_init_method_fills_the_weight_and_zeros_the_bias() -> None:
    module = te_on_cpu().Linear(IN, OUT, init_method=lambda weight: torch.nn.init.constant_(weight, 0.25))
    assert torch.equal(module.weight, torch.full((OUT, IN), 0.25))
    assert torch.equal(module.bias, torch.zeros(OUT))


def test_the_weight_is_drawn_from_the_tracked_random_state() -> None:
    te = te_on_cpu()
    tracker = te.CudaRNGStatesTracker()
    tracker.add("weights", 7)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    module = te.Linear(IN, OUT, get_rng_state_tracker=lambda: tracker, rng_tracker_name="weights")
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = torch.empty(OUT, IN).normal_(0.0, 0.023)
    assert torch.equal(module.weight, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_delayed_weight_gradient_comes_when_it_is_called_for(bias: bool) -> None:
    te = te_on_cpu()
    at_once, delayed = (te.Linear(IN, OUT, bias=bias, delay_wgrad_compute=delay) for delay in (False, True))
    delayed.load_state_dict(at_once.state_dict())
    x, of_output = torch.randn(*TOKENS, IN), torch.randn(*TOKENS, OUT)
    for module in (at_once, delayed):
        module(x).backward(of_output)
    assert delayed.weight.grad is None
    delayed.backward_dw()
    assert torch.equal(gradient(delayed.weight), gradient(at_once.weight))
    if bias:
        assert torch.equal(gradient(delayed.bias), gradient(at_once.bias))


def test_meta_parameters_are_filled_by_reset_parameters() -> None:
    module = te_on_cpu().Linear(IN, OUT, device="meta")
    assert module.weight.is_meta
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert 0.02 < module.weight.std().item() < 0.026
    assert module(torch.randn(4, IN)).isfinite().all()
