"""TE's ``DotProductAttention``, fused and unfused: every mask, bias, softmax and format, against FP64."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import attention_oracle as oracle
import emulated_gpu
import pytest
import torch
from torch import Tensor

from parity import te
from te_on_cpu import softmax

TE = te.kernels("cpu").te
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BATCH, HEADS, FEATURES = 2, 4, 16
BOTH_PASSES = ["fused_attn_fwd", "fused_attn_bwd"]
# Operands, P, dS and the result are rounded. Each rounding costs at most half an eps, and most cost much less in norm.
TOLERANCE = 0.6


@dataclass(frozen=True)
class Setting:
    """One configuration: TE's arguments (``call``, ``build``), and their meaning (``visible``, ``formula``)."""

    visible: Tensor
    call: dict[str, Any]
    build: dict[str, Any] = field(default_factory=dict)
    queries: int = 48
    keys: int = 48
    groups: int = HEADS
    value_features: int = FEATURES
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    formula: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the fused kernels in the order in which TE called them."""
    return emulated_gpu.record_calls(monkeypatch, BOTH_PASSES)


def padded(kind: str, queries: tuple[int, ...], keys: tuple[int, ...], **band: Any) -> Setting:
    """Return a setting whose sequences have these lengths, out of 48 queries and 48 keys."""
    in_sequence = oracle.tokens(queries, 48)[:, None, :, None] & oracle.tokens(keys, 48)[:, None, None, :]
    masks = [~oracle.tokens(lengths, 48)[:, None, None, :] for lengths in (queries, keys)]
    same = queries == keys
    window = {"window_size": (band["left"], band["right"])} if "left" in band else {}
    return Setting(
        visible=in_sequence & oracle.visible(48, 48, **band),
        call={"attn_mask_type": kind, "attention_mask": masks[0] if same else tuple(masks), **window},
        build={} if same else {"attention_type": "cross"},
        lengths=(queries, keys),
    )


CAUSAL = oracle.visible(48, 48, right=0)
SETTINGS = {
    "no_mask": Setting(oracle.visible(48, 48), {"attn_mask_type": "no_mask"}),
    "causal": Setting(CAUSAL, {"attn_mask_type": "causal"}),
    "causal, more queries than keys": Setting(
        oracle.visible(48, 32, right=0), {"attn_mask_type": "causal"}, {"attention_type": "cross"}, keys=32
    ),
    "causal_bottom_right": Setting(
        oracle.visible(32, 48, right=0, offset=16),
        {"attn_mask_type": "causal_bottom_right"},
        {"attention_type": "cross"},
        queries=32,
    ),
    "padding": padded("padding", (48, 29), (48, 29)),
    "padding, an empty sequence": padded("padding", (48, 0), (48, 0)),
    "padding of queries and keys": padded("padding", (40, 13), (25, 48)),
    "padding_causal": padded("padding_causal", (48, 29), (48, 29), right=0),
    "padding_causal_bottom_right": padded(
        "padding_causal_bottom_right", (20, 13), (25, 48), right=0, offset=torch.tensor([5, 35])
    ),
    "window": Setting(oracle.visible(48, 48, left=7, right=0), {"attn_mask_type": "causal", "window_size": (7, 0)}),
    "window, bottom right": Setting(
        oracle.visible(32, 48, left=5, right=0, offset=16),
        {"attn_mask_type": "causal_bottom_right", "window_size": (5, 0)},
        {"attention_type": "cross"},
        queries=32,
    ),
    "window, padding_causal": padded("padding_causal", (48, 29), (48, 29), left=6, right=0),
    "GQA": Setting(CAUSAL, {"attn_mask_type": "causal"}, groups=2),
    "MQA": Setting(CAUSAL, {"attn_mask_type": "causal"}, groups=1),
    "value features": Setting(CAUSAL, {"attn_mask_type": "causal"}, value_features=40),
}


def leaves(setting: Setting, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key, value and the output's gradient, which is 0 for padding."""
    rng = torch.Generator().manual_seed(0)
    shapes = [
        (BATCH, setting.queries, HEADS, FEATURES),
        (BATCH, setting.keys, setting.groups, FEATURES),
        (BATCH, setting.keys, setting.groups, setting.value_features),
        (BATCH, setting.queries, HEADS, setting.value_features),
    ]
    tensors = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
    if setting.lengths is not None:
        tensors[3] *= oracle.tokens(setting.lengths[0], setting.queries)[:, :, None, None]
    return tensors


def build(setting: Setting, **options: Any) -> Any:
    features = (FEATURES, setting.value_features) if setting.value_features != FEATURES else FEATURES
    options = {"num_gqa_groups": setting.groups, "attention_dropout": 0.0, "qkv_format": "bshd", **options}
    return TE.DotProductAttention(HEADS, features, **{**setting.build, **options})


def with_gradients(output: Tensor, gradient: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [output, *torch.autograd.grad(output, inputs, gradient)]


def exact(setting: Setting, tensors: list[Tensor], *more: Tensor, **formula: Any) -> list[Tensor]:
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors[:3])
    output = oracle.attend(q, k, v, setting.visible, **setting.formula, **formula)
    return with_gradients(output, tensors[3].double(), [q, k, v, *more])


def passed(setting: Setting, tensors: list[Tensor], *more: Tensor, module: Any = None, **call: Any) -> list[Tensor]:
    """Return TE's output, and its gradients with respect to the query, the key, the value and ``more``."""
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    output = (module or build(setting))(*inputs, **setting.call, **call)
    return with_gradients(output.view_as(tensors[3]), tensors[3], [*inputs, *more])


def assert_near(actual: list[Tensor], expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert oracle.relative_error(got, wanted) <= tolerance


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", SETTINGS)
def test_masks_heads_and_windows_agree_with_fp64_forward_and_backward(
    fused_calls: list[str], name: str, dtype: torch.dtype
) -> None:
    setting = SETTINGS[name]
    tensors = leaves(setting, dtype)
    assert_near(passed(setting, tensors), exact(setting, tensors))
    assert fused_calls == BOTH_PASSES


@pytest.mark.parametrize("shape", [(BATCH, HEADS, 48), (1, HEADS, 48), (BATCH, 1, 48), (1, 1, 48), (1, 1, 1)])
def test_a_bias_is_added_to_scaled_scores_and_gets_a_gradient(fused_calls: list[str], shape: tuple[int, ...]) -> None:
    setting = SETTINGS["no_mask"]
    tensors = leaves(setting, BF16)
    bias = torch.randn(*shape, 48, generator=torch.Generator().manual_seed(1)).to(BF16)
    learns = shape[2] > 1  # one row of biases serves all queries, but cuDNN computes no gradient for it
    biases = [bias.requires_grad_(learns), bias.detach().double().requires_grad_(learns)]
    call = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    if learns:
        actual, expected = passed(setting, tensors, bias, **call), exact(setting, tensors, biases[1], bias=biases[1])
    else:
        actual = [build(setting)(*tensors[:3], **setting.call, **call).view_as(tensors[3])]
        expected = exact(setting, tensors, bias=biases[1])[:1]
    assert_near(actual, expected)
    assert fused_calls == BOTH_PASSES[: 1 + learns]


def alibi(slopes: list[Any] | None, size: int) -> Tensor:
    """Return the bias of ALiBi: the distance times minus a slope for each head, by default the paper's."""
    slope = torch.tensor(slopes or [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).double().view(-1, HEADS, 1, 1)
    return -slope * (torch.arange(size)[:, None] - torch.arange(size)).abs()


OWN_SLOPES = [0.5, 0.25, 0.1, 0.0]


@pytest.mark.parametrize("slopes", [None, OWN_SLOPES, [OWN_SLOPES, [0.3, 0.0, 0.2, 1.0]]], ids=str)
def test_alibi_takes_slopes_times_the_distance_from_scores_for_each_head_or_each_of_each_sequence(
    fused_calls: list[str], slopes: list[Any] | None
) -> None:
    setting = SETTINGS["causal"]
    tensors = leaves(setting, BF16)
    call: dict[str, Any] = {"core_attention_bias_type": "alibi"}
    bias = alibi(slopes, 48)
    if slopes is not None:
        call["alibi_slopes"] = torch.tensor(slopes)
        bias = bias.to(BF16).double()  # as TE rounds it for the user's slopes
    assert_near(passed(setting, tensors, **call), exact(setting, tensors, bias=bias))
    assert fused_calls == BOTH_PASSES


@pytest.mark.parametrize("name", ["causal", "GQA", "padding_causal", "window"])
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_sinks_take_part_in_the_softmax_and_learnable_ones_get_a_gradient(
    fused_calls: list[str], softmax_type: str, name: str
) -> None:
    setting = SETTINGS[name]
    tensors = leaves(setting, BF16)
    attention = build(setting, softmax_type=softmax_type)
    sink = torch.zeros(HEADS, dtype=torch.float64, requires_grad=True)
    more = []
    if softmax_type == "learnable":
        with torch.no_grad():
            attention.softmax_offset.copy_(torch.linspace(-1, 2, HEADS))
            sink.copy_(attention.softmax_offset)
        more.append(attention.softmax_offset)
    actual = passed(setting, tensors, *more, module=attention)
    expected = exact(setting, tensors, *([sink] if more else []), sink=sink)
    assert_near(actual[:4], expected[:4])
    if more:
        torch.testing.assert_close(actual[4].double(), expected[4], rtol=2**-7, atol=2**-7)
    assert fused_calls == BOTH_PASSES


@pytest.mark.parametrize("qkv_format", ["sbhd", "thd"])
def test_formats_give_the_same_bits_as_bshd(fused_calls: list[str], qkv_format: str) -> None:
    setting = SETTINGS["padding_causal"]
    tensors = leaves(setting, BF16)
    assert setting.lengths is not None
    is_token = oracle.tokens(setting.lengths[0], 48)
    cumulative = torch.tensor([0, 48, 77], dtype=torch.int32)
    pack = {"sbhd": lambda t: t.transpose(0, 1).contiguous(), "thd": lambda t: t[is_token]}[qkv_format]
    results = []
    for name, change in (("bshd", lambda t: t), (qkv_format, pack)):
        inputs = [change(tensor).clone().requires_grad_() for tensor in tensors[:3]]
        options = dict(cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative, max_seqlen_q=48, max_seqlen_kv=48)
        attention = build(setting, qkv_format=name)
        output = attention(*inputs, attn_mask_type="padding_causal", **options)
        gradient = change(tensors[3])
        results.append(with_gradients(output.view_as(gradient), gradient, inputs))
    for left, right in zip(*results, strict=True):
        assert torch.equal(pack(left), right)
    assert fused_calls == 2 * BOTH_PASSES


def test_unfused_attention_pads_packed_sequences_and_packs_them_again(unfused_calls: list[str]) -> None:
    setting = SETTINGS["padding_causal"]
    assert setting.lengths is not None
    is_token = oracle.tokens(setting.lengths[0], 48)
    tensors = leaves(setting, FP32)
    inputs = [tensor[is_token].requires_grad_() for tensor in tensors[:3]]
    cumulative = torch.tensor([0, 48, 77], dtype=torch.int32)
    options = dict(cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative, max_seqlen_q=48, max_seqlen_kv=48)
    output = build(setting, qkv_format="thd")(*inputs, attn_mask_type="padding_causal", **options)
    gradient = tensors[3][is_token]
    actual = with_gradients(output.view_as(gradient), gradient, inputs)
    assert_near(actual, [wanted[is_token] for wanted in exact(setting, tensors)], 16.0)
    assert not {*unfused_calls} & {*BOTH_PASSES}


def test_padding_between_packed_sequences_is_skipped_and_comes_out_as_zero(fused_calls: list[str]) -> None:
    setting = SETTINGS["padding_causal"]
    tensors = leaves(setting, BF16)
    rows = torch.cat([torch.arange(48), 48 + torch.arange(32)])
    inputs = [tensor.flatten(0, 1)[rows].clone().requires_grad_() for tensor in tensors[:3]]
    lengths = torch.tensor([0, 48, 77], dtype=torch.int32)
    starts = torch.tensor([0, 48, 80], dtype=torch.int32)
    options = dict(cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=48, max_seqlen_kv=48)
    output = build(setting, qkv_format="thd")(
        *inputs,
        attn_mask_type="padding_causal",
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        pad_between_seqs=True,
        **options,
    )
    gradient = tensors[3].flatten(0, 1)[rows]
    actual = with_gradients(output.view_as(gradient), gradient, inputs)
    assert_near(actual, [tensor.flatten(0, 1)[rows] for tensor in exact(setting, tensors)])
    assert not any(tensor[77:].any() for tensor in actual)
    assert fused_calls == BOTH_PASSES


@pytest.mark.parametrize("name", ["causal", "padding"])
def test_the_largest_logit_of_each_head_is_returned(name: str) -> None:
    setting = SETTINGS[name]
    tensors = leaves(setting, BF16)
    _, largest = build(setting, return_max_logit=True)(*tensors[:3], **setting.call)
    scores = torch.einsum("bqhd,bkhd->bhqk", *tensors[:2]).double() / FEATURES**0.5
    expected = scores.masked_fill(~setting.visible, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(largest, expected.to(BF16), rtol=2**-7, atol=0)


def test_packed_qkv_gets_its_gradient_in_one_tensor(fused_calls: list[str]) -> None:
    setting = SETTINGS["causal"]
    tensors = leaves(setting, BF16)
    packed = torch.stack(tensors[:3], 2).requires_grad_()
    output = build(setting)(*packed.unbind(2), **setting.call)
    (gradient,) = torch.autograd.grad(output.view_as(tensors[3]), packed, tensors[3])
    assert_near(list(gradient.unbind(2)), exact(setting, tensors)[1:])
    assert fused_calls == BOTH_PASSES


def test_attention_dropout_keeps_the_mean_and_repeats_with_the_seed() -> None:
    setting = SETTINGS["no_mask"]
    tensors = leaves(setting, BF16)
    tensors[2] = torch.ones_like(tensors[2])
    attention = build(setting, attention_dropout=0.25)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(attention(*tensors[:3], **setting.call))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], attention(*tensors[:3], **setting.call))
    assert not torch.equal(outputs[0], torch.ones_like(outputs[0]))
    # An output is the sum of p_j m_j / 0.75; over 384 rows of about 30 effective keys its mean deviates by 0.006.
    assert abs(outputs[0].view(-1, FEATURES)[:, 0].double().mean().item() - 1) < 0.03


def test_backward_of_dropout_uses_the_mask_of_the_forward() -> None:
    setting = SETTINGS["no_mask"]
    tensors = leaves(setting, FP16)
    attention = build(setting, attention_dropout=0.5)
    value = tensors[2].clone().requires_grad_()
    torch.manual_seed(5)
    output = attention(*tensors[:2], value, **setting.call)
    (gradient,) = torch.autograd.grad(output, value, tensors[3].view_as(output))
    # The output is linear in V, so that V and its gradient have the same inner product as the output and its gradient.
    by_output = (output.double() * tensors[3].view_as(output).double()).sum()
    by_value = (gradient.double() * tensors[2].double()).sum()
    torch.testing.assert_close(by_output, by_value, rtol=0, atol=0.05)


def test_te_says_when_the_environment_leaves_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    emulated_gpu.choose_again()
    with pytest.raises(ValueError, match="No dot product attention backend"):
        build(SETTINGS["causal"])(*leaves(SETTINGS["causal"], BF16)[:3], **SETTINGS["causal"].call)
    monkeypatch.undo()
    emulated_gpu.choose_again()


SEQ = 32


@pytest.fixture
def unfused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forbid fused attention, and return the names of the softmax kernels in the order in which TE called them."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    return emulated_gpu.record_calls(monkeypatch, [*BOTH_PASSES, *softmax.__all__])


SEQ_CAUSAL: dict[str, Any] = dict(visible=oracle.visible(SEQ, SEQ, right=0), queries=SEQ, keys=SEQ)
CAUSAL_CALL = {"attn_mask_type": "causal"}
CROSS: dict[str, Any] = dict(build={"attention_type": "cross"}, queries=SEQ, keys=48)
SEEN = (torch.rand(BATCH, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(2)) < 0.5) | torch.eye(SEQ).bool()
UNFUSED = {
    **{name: SETTINGS[name] for name in ("no_mask", "causal", "padding", "window")},
    "cross attention of unequal lengths": Setting(
        oracle.visible(SEQ, 48), {"attn_mask_type": "no_mask"}, groups=2, **CROSS
    ),
    "causal bottom right lets the last query see all keys": Setting(
        oracle.visible(SEQ, 48, right=0, offset=16), {"attn_mask_type": "causal_bottom_right"}, **CROSS
    ),
    "an arbitrary mask hides what is true": Setting(
        SEEN, {"attn_mask_type": "arbitrary", "attention_mask": ~SEEN}, queries=SEQ, keys=SEQ
    ),
    "ALiBi": Setting(
        call={**CAUSAL_CALL, "core_attention_bias_type": "alibi"}, formula={"bias": alibi(None, SEQ)}, **SEQ_CAUSAL
    ),
    "ALiBi of own slopes": Setting(
        call={**CAUSAL_CALL, "core_attention_bias_type": "alibi", "alibi_slopes": torch.tensor(OWN_SLOPES)},
        formula={"bias": alibi(OWN_SLOPES, SEQ)},
        **SEQ_CAUSAL,
    ),
    **{
        f"{kind} sink": Setting(
            call=CAUSAL_CALL,
            build={"softmax_type": kind},
            formula={"sink": torch.zeros(HEADS).double()},
            **SEQ_CAUSAL,
        )
        for kind in ("off-by-one", "learnable")
    },
    "softcap": Setting(call=CAUSAL_CALL, build={"softcap": 0.5}, formula={"softcap": 0.5}, **SEQ_CAUSAL),
}
# Scores, probabilities and their gradients are stored, and each is rounded.
STORED = {BF16: 2.0, FP32: 16.0}

dtypes = pytest.mark.parametrize("dtype", [BF16, FP32])


@dtypes
@pytest.mark.parametrize("name", UNFUSED)
def test_unfused_attention_agrees_with_fp64_forward_and_backward(
    unfused_calls: list[str], name: str, dtype: torch.dtype
) -> None:
    if name == "softcap" and "softcap" not in inspect.signature(TE.DotProductAttention).parameters:
        pytest.skip("this TransformerEngine has no softcap")
    setting = UNFUSED[name]
    tensors = leaves(setting, dtype)
    assert_near(passed(setting, tensors), exact(setting, tensors), STORED[dtype])
    if "softmax_type" in setting.build or dtype == FP32:
        assert unfused_calls == []  # PyTorch's softmax, in FP32
    else:
        kernel = "scaled_softmax" if setting.call["attn_mask_type"] == "no_mask" else "scaled_masked_softmax"
        assert {*unfused_calls} == {f"{kernel}_forward", f"{kernel}_backward"}


@dtypes
@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
def test_a_bias_is_added_after_or_before_scaling_and_gets_a_gradient(
    unfused_calls: list[str], kind: str, dtype: torch.dtype
) -> None:
    setting = Setting(call=CAUSAL_CALL, **SEQ_CAUSAL)
    tensors = leaves(setting, dtype)
    bias = torch.randn(1, HEADS, SEQ, SEQ, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    actual = passed(setting, tensors, bias, core_attention_bias_type=kind, core_attention_bias=bias)
    exact_bias = bias.detach().double().requires_grad_()
    scaled = exact_bias / FEATURES**0.5 if kind == "pre_scale_bias" else exact_bias
    assert_near(actual, exact(setting, tensors, exact_bias, bias=scaled), STORED[dtype])
