"""te.LayerNorm and te.RMSNorm with each of their options are PyTorch's norms."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import plain
import pytest
import torch
from agreement import assert_agree, te_on_cpu
from torch import nn
from weight_maps import norm_weights

import parity

HIDDEN = 96
EITHER_NORM = pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])


def agree_with_norm(
    kind: str, tokens: tuple[int, ...] = (2, 16), eps: float = 1e-5, scale: float = 1.0, **options: Any
) -> None:
    weights = norm_weights(kind, "", "", zero_centered=options.get("zero_centered_gamma", False))

    def build(te: ModuleType) -> parity.Pair:
        candidate = getattr(te, kind)(HIDDEN, eps=eps, **options)
        return parity.Pair(
            plain.norm(kind, HIDDEN, eps), candidate, lambda rng: rng.normal(*tokens, HIDDEN, std=scale), weights
        )

    assert_agree(build)


@EITHER_NORM
@pytest.mark.parametrize("tokens", [(24,), (3, 8), (2, 3, 4), (1,), ()], ids=str)
def test_norm_takes_any_number_of_leading_dimensions(kind: str, tokens: tuple[int, ...]) -> None:
    agree_with_norm(kind, tokens)


@EITHER_NORM
def test_zero_centered_gamma_stores_the_gain_minus_one(kind: str) -> None:
    agree_with_norm(kind, zero_centered_gamma=True)
    assert torch.equal(getattr(te_on_cpu(), kind)(HIDDEN, zero_centered_gamma=True).weight, torch.zeros(HIDDEN))


@EITHER_NORM
def test_eps_counts_where_the_input_is_small(kind: str) -> None:
    agree_with_norm(kind, eps=1e-2, scale=0.1)


@EITHER_NORM
@pytest.mark.parametrize("margin", [4, {"forward": 1, "backward": 2, "inference": 3}], ids=["number", "stages"])
def test_a_margin_of_multiprocessors_changes_nothing(kind: str, margin: Any) -> None:
    agree_with_norm(kind, sm_margin=margin)


@EITHER_NORM
def test_several_dimensions_are_normed_as_one(kind: str) -> None:
    shape = (6, 16)

    def build(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            getattr(nn, kind)(shape, eps=1e-5),
            getattr(te, kind)(shape),
            lambda rng: rng.normal(5, *shape),
            norm_weights(kind, "", ""),
        )

    assert_agree(build)


@EITHER_NORM
def test_the_input_may_lie_in_memory_in_any_order(kind: str) -> None:
    def build(te: ModuleType) -> parity.Pair:
        return parity.Pair(
            plain.norm(kind, HIDDEN),
            getattr(te, kind)(HIDDEN),
            lambda rng: rng.normal(8, 4, HIDDEN),
            norm_weights(kind, "", ""),
            call_reference=lambda module, x: module(x.transpose(0, 1)),
            call_candidate=lambda module, x: module(x.transpose(0, 1)),
        )

    assert_agree(build)
