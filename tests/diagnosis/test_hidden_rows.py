"""A right port whose padded tokens are compared is told to leave them out, by each input that may hide them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HEADS, HEAD_DIM = 4, 16
WIDTH = HEADS * HEAD_DIM


class Encoder(nn.Module):
    def __init__(self, linear: Any, attention: nn.Module) -> None:
        super().__init__()
        self.qkv, self.attention, self.out = linear(WIDTH, 3 * WIDTH), attention, linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return x + self.out(self.attention(q, k, v, hidden))


class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        keep = ~hidden[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2)


class Ported(nn.Module):
    def __init__(self, te: Any, **options: Any) -> None:
        super().__init__()
        self.attention = te.DotProductAttention(
            HEADS, HEAD_DIM, qkv_format="bshd", attn_mask_type="padding", attention_dropout=0.0, **options
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return self.attention(q, k, v, attention_mask=hidden[:, None, None, :])


def as_padding(hidden: Tensor) -> Tensor:
    return hidden


def as_kept_integers(hidden: Tensor) -> Tensor:
    return (~hidden).long()


def as_bias(hidden: Tensor) -> Tensor:
    return (hidden * -1e4)[:, None, None, :]


def as_lengths(hidden: Tensor) -> Tensor:
    return (~hidden).sum(1)


READ = {
    as_padding: lambda given: given,
    as_kept_integers: lambda given: given == 0,
    as_bias: lambda given: given[:, 0, 0] < -1.0,
    as_lengths: lambda given: torch.arange(32) >= given[:, None],
}


def result(given_as: Any, precision: str, zeroed: bool = False, sequence_first: bool = False, **options: Any) -> Any:
    def call(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        hidden = READ[given_as](mask)
        output = module(x.transpose(0, 1) if sequence_first else x, hidden)
        if zeroed:
            output = output * ~hidden[..., None]
        return output.transpose(0, 1) if sequence_first else output

    def inputs(rng: Any) -> tuple[Tensor, Tensor]:
        hidden = torch.arange(32) >= torch.tensor([32, 20, 25])[:, None]
        return rng.normal(*((32, 3) if sequence_first else (3, 32)), WIDTH), given_as(hidden)

    def factory(te: Any, **_: Any) -> parity.Pair:
        reference, candidate = Encoder(nn.Linear, Plain()), Encoder(te.Linear, Ported(te, **options))
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, candidate, inputs, names, call_reference=call, call_candidate=call)

    (one,) = parity.compare(parity.Case("encoder", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize(
    ("given_as", "precision", "sequence_first"),
    [
        (as_padding, "fp32", False),
        (as_padding, "bf16", True),
        (as_padding, "fp8_current", False),
        (as_kept_integers, "bf16", False),
        (as_bias, "bf16", False),
        (as_lengths, "fp32", False),
    ],
)
def test_a_right_port_is_told_to_leave_hidden_tokens_out(given_as, precision, sequence_first):
    one = result(given_as, precision, sequence_first=sequence_first)
    assert not one.passed
    (finding,) = one.findings
    assert finding.title == "hidden-rows"
    assert "the input mask hides" in finding.message


def test_a_right_port_passes_that_leaves_them_out():
    assert result(as_padding, "bf16", zeroed=True).passed


def test_a_wrong_port_is_told_that_most_of_its_error_is_where_tokens_are_hidden_until_they_are_left_out():
    one = result(as_padding, "fp32", softmax_scale=0.2)
    titles = [finding.title for finding in one.findings]
    assert titles[0] == "hidden-rows"
    assert "unexplained" in titles
    left_out = result(as_padding, "fp32", zeroed=True, softmax_scale=0.2)
    assert left_out.findings[0].title == "softmax-scale"
