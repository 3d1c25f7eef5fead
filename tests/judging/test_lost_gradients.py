"""Gradients that rounding outweighs: the size of their error is a matter of chance, of which drawn runs tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parity
from parity.judge.statistics import allowance
from parity.numerics.errors import Summed
from parity.reference import Attention

HIDDEN, HEADS = 128, 2


class Normed(nn.Module):
    """Attention behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention(HIDDEN, HEADS, HEADS, bias=True, rope=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(x))


def decided(seq: int, values_times: float = 1.0):
    """Biases so large that hardly a query is undecided between two keys: queries and keys get hardly a gradient."""

    def called(module: nn.Module, x: Tensor) -> Tensor:
        return values_times * module(x)

    def factory(te, **_):
        reference = Normed()
        for module in (reference.norm, reference.attention.q_proj, reference.attention.k_proj):
            nn.init.normal_(module.bias, std=30.0)
        names = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
        kinds = ("weight", "bias")
        return parity.Pair(
            reference,
            te.MultiheadAttention(
                HIDDEN, HEADS, attention_dropout=0.0, attn_mask_type="causal", qkv_format="bshd", input_layernorm=True
            ),
            weights={
                **{f"norm.{kind}": f"layernorm_qkv.layer_norm_{kind}" for kind in kinds},
                **{
                    f"attention.{left}.{kind}": f"layernorm_qkv.{right}_{kind}"
                    for left, right in names.items()
                    for kind in kinds
                },
                **{f"attention.o_proj.{kind}": f"proj.{kind}" for kind in kinds},
            },
            inputs=lambda rng: rng.normal(1, seq, HIDDEN).abs(),
            call_candidate=called,
        )

    return parity.Case("decided", factory, sizes=({},))


@pytest.mark.parametrize("seq", [32, 64])
def test_right_ports_pass_whose_queries_and_keys_get_nothing_but_rounding(seq):
    results = parity.compare(decided(seq), ["fp8_delayed"], seeds=range(6))
    assert {result.status for result in results} == {"passed"}
    lost = [tensor for result in results for tensor in result.tensors if tensor.expected.relative_l2 > 1.0]
    assert "d attention.q_proj.weight" in {tensor.label for tensor in lost}


def test_a_mistake_in_such_a_port_is_told():
    (result,) = parity.compare(decided(32, values_times=1.1), ["fp8_delayed"])
    assert result.status == "failed"


def errors(norms, drawn=True):
    return [Summed(torch.full((64,), norm / 8.0), is_drawn=drawn) for norm in norms]


SCATTERED, ALIKE = (1.0, 4.0, 2.0, 8.0, 2.0, 1.0, 3.0, 2.0), (2.0, 2.1, 1.9, 2.0, 2.1, 2.0, 1.9, 2.0)
TINY, LARGE = (Summed(torch.full((64,), size)) for size in (1e-3, 10.0))


def test_a_lost_gradient_may_err_by_as_much_more_as_drawn_runs_scatter():
    assert 2.0 < allowance(TINY, errors(SCATTERED), limit=1.7) < 20.0


def test_nothing_more_is_granted_where_drawn_runs_agree_or_the_gradient_is_not_lost_or_nothing_was_drawn():
    assert allowance(TINY, errors(ALIKE), limit=1.7) == 1.0
    assert allowance(LARGE, errors(SCATTERED), limit=1.7) == 1.0
    assert allowance(TINY, errors(SCATTERED, drawn=False), limit=1.7) == 1.0
