"""Errors that TransformerEngine itself raises reach the user as TE raised them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import te_on_cpu
from torch import Tensor

BF16 = torch.bfloat16
# Which class TE raises has changed between its versions; the words have not.
TE_ERRORS = (AssertionError, ValueError, RuntimeError, NotImplementedError, TypeError)


def in_fp8(te: Any, module: Any, x: Tensor, recipe: Any = None) -> None:
    with te.autocast(enabled=True, recipe=recipe):
        module(x)


def recipes() -> Any:
    te_on_cpu()
    from transformer_engine.common import recipe

    return recipe


MISTAKES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "FP8 with a width that is no multiple of 16": (
        "divisible by 16",
        lambda te: in_fp8(te, te.Linear(20, 32, params_dtype=BF16), torch.ones(8, 20, dtype=BF16)),
    ),
    "FP8 with a number of tokens that is no multiple of 8": (
        "divisible by 8",
        lambda te: in_fp8(te, te.Linear(32, 32, params_dtype=BF16), torch.ones(3, 32, dtype=BF16)),
    ),
    "FP8 with a weight that is no multiple of 16": (
        "divisible by",
        lambda te: in_fp8(te, te.LayerNormLinear(32, 20, params_dtype=BF16), torch.ones(8, 32, dtype=BF16)),
    ),
    "a recipe that the GPU lacks": (
        "compute capability 10.0 or higher",
        lambda te: in_fp8(
            te, te.Linear(32, 32, params_dtype=BF16), torch.ones(32, 32, dtype=BF16), recipes().MXFP8BlockScaling()
        ),
    ),
    "an activation that TE does not know": (
        "swoosh",
        lambda te: te.LayerNormMLP(32, 64, activation="swoosh")(torch.ones(8, 32)),
    ),
    "a normalization that TE does not know": (
        "normalization",
        lambda te: te.LayerNormLinear(32, 32, normalization="BatchNorm"),
    ),
    "a mask that TE does not know": (
        "mask",
        lambda te: te.DotProductAttention(2, 16, attn_mask_type="diagonal")(*3 * [torch.ones(8, 2, 2, 16, dtype=BF16)]),
    ),
    "an input of another width": (
        "GEMM not possible",
        lambda te: te.Linear(32, 32)(torch.ones(8, 16)),
    ),
    "heads that groups do not divide": (
        "divisible",
        lambda te: te.MultiheadAttention(64, 4, num_gqa_groups=3),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_meets_te_s_own_error(mistake: str) -> None:
    words, make = MISTAKES[mistake]
    with pytest.raises(TE_ERRORS, match=words) as raised:
        make(te_on_cpu())
    assert "transformer_engine" in str(raised.traceback[-1].path)
