"""With a cache of keys and values, generating token by token gives what the whole sequence gives."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import backend_choice
import pytest
import torch
from torch import Tensor, nn

from parity.te import kernels

HIDDEN, HEADS, GROUPS, HEAD_DIM, LONGEST = 64, 4, 2, 16, 16
BATCH, SEQ = 2, 8
# A prompt and single tokens: TE counts one token for each sequence that goes on, however many come.
CUTS = (0, 5, 6, 7, 8)
OPTIONS: dict[str, Any] = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, "layer_number": 1, "device": "cpu"}
Build = Callable[[ModuleType, torch.dtype, str], nn.Module]


def attention(te: ModuleType, dtype: torch.dtype, format_: str) -> nn.Module:
    return te.MultiheadAttention(
        HIDDEN, HEADS, qkv_format=format_, attn_mask_type="causal", input_layernorm=True, params_dtype=dtype, **OPTIONS
    )


def layer(te: ModuleType, dtype: torch.dtype, format_: str) -> nn.Module:
    return te.TransformerLayer(
        HIDDEN, 96, HEADS, attn_input_format=format_, hidden_dropout=0.0, params_dtype=dtype, **OPTIONS
    )


def mask(build: Build, kind: str) -> dict[str, str]:
    return {"attn_mask_type" if build is attention else "self_attn_mask_type": kind}


def laid_out(x: Tensor, format_: str) -> Tensor:
    """``[batch, seq, hidden]`` in another format; all sequences are equally long."""
    if format_ == "thd":
        return x.flatten(0, 1)
    return (x.transpose(0, 1) if format_ == "sbhd" else x).contiguous()


def restored(x: Tensor, format_: str) -> Tensor:
    if format_ == "thd":
        return x.view(BATCH, -1, HIDDEN)
    return x.transpose(0, 1) if format_ == "sbhd" else x


def cache(te: ModuleType, dtype: torch.dtype, format_: str, is_paged: bool) -> Any:
    pages: dict[str, Any] = {"page_size": 4, "total_num_pages": BATCH * LONGEST // 4} if is_paged else {}
    return te.InferenceParams(
        BATCH,
        LONGEST,
        num_heads_kv=GROUPS,
        head_dim_k=HEAD_DIM,
        dtype=dtype,
        is_paged=is_paged,
        qkv_format=format_,
        max_ctx_len=CUTS[1],
        **pages,
    )


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


def counted_fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry whenever TE calls the fused kernel."""
    import transformer_engine_torch as tex

    calls: list[str] = []
    kernel = tex.fused_attn_fwd

    def call(*arguments: Any) -> Any:
        calls.append("fused_attn_fwd")
        return kernel(*arguments)

    monkeypatch.setattr(tex, "fused_attn_fwd", call)
    return calls


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
    kernel_calls = counted_fused_calls(monkeypatch)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if fused == "1" else torch.float32
    modules = {name: build(te, dtype, name).eval() for name in {"bshd", format_}}
    modules[format_].load_state_dict(modules["bshd"].state_dict())
    angles = {"rotary_pos_emb": te.RotaryPositionEmbedding(HEAD_DIM)(LONGEST)} if rope else {}
    x = torch.randn(BATCH, SEQ, HIDDEN).to(dtype)
    backend_choice.choose_again()
    with torch.no_grad():
        whole = modules["bshd"](x, **mask(build, "causal"), **angles)
        backend_choice.choose_again()
        kernel_calls.clear()
        generated = generate(te, modules[format_], build, x, format_, is_paged, **angles)
    assert len(kernel_calls) == (len(CUTS) - 1 if fused == "1" else 0)
    # Each value is rounded as in the whole sequence; FP32 sums, in TF32 GEMMs of other sizes, differ in their order.
    error = (generated.double() - whole.double()).norm() / whole.double().norm()
    assert error <= (torch.finfo(torch.bfloat16).eps if dtype == torch.bfloat16 else 2.0**-11)
