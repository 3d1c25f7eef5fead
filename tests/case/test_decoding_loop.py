"""``parity.Decoding``: the loop over tokens returns the same as one pass, in every format, and names its limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from parity import te
from parity.case.registry import load_case

TE = te.kernels("cpu").te
BATCH, SEQ, HIDDEN, HEADS, GROUPS, HEAD_DIM = 3, 10, 64, 4, 2, 16


def attention(qkv_format: str) -> nn.Module:
    torch.manual_seed(0)
    return TE.MultiheadAttention(
        *(HIDDEN, HEADS),
        num_gqa_groups=GROUPS,
        qkv_format=qkv_format,
        attn_mask_type="causal",
        attention_dropout=0.0,
        layer_number=1,
        device="cpu",
    ).eval()


def whole(x: Tensor) -> Tensor:
    rope = TE.RotaryPositionEmbedding(HEAD_DIM)(SEQ)
    return attention("bshd")(x, attn_mask_type="causal", rotary_pos_emb=rope)


@pytest.mark.parametrize("lengths", [None, (10, 7, 4)], ids=["equal", "ragged"])
@pytest.mark.parametrize("prompt", [1, 4, (4, 6, 2)])
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_decoded_tokens_are_those_of_one_pass(qkv_format: Any, page_size, prompt, lengths):
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1))
    decode = parity.Decoding(GROUPS, HEAD_DIM, prompt=prompt, qkv_format=qkv_format, page_size=page_size)
    ends = torch.tensor(lengths or (SEQ,) * BATCH)
    rope = TE.RotaryPositionEmbedding(HEAD_DIM)(2 * SEQ)  # padded prompts reach beyond the sequence
    with torch.no_grad():
        decoded = decode(attention(qkv_format), x, None if lengths is None else ends, rotary_pos_emb=rope)
        expected = whole(x) * (torch.arange(SEQ) < ends[:, None])[..., None]
    assert decoded.shape == expected.shape
    assert (decoded - expected).norm() <= 2.0**-11 * expected.norm()  # TF32 products of different sizes


@pytest.mark.parametrize(
    ("decode", "lengths", "told"),
    [
        (parity.Decoding(GROUPS, HEAD_DIM, prompt=0), None, "must be one number of tokens, from 1"),
        (parity.Decoding(GROUPS, HEAD_DIM, prompt=(1, 2)), None, "one for each of 3 sequences"),
        (parity.Decoding(GROUPS, HEAD_DIM), torch.zeros(BATCH), "a batch without tokens cannot be decoded"),
    ],
)
def test_what_cannot_be_decoded_is_said(decode, lengths, told):
    with pytest.raises(parity.UserError, match=told):
        decode(attention("bshd"), torch.zeros(BATCH, SEQ, HIDDEN), lengths)


def test_a_module_that_takes_no_cache_is_told_how_to_be_called():
    with pytest.raises(parity.UserError, match=r"Linear.forward takes no inference_params.*step=lambda"):
        parity.Decoding(GROUPS, HEAD_DIM)(nn.Linear(HIDDEN, HIDDEN), torch.zeros(BATCH, SEQ, HIDDEN))


# The example passes, and wrong uses of TE's cache are found.

EXAMPLE = Path(__file__).parents[2] / "examples" / "decoding" / "llama.py"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current", "fp8_delayed"])
def test_the_example_passes_and_says_what_rounding_makes_of_log_probabilities(precision):
    (result,) = parity.compare(load_case(EXAMPLE, "decoded_llama"), [precision])
    assert result.passed, (result.reason, result.findings)
    assert {tensor.kind for tensor in result.tensors} == {"output", "probed output"}
    assert any("by rounding alone" in note for note in result.notes)


def test_positions_that_begin_at_0_in_each_step_are_told(monkeypatch):
    counted = TE.InferenceParams.get_seqlens_pre_step
    monkeypatch.setattr(TE.InferenceParams, "get_seqlens_pre_step", lambda cache: torch.zeros_like(counted(cache)))
    (result,) = parity.compare(load_case(EXAMPLE, "decoded_llama"), ["fp32"])
    assert result.status == "failed"
    assert result.findings[0].title == "rope-position"
    assert "from position 8 on each new token is rotated as the first" in result.findings[0].message


@pytest.mark.parametrize(("declared", "status"), [(0, "skipped"), (2, "error")])
def test_a_pair_in_evaluation_mode_is_not_trained(declared, status):
    case = replace(load_case(EXAMPLE, "decoded_llama"), steps=declared)
    (result,) = parity.compare(case, ["bf16"], steps=2)
    assert result.status == status
    assert "the pair is in evaluation mode, without gradients, so it cannot be trained" in result.reason


def test_gradients_are_not_compared_in_evaluation_mode():
    seen: list[tuple[bool, bool]] = []

    def call(module: nn.Module, x: Tensor) -> Tensor:
        seen.append((module.training, torch.is_grad_enabled()))
        return module(x)

    pair = parity.Pair(
        nn.Linear(32, 32),
        TE.Linear(32, 32),
        weights={"weight": "weight", "bias": "bias"},
        inputs=lambda rng: rng.normal(16, 32),
        call_candidate=call,
        fill=True,
        evaluation=True,
    )
    (result,) = parity.compare(pair, ["bf16"])
    assert result.passed, result.reason
    assert {tensor.kind for tensor in result.tensors} == {"output", "probed output"}
    assert set(seen) == {(False, False)}
    assert not result.notes
