"""A comparison is the same whatever PyTorch's modes are around it, and whatever modes a module leaves behind."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager

import pytest
import torch
from bad_input import linear, mlp, result_of

import parity

TOKENS, WIDTH = 16, 32


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
