"""Gradients that are 0 but for rounding are judged by what rounding costs the others."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import parity
from parity.reference import Attention

HIDDEN, HEADS = 64, 4


def case(seq: int, wrong_bias: bool = False):
    """Attention whose query and key get no gradient where a query sees one key, and whose key bias never gets one."""

    def called(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x)
        return y + module.qkv.key_bias.sum() if wrong_bias else y

    def factory(te, **_):
        names = {"q_proj": "qkv.query", "k_proj": "qkv.key", "v_proj": "qkv.value"}
        weights = {f"{left}.{kind}": f"{right}_{kind}" for left, right in names.items() for kind in ("weight", "bias")}
        return parity.Pair(
            reference=Attention(HIDDEN, HEADS, HEADS, bias=True, rope=False),
            candidate=te.MultiheadAttention(
                HIDDEN, HEADS, attention_dropout=0.0, attn_mask_type="causal", qkv_format="bshd"
            ),
            weights={**weights, "o_proj.weight": "proj.weight", "o_proj.bias": "proj.bias"},
            inputs=lambda rng, batch: rng.normal(batch, seq, HIDDEN),
            call_candidate=called,
        )

    return parity.Case("attention", factory, sizes=(dict(batch=8),))


@pytest.mark.parametrize("seq", [1, 2, 16])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_right_ports_pass_on_every_seed(precision, seq):
    results = parity.compare(case(seq), [precision], seeds=range(8))
    assert {result.status for result in results} == {"passed"}


def test_a_gradient_where_none_is_due_fails():
    (result,) = parity.compare(case(16, wrong_bias=True), ["bf16"])
    assert result.status == "failed"
    assert "d k_proj.bias" in [tensor.label for tensor in result.tensors if not tensor.passed]
