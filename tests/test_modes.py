"""A comparison is the same whatever PyTorch's modes are around it, and whatever modes a module leaves behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from bad_input import linear, mlp, result_of

import parity
from parity.passes import modes

TOKENS, WIDTH = 16, 32


def matmul_setting(backend: str, setting: str) -> None:
    torch._C._set_fp32_precision_setter(backend, "matmul", setting)


# What users set, by the older functions and by the newer settings; reading one after setting the other may raise.
REDUCED: dict[str, Callable[[], None]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "all of PyTorch": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "cuBLAS": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "oneDNN": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "older, then newer": lambda: (torch.set_float32_matmul_precision("medium"), matmul_setting("mkldnn", "tf32"))[0],
    "nothing": lambda: None,
}


@pytest.fixture
def products_as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for place in modes._SETTINGS:
        torch._C._set_fp32_precision_setter(
            *place, "tf32" if place[1] in ("conv", "rnn") and place[0] == "cuda" else "none"
        )


def flags() -> list[str]:
    """Every flag of FP32 products, convolutions and recurrent layers; of one that cannot be read, that it cannot."""

    def read(flag: Callable[[], object]) -> str:
        try:
            return str(flag())
        except RuntimeError:
            return "cannot be read"

    older = (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    )
    return [read(flag) for flag in older] + [torch._C._get_fp32_precision_getter(*place) for place in modes._SETTINGS]


@pytest.mark.usefixtures("products_as_before")
@pytest.mark.parametrize("name", REDUCED)
def test_fp32_is_fp32_within_a_comparison_and_afterwards_what_it_was(name: str):
    seen = []

    def call(module, x):
        seen.append(flags())
        return module(x)

    REDUCED[name]()
    before = flags()
    assert result_of(linear(call_reference=call)).passed
    assert flags() == before
    assert seen
    assert all(one == ["highest", "False", "False"] + ["ieee"] * len(modes._SETTINGS) for one in seen)


@pytest.mark.usefixtures("products_as_before")
@pytest.mark.parametrize("name", ["high", "medium", "oneDNN"])
def test_reduced_products_around_it_change_no_number(name: str):
    """In BF16, which CPUs with such instructions multiply by, golden's FP32 neighbours would lose a thousandfold."""
    torch.manual_seed(0)
    pair = mlp(lambda rng: rng.normal(TOKENS, WIDTH))
    expected = result_of(pair)
    REDUCED[name]()
    found = result_of(pair)
    assert (found.tensors, found.notes) == (expected.tensors, expected.notes)


@pytest.mark.usefixtures("products_as_before")
def test_the_flags_are_put_back_after_an_exception():
    REDUCED["medium"]()
    before = flags()
    with pytest.raises(KeyError), modes.usual_modes():
        raise KeyError
    assert flags() == before


@pytest.mark.parametrize("precision", ["fp32", "fp8_current"])
@pytest.mark.parametrize(
    "mode",
    [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference", "autocast"],
)
def test_a_mode_around_it_changes_no_number(mode: AbstractContextManager[None], precision: str):
    torch.manual_seed(0)
    pair = mlp(lambda rng: rng.normal(TOKENS, WIDTH))
    expected = result_of(pair, precision)
    assert expected.passed
    with mode:
        found = result_of(pair, precision)
    assert (found.tensors, found.notes) == (expected.tensors, expected.notes)


def test_a_candidate_that_turns_gradients_off_fails_and_leaves_them_on():
    def call(module, x):
        torch.set_grad_enabled(False)
        return module(x)

    result = result_of(linear(call_candidate=call))
    assert result.status == "failed"
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "mode", [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)], ids=["inference", "cast"]
)
def test_a_map_is_suggested_as_usual_inside_a_mode(mode: AbstractContextManager[None]):
    torch.manual_seed(0)
    pair = dataclasses.replace(mlp(lambda rng: rng.normal(TOKENS, WIDTH)), weights={})
    with mode:
        suggestion = parity.suggest_map(pair)
    assert suggestion.settled
