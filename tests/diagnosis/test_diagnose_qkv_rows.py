"""Rows of query, key and value that are copied as they are where TE reads them in another order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity
from tests.hf_models import Conv1D

HIDDEN, HEADS = 64, 4


class Attention(nn.Module):
    """Multi-head attention whose fused rows are viewed as ``shape``; ``to_heads`` permutes ``[batch, seq, *shape]``."""

    def __init__(self, shape: tuple[int, ...], to_heads: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.to_heads = shape, to_heads
        self.fused, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fused.weight.data *= 2

    def forward(self, x: Tensor) -> Tensor:
        apart = self.fused(x).unflatten(-1, self.shape).permute(*self.to_heads)  # [3, batch, heads, seq, head_dim]
        return self.out(F.scaled_dot_product_attention(*apart).transpose(1, 2).flatten(2))


BY_KIND = (3, HEADS, HIDDEN // HEADS), (2, 0, 3, 1, 4)
BY_HEAD = (HEADS, 3, HIDDEN // HEADS), (3, 0, 2, 1, 4)
BY_CHANNEL = (HEADS, HIDDEN // HEADS, 3), (4, 0, 2, 1, 3)


class Conv1DAttention(Attention):
    """GPT-2's: the fused weight is ``[in, out]``."""

    def __init__(self, *layout):
        super().__init__(*layout)
        self.fused = Conv1D(HIDDEN, 3 * HIDDEN)


def found(layout, is_interleaved: bool, weights=None, reference=Attention):
    """Titles and messages of the findings where TE is given the reference's fused weight and bias unchanged, or so."""

    def factory(te, **_):
        module = te.MultiheadAttention(
            HIDDEN,
            HEADS,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            qkv_weight_interleaved=is_interleaved,
            attn_mask_type="no_mask",
            qkv_format="bshd",
        )
        names = {"fused": "qkv", "out": "proj"}
        plain = {f"{a}.{kind}": f"{b}.{kind}" for a, b in names.items() for kind in ("weight", "bias")}
        if weights:
            plain = weights | {left: right for left, right in plain.items() if left.startswith("out")}
        return parity.Pair(reference(*layout), module, lambda rng, batch, seq: rng.normal(batch, seq, HIDDEN), plain)

    case = parity.Case("fused", factory, sizes=(dict(batch=2, seq=17),))
    (result,) = parity.compare(case, ["bf16"])
    return [(finding.title, finding.message) for finding in result.findings] or result.status


def test_a_layout_that_te_was_told_of_is_right():
    assert found(BY_KIND, is_interleaved=False) == "passed"
    assert found(BY_HEAD, is_interleaved=True) == "passed"


def test_query_over_key_over_value_where_te_reads_head_by_head_is_found():
    ((title, message),) = found(BY_KIND, is_interleaved=True)
    assert title == "qkv-layout"
    assert 'map "fused.weight" to separated_qkv("qkv.weight", groups=4, head_dim=16)' in message
    assert 'likewise for "qkv.bias"' in message


def test_so_it_is_of_a_weight_that_is_transposed_together_with_its_bias():
    fused = {parity.transpose("fused.weight"): "qkv.weight", "fused.bias": "qkv.bias"}
    assert found(BY_KIND, False, fused, Conv1DAttention) == "passed"
    ((title, message),) = found(BY_KIND, True, fused, Conv1DAttention)
    assert title == "qkv-layout"
    assert 'map transpose("fused.weight") to separated_qkv("qkv.weight", groups=4, head_dim=16)' in message
    assert 'likewise for "qkv.bias"' in message


def test_head_by_head_where_te_reads_query_over_key_over_value_is_found():
    ((title, message),) = found(BY_HEAD, is_interleaved=False)
    assert title == "qkv-layout"
    assert 'map separated_qkv("fused.weight", groups=4, head_dim=16) to "qkv.weight"' in message


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_channels_that_hold_query_key_and_value_in_turn_are_found(is_interleaved):
    ((title, message),) = found(BY_CHANNEL, is_interleaved)
    assert title == "qkv-layout"
    assert "(heads channels qkv) ..." in message


def test_rows_that_a_map_rearranges_though_te_reads_them_as_they_are_are_found():
    def by_head(kind: str):
        return parity.rearrange(f"fused.{kind}", "(qkv heads c) ... -> (heads qkv c) ...", qkv=3, heads=HEADS)

    rearranged = {by_head("weight"): "qkv.weight", by_head("bias"): "qkv.bias"}
    ((title, message),) = found(BY_KIND, is_interleaved=False, weights=rearranged)
    assert title == "qkv-layout"
    assert 'map "fused.weight" to "qkv.weight"' in message


class FlatAttention(nn.Module):
    """Attention over ``[batch * heads, seq, head_dim]``, as older models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.q.weight.data *= 3

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for layer in (self.q, self.k, self.v)
        )
        query, key, value = heads
        context = torch.bmm((torch.bmm(query, key.mT) * (HIDDEN // HEADS) ** -0.5).softmax(-1), value)
        return self.out(context.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))


def test_rows_of_heads_that_are_batched_are_found_in_another_order():
    def by_channel(name: str):
        return parity.rearrange(f"{name}.weight", "(heads channels) ... -> (channels heads) ...", heads=HEADS)

    def factory(te, **_):
        module = te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, attn_mask_type="no_mask", qkv_format="bshd", bias=False
        )
        weights = {
            by_channel(name): f"qkv.{of}_weight" for name, of in zip("qkv", ("query", "key", "value"), strict=True)
        }
        weights["out.weight"] = "proj.weight"
        return parity.Pair(FlatAttention(), module, lambda rng, batch: rng.normal(batch, 17, HIDDEN), weights)

    (result,) = parity.compare(parity.Case("flat", factory, sizes=(dict(batch=2),)), ["bf16"])
    assert [finding.title for finding in result.findings] == ["heads-transposed"]
