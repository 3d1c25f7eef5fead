"""Which configurations the emulated GPU's cuDNN serves, by the rules that TE wrote down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from parity.cpu import attention, cuda
from parity.cpu.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

NONE, FUSED = NVTE_Fused_Attn_Backend.NVTE_No_Backend, NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
TRAINING: dict[str, Any] = dict(
    is_training=True,
    qkv_dtype=DType.kBFloat16,
    qkv_layout="BSHD_BSHD_BSHD",
    bias_type="NO_BIAS",
    attn_mask_type="CAUSAL_MASK",
    softmax_type="VANILLA_SOFTMAX",
    dropout=0.0,
    num_attn_heads=8,
    num_gqa_groups=8,
    max_seqlen_q=512,
    max_seqlen_kv=512,
    head_dim_qk=64,
    head_dim_v=64,
    window_size_left=-1,
    window_size_right=0,
    return_max_logit=False,
    cuda_graph=False,
    deterministic=False,
)
ENUMS = dict(
    qkv_layout=NVTE_QKV_Layout, bias_type=NVTE_Bias_Type, attn_mask_type=NVTE_Mask_Type, softmax_type=NVTE_Softmax_Type
)


def configuration(**changes: Any) -> dict[str, Any]:
    values = {**TRAINING, **changes}
    return {name: ENUMS[name][f"NVTE_{value}"] if name in ENUMS else value for name, value in values.items()}


def answer(**changes: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """As TE 2.20 asks."""
    result = attention.get_fused_attn_backend(SimpleNamespace(**configuration(**changes)))
    assert isinstance(result, tuple)
    return result


def on(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=None: (major, minor))


def inference(**changes: Any) -> dict[str, Any]:
    return dict(is_training=False, **changes)


SERVED = [
    dict(),
    dict(qkv_dtype=DType.kFloat16),
    dict(num_gqa_groups=1),
    dict(softmax_type="LEARNABLE_SOFTMAX"),
    dict(return_max_logit=True),
    dict(dropout=0.1),
    dict(bias_type="POST_SCALE_BIAS"),
    dict(bias_type="ALIBI"),
    dict(attn_mask_type="NO_MASK", window_size_right=-1),
    dict(attn_mask_type="PADDING_MASK", window_size_right=-1),
    dict(attn_mask_type="PADDING_CAUSAL_MASK", qkv_layout="T3HD"),
    dict(attn_mask_type="CAUSAL_BOTTOM_RIGHT_MASK", max_seqlen_q=100),
    dict(window_size_left=128),
    dict(attn_mask_type="PADDING_MASK", window_size_left=5, window_size_right=3),
    dict(head_dim_qk=256, head_dim_v=256),
    dict(head_dim_qk=192, head_dim_v=128),
    dict(head_dim_qk=40, head_dim_v=24),
    inference(head_dim_qk=512, head_dim_v=320),
    inference(attn_mask_type="PADDING_CAUSAL_BOTTOM_RIGHT_MASK", qkv_layout="Paged_KV_THD_BSHD_BSHD", max_seqlen_q=1),
]
REFUSED = [
    (dict(qkv_dtype=DType.kFloat32), "FP16, BF16 and FP8"),
    (dict(head_dim_qk=60), "head dimensions 60"),
    (dict(head_dim_qk=264, head_dim_v=264), "head dimensions 264"),
    (dict(head_dim_qk=256, head_dim_v=128), "head dimensions 256"),
    (dict(qkv_layout="THD_THD_THD"), "padding mask"),
    (dict(qkv_layout="BHSD_BHSD_BHSD"), "for FP8"),
    (dict(qkv_layout="Paged_KV_BSHD_BSHD_BSHD"), "padding mask"),
    (dict(bias_type="PRE_SCALE_BIAS"), "before scaling"),
    (dict(bias_type="POST_SCALE_BIAS", attn_mask_type="PADDING_CAUSAL_MASK"), "together with padding"),
    (dict(bias_type="ALIBI", attn_mask_type="NO_MASK"), "ALiBi needs a causal mask"),
    (dict(bias_type="ALIBI", attn_mask_type="CAUSAL_BOTTOM_RIGHT_MASK", max_seqlen_q=64), "where cuDNN's ALiBi starts"),
    (dict(attn_mask_type="CAUSAL_BOTTOM_RIGHT_MASK", max_seqlen_q=513), "at least as many keys"),
    (dict(window_size_left=4, dropout=0.1), "neither bias nor dropout"),
    (dict(window_size_left=4, max_seqlen_q=513), "at least as many keys"),
    (dict(attn_mask_type="NO_MASK", window_size_left=4, window_size_right=4), "end at the diagonal"),
    (dict(cuda_graph=True, max_seqlen_kv=500), "multiples of 128"),
    (inference(head_dim_qk=512, head_dim_v=512, max_seqlen_q=1), "head dimensions 512"),
]


FP8: dict[str, Any] = dict(qkv_dtype=DType.kFloat8E4M3, head_dim_qk=128, head_dim_v=128)
REFUSED_IN_FP8 = [
    (dict(head_dim_qk=64, head_dim_v=64), "head dimensions 64"),
    (dict(head_dim_qk=40, head_dim_v=40), "head dimensions 40"),
    (inference(head_dim_qk=272, head_dim_v=272), "head dimensions 272"),
    (dict(bias_type="ALIBI"), "no bias"),
    (dict(softmax_type="OFF_BY_ONE_SOFTMAX"), "no softmax sinks"),
    (dict(return_max_logit=True), "largest logit"),
    (dict(attn_mask_type="CAUSAL_BOTTOM_RIGHT_MASK"), "aligned top left"),
    (dict(attn_mask_type="PADDING_MASK", qkv_layout="THD_THD_THD"), "same format"),
    (inference(attn_mask_type="PADDING_MASK", qkv_layout="Paged_KV_BSHD_SBHD_SBHD"), "same format"),
]


@pytest.mark.parametrize("changes", SERVED, ids=str)
def test_hopper_serves(changes: dict[str, Any]) -> None:
    assert answer(**changes) == (FUSED, "")


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=str)
def test_hopper_refuses_and_says_why(changes: dict[str, Any], reason: str) -> None:
    backend, why = answer(**changes)
    assert backend == NONE
    assert reason in why


@pytest.mark.parametrize("mask", ["NO_MASK", "CAUSAL_MASK", "PADDING_MASK", "PADDING_CAUSAL_MASK"])
@pytest.mark.parametrize("changes", [{}, {"num_gqa_groups": 2}, inference(head_dim_qk=256, head_dim_v=64)], ids=str)
def test_hopper_serves_fp8(mask: str, changes: dict[str, Any]) -> None:
    assert answer(attn_mask_type=mask, **{**FP8, **changes}) == (NVTE_Fused_Attn_Backend.NVTE_FP8, "")


@pytest.mark.parametrize(("changes", "reason"), REFUSED_IN_FP8, ids=str)
def test_hopper_refuses_in_fp8_and_says_why(changes: dict[str, Any], reason: str) -> None:
    backend, why = answer(**{**FP8, **changes})
    assert backend == NONE
    assert reason in why


def test_ada_has_no_fp8_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 8, 9)
    assert answer(**FP8) == (NONE, "FP8 attention needs compute capability 9.0, and the GPU has 8.9")


def test_blackwell_trains_in_fp8_with_heads_up_to_128(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 10, 0)
    assert answer(**{**FP8, "head_dim_qk": 64, "head_dim_v": 48})[0] == NVTE_Fused_Attn_Backend.NVTE_FP8
    assert answer(**{**FP8, **inference(head_dim_qk=144, head_dim_v=144)})[0] == NONE


def test_an_older_te_passes_each_property_and_gets_the_backend_alone() -> None:
    for changes, expected in ((dict(), FUSED), (dict(head_dim_qk=60), NONE)):
        values = list(configuration(**changes).values())
        assert attention.get_fused_attn_backend(*values[:2], DType.kBFloat16, *values[2:]) == expected


def test_ada_has_no_packed_sequences_and_heads_up_to_128(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 8, 9)
    assert answer()[0] == FUSED
    assert answer(attn_mask_type="PADDING_CAUSAL_MASK", qkv_layout="T3HD")[0] == NONE
    assert answer(head_dim_qk=256, head_dim_v=256)[0] == NONE
    assert answer(bias_type="ALIBI")[0] == NONE


def test_blackwell_has_no_deterministic_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 10, 0)
    assert answer(dropout=0.1)[0] == FUSED
    assert answer(deterministic=True)[0] == NONE
    assert answer(**inference(deterministic=True))[0] == FUSED
    assert answer(dropout=0.1, bias_type="POST_SCALE_BIAS")[0] == NONE


def test_turing_has_no_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 7, 5)
    assert answer() == (NONE, "fused attention needs compute capability 8.0, and the GPU has 7.5")
