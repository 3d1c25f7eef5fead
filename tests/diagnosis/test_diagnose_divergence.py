"""The first submodule that computes something else is named, and no right one for its rounding alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, TOKENS = 64, 32


def disturbed(y: Tensor, share: float = 0.3) -> Tensor:
    """What nobody would compute."""
    return y + share * (3.0 * y.roll(7, -1)).sin()


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return disturbed(x.tanh())


class Ladder(nn.Module):
    """Two linear layers, the second called twice, beside ``carried`` times the input.

    ``wrong`` says after which call, or in which, a port computes what nobody would.
    """

    def __init__(self, linear, carried: float, wrong: str = "", share: float = 0.3) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.act = Wrong() if wrong == "act" else nn.Tanh()
        self.carried, self.wrong, self.share = carried, wrong, share

    def forward(self, x: Tensor) -> Tensor:
        y = self.disturbed("fc1", self.fc1(x))
        y = self.disturbed("fc2", self.fc2(self.act(y)))
        y = self.fc2(y.tanh())
        return self.carried * x + self.disturbed("sum", y)

    def disturbed(self, after: str, y: Tensor) -> Tensor:
        return disturbed(y, self.share) if after == self.wrong else y


def divergence(wrong: str, precision: str, carried: float = 0.0, share: float = 0.3) -> list[str]:
    def factory(te, **_):
        names = [f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
        return parity.Pair(
            reference=Ladder(nn.Linear, carried),
            candidate=Ladder(te.Linear, carried, wrong, share),
            inputs=lambda rng, tokens: rng.normal(tokens, WIDTH),
            weights={name: name for name in names},
        )

    (result,) = parity.compare(parity.Case("ladder", factory, sizes=(dict(tokens=TOKENS),)), [precision])
    assert result.status == "failed"
    assert result.findings[0].title == "unexplained"
    return [finding.message for finding in result.findings if finding.title == "first-divergence"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_submodule_after_the_last_that_agrees_is_named(precision):
    (message,) = divergence("fc1", precision)
    assert message.startswith("act is the first")
    assert message.endswith("fc1 before it agrees")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_submodule_is_named_that_is_given_what_is_right(precision):
    (message,) = divergence("act", precision)
    assert message.startswith("act is the first")
    assert message.endswith("fc1 before it agrees")


def test_a_submodule_is_named_that_is_given_nearly_what_is_right():
    (message,) = divergence("fc1", "fp32", share=0.02)
    assert message.startswith("act is the first")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_call_of_a_submodule_that_was_called_before_is_named_with_its_number(precision):
    (message,) = divergence("fc2", precision)
    assert message.startswith("fc2 (call 2) is the first")
    assert message.endswith("fc2 before it agrees")


@pytest.mark.parametrize(("precision", "carried"), [("fp32", 100.0), ("bf16", 5.0)])
def test_right_submodules_whose_rounding_a_sum_hides_are_not_named(precision, carried):
    assert divergence("sum", precision, carried) == []


HEADS, SEQ = 4, 16


class PaddedAttention(nn.Module):
    """Self-attention whose padded tokens count nowhere, and a linear layer after it.

    Args:
        linear: its class.
        core: of ``[batch, seq, heads, head_dim]``; leaves in padded queries what it likes.
        wrong: after which submodule a port computes what nobody would.
        reads_padding: whether what attention leaves in padded queries is added to the other tokens.
    """

    def __init__(self, linear, core: nn.Module, wrong: str = "", reads_padding: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.core, self.act, self.fc = core, nn.Tanh(), linear(WIDTH, WIDTH)
        self.wrong, self.reads_padding = wrong, reads_padding

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)) for one in self.qkv(x).chunk(3, -1))
        y = self.disturbed("core", self.core(q, k, v, tokens))
        y = self.out(y + y.mean(1, keepdim=True) if self.reads_padding else y)
        y = self.disturbed("act", self.act(self.disturbed("out", y)))
        return self.fc(y) * tokens[..., None].to(y.dtype)

    def disturbed(self, after: str, y: Tensor) -> Tensor:
        return disturbed(y) if after == self.wrong else y


class PlainCore(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, tokens[:, None, None]).transpose(1, 2).flatten(2)


class FusedCore(nn.Module):
    """TE's, which leaves zeros in padded queries."""

    def __init__(self, te) -> None:
        super().__init__()
        self.fused = te.DotProductAttention(
            HEADS, WIDTH // HEADS, qkv_format="bshd", attn_mask_type="padding", attention_dropout=0.0
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
        return self.fused(q, k, v, attention_mask=~tokens[:, None, None])


def in_padded(wrong: str, precision: str, reads_padding: bool = False, **more) -> list[str]:
    def inputs(rng, batch):
        return rng.normal(batch, SEQ, WIDTH), torch.arange(SEQ) < rng.integers(batch, low=SEQ // 2, high=SEQ)[:, None]

    def factory(te, **_):
        names = [f"{layer}.{kind}" for layer in ("qkv", "out", "fc") for kind in ("weight", "bias")]
        return parity.Pair(
            reference=PaddedAttention(nn.Linear, PlainCore(), "", reads_padding),
            candidate=PaddedAttention(te.Linear, FusedCore(te), wrong, reads_padding),
            inputs=inputs,
            weights={name: name for name in names},
        )

    (result,) = parity.compare(parity.Case("padded", factory, sizes=(dict(batch=4),)), [precision], **more)
    assert result.status == "failed"
    return [finding.message for finding in result.findings if finding.title == "first-divergence"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("wrong", "named"), [("core", "out"), ("out", "act"), ("act", "fc")])
def test_attention_that_leaves_zeros_where_nobody_reads_is_right(wrong, named, precision):
    (message,) = in_padded(wrong, precision)
    assert message.startswith(f"{named} is the first")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_that_leaves_zeros_which_are_read_is_not(precision):
    (message,) = in_padded("", precision, reads_padding=True)
    assert "attention is the first" in message
