"""TE's unfused attention on the CPU, with each of its options, against FP64."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import attention_oracle as oracle
import backend_choice
import pytest
import torch
from torch import Tensor

from parity import te

BF16, FP32 = torch.bfloat16, torch.float32
BATCH, SEQ, HEADS, FEATURES = 2, 32, 4, 16
CAUSAL = oracle.visible(SEQ, SEQ, right=0)


@pytest.fixture(scope="module")
def te_module() -> ModuleType:
    return te.kernels("cpu").te


@pytest.fixture(autouse=True)
def _unfused(te_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine_torch as tex

    def fail(*_arguments: Any) -> None:
        raise AssertionError("the fused kernel was called")

    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setattr(tex, "fused_attn_fwd", fail)
    backend_choice.choose_again()


def leaves(dtype: torch.dtype, keys: int = SEQ, groups: int = HEADS) -> list[Tensor]:
    """Query, key, value and output gradient, ``[batch, seq, heads, features]``."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(SEQ, HEADS), (keys, groups), (keys, groups), (SEQ, HEADS)]
    return [torch.randn(BATCH, *shape, FEATURES, generator=rng).to(dtype) for shape in shapes]


def assert_agrees(
    te_module: ModuleType,
    tensors: list[Tensor],
    visible: Tensor,
    call: dict[str, Any],
    build: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Output and gradients are those of the formula, as far as their dtype goes."""
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    attention = te_module.DotProductAttention(
        HEADS,
        FEATURES,
        num_gqa_groups=tensors[1].shape[2],
        attention_dropout=0.0,
        qkv_format="bshd",
        **(build or {}),
    )
    output = attention(*inputs, **call).view_as(tensors[3])
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors[:3])
    exact = oracle.attend(q, k, v, visible, **options)
    actual = [output, *torch.autograd.grad(output, inputs, tensors[3])]
    expected = [exact, *torch.autograd.grad(exact, [q, k, v], tensors[3].double())]
    # Scores, probabilities and their gradients are stored in BF16, each rounded.
    tolerance = 2.0 if tensors[0].dtype == BF16 else 16.0
    for got, wanted in zip(actual, expected, strict=True):
        assert oracle.relative_error(got, wanted) <= tolerance


dtypes = pytest.mark.parametrize("dtype", [BF16, FP32])


@dtypes
def test_cross_attention_of_unequal_lengths(te_module: ModuleType, dtype: torch.dtype) -> None:
    everything = oracle.visible(SEQ, 48)
    call, build = {"attn_mask_type": "no_mask"}, {"attention_type": "cross"}
    assert_agrees(te_module, leaves(dtype, 48, groups=2), everything, call, build)


@dtypes
def test_causal_bottom_right_lets_the_last_query_see_all_keys(te_module: ModuleType, dtype: torch.dtype) -> None:
    visible = oracle.visible(SEQ, 48, right=0, offset=16)
    call, build = {"attn_mask_type": "causal_bottom_right"}, {"attention_type": "cross"}
    assert_agrees(te_module, leaves(dtype, 48), visible, call, build)


@dtypes
def test_an_arbitrary_mask_hides_what_is_true(te_module: ModuleType, dtype: torch.dtype) -> None:
    visible = torch.rand(BATCH, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(2)) < 0.5
    visible |= torch.eye(SEQ, dtype=torch.bool)
    assert_agrees(te_module, leaves(dtype), visible, {"attn_mask_type": "arbitrary", "attention_mask": ~visible})


@dtypes
def test_a_bias_is_added_after_scaling(te_module: ModuleType, dtype: torch.dtype) -> None:
    bias = torch.randn(1, HEADS, SEQ, SEQ, generator=torch.Generator().manual_seed(1)).to(dtype)
    call = {
        "attn_mask_type": "causal",
        "core_attention_bias_type": "post_scale_bias",
        "core_attention_bias": bias,
    }
    assert_agrees(te_module, leaves(dtype), CAUSAL, call, bias=bias.double())


@dtypes
def test_a_bias_before_scaling_is_scaled(te_module: ModuleType, dtype: torch.dtype) -> None:
    bias = torch.randn(1, HEADS, SEQ, SEQ, generator=torch.Generator().manual_seed(1)).to(dtype)
    call = {
        "attn_mask_type": "causal",
        "core_attention_bias_type": "pre_scale_bias",
        "core_attention_bias": bias,
    }
    assert_agrees(te_module, leaves(dtype), CAUSAL, call, bias=bias.double() / FEATURES**0.5)


@dtypes
@pytest.mark.parametrize("slopes", [None, [0.5, 0.25, 0.1, 0.0]])
def test_alibi_takes_slopes_times_distance_from_scores(
    te_module: ModuleType, dtype: torch.dtype, slopes: list[float] | None
) -> None:
    call: dict[str, Any] = {"attn_mask_type": "causal", "core_attention_bias_type": "alibi"}
    if slopes is not None:
        call["alibi_slopes"] = torch.tensor(slopes)
    slope = torch.tensor(slopes or [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).double().view(1, HEADS, 1, 1)
    distance = (torch.arange(SEQ)[:, None] - torch.arange(SEQ)).abs()
    assert_agrees(te_module, leaves(dtype), CAUSAL, call, bias=-slope * distance)


@dtypes
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_sinks_take_part_in_the_softmax(te_module: ModuleType, dtype: torch.dtype, softmax_type: str) -> None:
    assert_agrees(
        te_module,
        leaves(dtype),
        CAUSAL,
        {"attn_mask_type": "causal"},
        {"softmax_type": softmax_type},
        sink=torch.zeros(HEADS).double(),
    )


@dtypes
def test_softcap_bounds_the_scaled_scores(te_module: ModuleType, dtype: torch.dtype) -> None:
    if "softcap" not in inspect.signature(te_module.DotProductAttention).parameters:
        pytest.skip("this TransformerEngine has no softcap")
    assert_agrees(te_module, leaves(dtype), CAUSAL, {"attn_mask_type": "causal"}, {"softcap": 0.5}, softcap=0.5)


@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
def test_a_bias_gets_a_gradient(te_module: ModuleType, kind: str) -> None:
    query, key, value, gradient = leaves(FP32)
    bias = torch.randn(1, HEADS, SEQ, SEQ, generator=torch.Generator().manual_seed(1)).requires_grad_()
    attention = te_module.DotProductAttention(HEADS, FEATURES, attention_dropout=0.0, qkv_format="bshd")
    call = {"attn_mask_type": "causal", "core_attention_bias_type": kind, "core_attention_bias": bias}
    output = attention(query, key, value, **call).view_as(gradient)
    exact_bias = bias.detach().double().requires_grad_()
    scaled = exact_bias / FEATURES**0.5 if kind == "pre_scale_bias" else exact_bias
    exact = oracle.attend(query.double(), key.double(), value.double(), CAUSAL, bias=scaled)
    (actual,) = torch.autograd.grad(output, bias, gradient)
    (expected,) = torch.autograd.grad(exact, exact_bias, gradient.double())
    assert oracle.relative_error(actual, expected) <= 16


def test_packed_sequences_are_padded_and_packed_again(te_module: ModuleType) -> None:
    tensors = leaves(FP32)
    is_token = oracle.tokens((SEQ, 20), SEQ)
    cumulative = torch.tensor([0, SEQ, SEQ + 20], dtype=torch.int32)
    inputs = [tensor[is_token].requires_grad_() for tensor in tensors[:3]]
    attention = te_module.DotProductAttention(HEADS, FEATURES, attention_dropout=0.0, qkv_format="thd")
    output = attention(
        *inputs,
        attn_mask_type="padding_causal",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=SEQ,
        max_seqlen_kv=SEQ,
    )
    gradient = tensors[3][is_token]
    actual = [output.view_as(gradient), *torch.autograd.grad(output, inputs, gradient.view_as(output))]
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors[:3])
    exact = oracle.attend(q, k, v, CAUSAL & is_token[:, None, None, :])
    exact_gradient = tensors[3].double() * is_token[:, :, None, None]
    expected = [exact, *torch.autograd.grad(exact, [q, k, v], exact_gradient)]
    for got, wanted in zip(actual, expected, strict=True):
        assert oracle.relative_error(got, wanted[is_token]) <= 16
