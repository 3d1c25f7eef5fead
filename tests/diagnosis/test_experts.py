"""Mixtures of experts: what the corpus's rows of them cannot say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import parity
from lab.corpus.small_ports.experts import FUSED, MIXTURE
from parity.search.precision_mistakes import _share


def test_nothing_known_is_told_for_weights_that_are_applied_within_the_experts():
    """Their error is similar to that of known mistakes, and the rows of the probing inputs, near zero, are alike."""
    (result,) = parity.compare(MIXTURE.case(at_the_gate=True), ["bf16"])
    assert {found.title for found in result.findings} <= {"unexplained", "first-divergence"}


def test_a_loss_that_is_detached_is_an_error_though_rounding_hides_its_gradients():
    (result,) = parity.compare(FUSED.case(detach=True), ["bf16"])
    assert result.status == "error"
    assert "output[1] of the candidate has no gradient" in result.reason


@pytest.mark.parametrize(("rows", "is_nearer"), [(range(1), False), (range(64), True)])
def test_one_token_of_another_expert_does_not_tell_of_another_rounding(rows, is_nearer):
    """Compare with a rounding that moves one token to another expert; the candidate has all its errors or only that."""
    key = ("output", "y")
    own, other = torch.zeros(64, 16), torch.full((64, 16), 1e-3)
    other[0] = 1.0
    candidate = 1e-4 * torch.randn(64, 16)
    candidate[list(rows)] += other[list(rows)]
    failure: Any = SimpleNamespace(candidate={key: candidate})
    result: Any = SimpleNamespace(key=key)
    assert (_share(failure, result, {key: other}, {key: own}) < 0.5) == is_nearer
