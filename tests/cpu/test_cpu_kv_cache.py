"""The cache of keys and values: its kernels against loops, sequences that come and go, and generated tokens."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import emulated_gpu
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parity import te
from parity.te import kernels
from te_on_cpu.attention import convert_bshd_to_thd, convert_thd_to_bshd, copy_to_kv_cache
from te_on_cpu.enums import NVTE_QKV_Format

TE = te.kernels("cpu").te
from transformer_engine.common import recipe  # noqa: E402

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HEADS, FEATURES, PAGE, PAGES = 2, 3, 4, 3
lengths = st.lists(st.integers(0, 6), min_size=1, max_size=4)


def cumulative(values: list[int], extra: int = 0) -> Tensor:
    total = torch.tensor([0, *values]).cumsum(0).to(torch.int32)
    return torch.cat([total, total[-1:].expand(extra)])


@settings(max_examples=60)
@given(lengths, st.integers(0, 2))
def test_packed_sequences_survive_padding_and_packing_again(sizes: list[int], extra: int) -> None:
    packed = torch.randn(sum(sizes) + extra, HEADS, FEATURES)
    packed[sum(sizes) :] = 0
    padded = convert_thd_to_bshd(packed, cumulative(sizes, extra), len(sizes), 6)
    start = 0
    for entry, size in enumerate(sizes):
        assert torch.equal(padded[entry, :size], packed[start : start + size])
        assert not padded[entry, size:].any()
        start += size
    assert torch.equal(convert_bshd_to_thd(padded, cumulative(sizes, extra), len(packed)), packed)


steps = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=3)


@settings(max_examples=80)
@given(steps, st.sampled_from(["bshd", "sbhd", "thd"]), st.booleans(), st.integers(0, 2**31))
def test_new_tokens_follow_the_cached_ones(
    sizes: list[tuple[int, int]], qkv_format: str, is_paged: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    batch, longest = len(sizes), 4
    old, new = [size for size, _ in sizes], [size for _, size in sizes]
    tokens = [torch.randn(batch, longest, HEADS, features, generator=rng) for features in (FEATURES, FEATURES + 1)]
    shape = (batch * PAGES, PAGE) if is_paged else (batch, PAGE * PAGES)
    caches = [torch.randn(*shape, HEADS, features, generator=rng) for features in (FEATURES, FEATURES + 1)]
    table = torch.randperm(batch * PAGES, generator=rng).view(batch, PAGES) if is_paged else torch.arange(batch)
    expected = [cache.clone() for cache in caches]
    for cache, fresh in zip(expected, tokens, strict=True):
        for entry, (cached, count) in enumerate(sizes):
            for token in range(count):
                place = cached + token
                page = table[entry, place // PAGE] if is_paged else entry
                cache[page, place % PAGE if is_paged else place] = fresh[entry, token]
    given_tokens = {
        "bshd": tokens,
        "sbhd": [fresh.transpose(0, 1) for fresh in tokens],
        "thd": [convert_bshd_to_thd(fresh, cumulative(new), sum(new)) for fresh in tokens],
    }[qkv_format]
    copy_to_kv_cache(
        given_tokens[0],
        given_tokens[1],
        caches[0],
        caches[1],
        table.int(),
        cumulative(new),
        cumulative([a + b for a, b in zip(old, new, strict=True)]),
        NVTE_QKV_Format[f"NVTE_{qkv_format.upper()}"],
        batch,
        longest,
        PAGE * PAGES,
        PAGES if is_paged else 1,
        not is_paged,
    )
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


def test_sequences_that_go_on_move_to_the_front_of_the_cache() -> None:
    cache = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 5, 1, 1).clone()
    fresh = torch.full((3, 1, 1, 1), 9.0)
    copy_to_kv_cache(
        fresh,
        fresh,
        cache,
        cache.clone(),
        torch.tensor([1, 3, 0, 2], dtype=torch.int32),
        cumulative([1, 1, 1]),
        cumulative([3, 4, 1]),
        NVTE_QKV_Format.NVTE_BSHD,
        3,
        1,
        5,
        1,
        True,
    )
    assert cache[0].flatten().tolist() == [1, 1, 9, 0, 0]
    assert cache[1].flatten().tolist() == [3, 3, 3, 9, 1]
    assert cache[2].flatten().tolist() == [9, 2, 2, 2, 2]


def test_tokens_of_another_dtype_than_the_cache_are_refused() -> None:
    new, cache = torch.zeros(1, 1, 1, 1), torch.zeros(1, 4, 1, 1).to(BF16)
    one = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="needs new tokens and caches of one dtype"):
        copy_to_kv_cache(new, new, cache, cache, one[:1], one, one, NVTE_QKV_Format.NVTE_BSHD, 1, 1, 4, 1, False)


FP8 = recipe.DelayedScaling(fp8_dpa=True)
EPS_OF_E4M3 = torch.finfo(torch.float8_e4m3fn).eps


@pytest.mark.parametrize("is_fp8", [False, True], ids=["BF16", "FP8"])
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_a_finished_sequence_makes_room_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch, qkv_format: str, is_fp8: bool
) -> None:
    """Also test FP8, which TE's own Python emulates; TE's other way is FlashAttention 3, a package only for CUDA."""
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", str(int(is_fp8)))
    emulated_gpu.choose_again()
    torch.manual_seed(0)
    attention = TE.DotProductAttention(
        2, 8, attention_dropout=0.0, qkv_format=qkv_format, attn_mask_type="padding_causal", layer_number=1
    ).eval()
    reference = TE.DotProductAttention(2, 8, attention_dropout=0.0, qkv_format="bshd").eval()
    qkv = {sequence: [torch.randn(6, 2, 8).to(BF16) for _ in range(3)] for sequence in range(3)}
    parameters = TE.InferenceParams(
        2, 8, num_heads_kv=2, head_dim_k=8, dtype=BF16, qkv_format=qkv_format, max_ctx_len=3
    )
    parameters.allocate_memory(1)
    plan: list[dict[int, tuple[int, int]]] = [
        {0: (0, 3), 1: (0, 3)},
        {0: (3, 4), 1: (3, 4)},
        {1: (4, 5), 2: (0, 1)},
        {1: (5, 6), 2: (1, 2)},
    ]
    seen: dict[int, list[Tensor]] = {sequence: [] for sequence in qkv}
    for step in plan:
        parameters.pre_step(OrderedDict((sequence, last - first) for sequence, (first, last) in step.items()))
        inputs = [
            torch.stack([qkv[sequence][part][first:last] for sequence, (first, last) in step.items()])
            for part in range(3)
        ]
        shape = inputs[0].shape
        if qkv_format == "thd":
            inputs = [tensor.flatten(0, 1) for tensor in inputs]
        options = dict(
            max_seqlen_q=3,
            max_seqlen_kv=8,
            cu_seqlens_q=parameters.cu_seqlens_q,
            cu_seqlens_kv=parameters.cu_seqlens_kv,
            attn_mask_type="padding_causal",
            inference_params=parameters,
        )
        with TE.autocast(enabled=is_fp8, recipe=FP8):
            output = attention(*inputs, **options).view(*shape[:2], -1)
        for entry, sequence in enumerate(step):
            seen[sequence].append(output[entry])
    for sequence, parts in seen.items():
        rows = sum(len(part) for part in parts)
        inputs = [tensor[None, :rows] for tensor in qkv[sequence]]
        expected = reference(*inputs, attn_mask_type="causal")[0]
        if is_fp8:  # FP8 rounds Q, K, V and the probabilities, each by at most half an eps
            error = (torch.cat(parts).double() - expected.double()).norm() / expected.double().norm()
            assert 2**-7 < error < EPS_OF_E4M3
        else:
            torch.testing.assert_close(torch.cat(parts), expected, rtol=2**-7, atol=2**-9)


HIDDEN, LAYER_HEADS, GROUPS, HEAD_DIM, LONGEST = 64, 4, 2, 16, 16
BATCH, SEQ = 2, 8
# A prompt, then single tokens: TE counts one new token for each continued sequence, however many come.
CUTS = (0, 5, 6, 7, 8)
OPTIONS: dict[str, Any] = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, "layer_number": 1, "device": "cpu"}
Build = Callable[[ModuleType, torch.dtype, str], nn.Module]


def attention(te: ModuleType, dtype: torch.dtype, format_: str) -> nn.Module:
    return te.MultiheadAttention(
        HIDDEN,
        LAYER_HEADS,
        qkv_format=format_,
        attn_mask_type="causal",
        input_layernorm=True,
        params_dtype=dtype,
        **OPTIONS,
    )


def layer(te: ModuleType, dtype: torch.dtype, format_: str) -> nn.Module:
    return te.TransformerLayer(
        HIDDEN, 96, LAYER_HEADS, attn_input_format=format_, hidden_dropout=0.0, params_dtype=dtype, **OPTIONS
    )


def mask(build: Build, kind: str) -> dict[str, str]:
    return {"attn_mask_type" if build is attention else "self_attn_mask_type": kind}


def laid_out(x: Tensor, format_: str) -> Tensor:
    """Return ``[batch, seq, hidden]`` in another format; all sequences are equally long."""
    if format_ == "thd":
        return x.flatten(0, 1)
    return (x.transpose(0, 1) if format_ == "sbhd" else x).contiguous()


def restored(x: Tensor, format_: str) -> Tensor:
    if format_ == "thd":
        return x.view(BATCH, -1, HIDDEN)
    return x.transpose(0, 1) if format_ == "sbhd" else x


def cache(te: ModuleType, dtype: torch.dtype, format_: str, is_paged: bool) -> Any:
    pages: dict[str, Any] = {"page_size": 4, "total_num_pages": BATCH * LONGEST // 4} if is_paged else {}
    options = {"dtype": dtype, "is_paged": is_paged, "qkv_format": format_, "max_ctx_len": CUTS[1], **pages}
    return te.InferenceParams(BATCH, LONGEST, num_heads_kv=GROUPS, head_dim_k=HEAD_DIM, **options)


def generate(
    te: ModuleType, module: nn.Module, build: Build, x: Tensor, format_: str, is_paged: bool, **call: Any
) -> Tensor:
    parameters = cache(te, x.dtype, format_, is_paged)
    parts = []
    for first, last in itertools.pairwise(CUTS):
        parameters.pre_step(OrderedDict((sequence, last - first) for sequence in range(BATCH)))
        lengths = {
            "cu_seqlens_q": parameters.cu_seqlens_q,
            "cu_seqlens_kv": parameters.cu_seqlens_q,  # of the new tokens; TE adds the cached ones
            "max_seqlen_q": last - first,
            "max_seqlen_kv": last - first,
        }
        part = module(
            laid_out(x[:, first:last], format_),
            inference_params=parameters,
            **mask(build, "padding_causal") | (lengths if format_ == "thd" else {}) | call,
        )
        parts.append(restored(part, format_))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("is_paged", [False, True], ids=["non-paged", "paged"])
@pytest.mark.parametrize("fused", ["1", "0"], ids=["fused", "unfused"])
@pytest.mark.parametrize("format_", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("build", [attention, layer])
@pytest.mark.parametrize("rope", [False, True], ids=["no RoPE", "RoPE"])
def test_generated_tokens_are_those_of_the_whole_sequence(
    monkeypatch: pytest.MonkeyPatch, build: Build, format_: str, fused: str, is_paged: bool, rope: bool
) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
    te = kernels("cpu").te
    kernel_calls = emulated_gpu.record_calls(monkeypatch, ["fused_attn_fwd"])
    torch.manual_seed(0)
    dtype = torch.bfloat16 if fused == "1" else torch.float32
    modules = {name: build(te, dtype, name).eval() for name in {"bshd", format_}}
    modules[format_].load_state_dict(modules["bshd"].state_dict())
    angles = {"rotary_pos_emb": te.RotaryPositionEmbedding(HEAD_DIM)(LONGEST)} if rope else {}
    x = torch.randn(BATCH, SEQ, HIDDEN).to(dtype)
    with torch.no_grad():
        whole = modules["bshd"](x, **mask(build, "causal"), **angles)
        emulated_gpu.choose_again()
        kernel_calls.clear()
        generated = generate(te, modules[format_], build, x, format_, is_paged, **angles)
    assert len(kernel_calls) == (len(CUTS) - 1 if fused == "1" else 0)
    # Each value is rounded as in the whole sequence, but TF32 GEMMs of other sizes add FP32 sums in another order.
    error = (generated.double() - whole.double()).norm() / whole.double().norm()
    assert error <= (torch.finfo(torch.bfloat16).eps if dtype == torch.bfloat16 else 2.0**-11)


@pytest.mark.parametrize("is_paged", [False, True], ids=["non-paged", "paged"])
def test_te_refuses_a_cache_with_fp8_attention_that_it_does_not_emulate(is_paged: bool) -> None:
    emulated_gpu.choose_again()
    module = TE.DotProductAttention(GROUPS, HEAD_DIM, attention_dropout=0.0, qkv_format="thd", layer_number=1).eval()
    parameters = cache(TE, BF16, "thd", is_paged)
    parameters.allocate_memory(1)
    parameters.pre_step(OrderedDict({0: 4, 1: 4}))
    lengths = {"cu_seqlens_q": parameters.cu_seqlens_q, "cu_seqlens_kv": parameters.cu_seqlens_kv}
    lengths |= {"max_seqlen_q": 4, "max_seqlen_kv": LONGEST}
    qkv = torch.randn(3, 8, GROUPS, HEAD_DIM).to(BF16)
    with (
        TE.autocast(enabled=True, recipe=FP8),
        pytest.raises(ValueError, match="No dot product attention backend is available"),
    ):
        module(*qkv, attn_mask_type="padding_causal", inference_params=parameters, **lengths)
