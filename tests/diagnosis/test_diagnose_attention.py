"""Mistakes with sinks, biases by position, and heads whose values are of another width than their keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HEADS, SEQ, HEAD_DIM, VALUE_DIM = 2, 24, 32, 16
SLOPES = torch.tensor([0.5, 0.125])


class Reference(nn.Module):
    """Causal attention, written out as models write it, with what else they have."""

    def __init__(self, sinks: bool = False, alibi: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([1.0, -0.5])) if sinks else None
        self.alibi, self.flat = alibi, flat

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = self._products_of_all_heads(query, key) if self.flat else self._products(query, key)
        scores = scores + torch.full((SEQ, SEQ), float("-inf"), dtype=scores.dtype).triu(1)
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            joined = torch.cat((scores, sinks), -1)
            probabilities = F.softmax(joined - joined.max(-1, keepdim=True).values, -1)[..., :-1]
        else:
            probabilities = F.softmax(scores, -1)
        if self.flat:
            context = torch.bmm(probabilities.reshape(-1, SEQ, SEQ), value.reshape(-1, SEQ, value.shape[-1]))
            context = context.view(*value.shape)
        else:
            context = probabilities @ value
        return context.transpose(1, 2).flatten(2)

    def _bias(self, dtype: torch.dtype) -> Tensor:
        """By the key's position: what differs by the query's leaves a softmax as it is."""
        return SLOPES.to(dtype)[:, None, None] * torch.arange(SEQ, dtype=dtype)

    def _products(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) * HEAD_DIM**-0.5
        return scores + self._bias(scores.dtype) if self.alibi else scores

    def _products_of_all_heads(self, query: Tensor, key: Tensor) -> Tensor:
        """As Bloom has them, ``[batch * heads, ...]``."""
        bias = self._bias(query.dtype).repeat(len(query), 1, 1)
        flat = (x.reshape(-1, SEQ, HEAD_DIM) for x in (query, key))
        query, key = flat
        scores = torch.baddbmm(bias, query, key.transpose(-2, -1), beta=1.0, alpha=HEAD_DIM**-0.5)
        return scores.view(-1, HEADS, SEQ, SEQ)


def found(reference=None, value_dim=HEAD_DIM, call=None, **te_arguments):
    """Titles of the findings on TE's attention with these arguments, against the reference with those."""

    def factory(te, **_):
        core = te.DotProductAttention(
            HEADS, (HEAD_DIM, value_dim), qkv_format="bshd", attention_dropout=0.0, **te_arguments
        )
        module = Reference(**(reference or {}))
        has_offset = any(name == "softmax_offset" for name, _ in core.named_parameters())
        if module.sinks is not None and not has_offset:  # nothing in TE's module holds them
            sinks = module.sinks.detach()
            del module.sinks
            module.register_buffer("sinks", sinks)

        def called(core, *heads):
            return core(*heads, attn_mask_type="causal", **(call or {}))

        def inputs(rng, batch):
            return tuple(rng.normal(batch, SEQ, HEADS, width) for width in (HEAD_DIM, HEAD_DIM, value_dim))

        weights = {"sinks": "softmax_offset"} if has_offset else {}
        return parity.Pair(reference=module, candidate=core, inputs=inputs, weights=weights, call_candidate=called)

    case = parity.Case("attention", factory, sizes=(dict(batch=2),))
    (result,) = parity.compare(case, ["bf16"])
    return [finding.title for finding in result.findings] if result.status == "failed" else [result.status]


ALIBI = dict(core_attention_bias_type="alibi", alibi_slopes=SLOPES)


@pytest.mark.parametrize("flat", [False, True], ids=["four dimensions", "batch times heads"])
def test_a_bias_by_position_that_is_missing_is_found(flat):
    assert found(dict(alibi=True, flat=flat), call=ALIBI) == ["passed"]
    assert found(dict(alibi=True, flat=flat)) == ["attention-bias"]


def test_a_bias_of_another_size_is_found():
    other = dict(core_attention_bias_type="alibi", alibi_slopes=3 * SLOPES)
    assert found(dict(alibi=True), call=other) == ["attention-bias"]


def test_a_bias_of_another_head_is_found():
    other = dict(core_attention_bias_type="alibi", alibi_slopes=SLOPES.flip(0))
    assert found(dict(alibi=True), call=other) == ["attention-bias"]


def test_sinks_that_are_missing_or_zero_are_found():
    assert found(dict(sinks=True), softmax_type="learnable") == ["passed"]
    assert found(dict(sinks=True), softmax_type="vanilla") == ["softmax-sink"]
    assert found(dict(sinks=True), softmax_type="off-by-one") == ["softmax-sink"]


def test_a_scale_that_is_the_values_width_is_found_as_is_any_other():
    assert found(value_dim=VALUE_DIM) == ["passed"]
    assert found(value_dim=VALUE_DIM, softmax_scale=VALUE_DIM**-0.5) == ["softmax-scale"]
    assert found(softmax_scale=0.23) == ["softmax-scale"]
