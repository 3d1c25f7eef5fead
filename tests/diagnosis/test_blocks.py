"""Mistakes in how blocks are put together: parallel branches, their norms and scales, pooling, token types, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

HIDDEN, HEADS, SEQ, BATCH, LAYERS = 64, 4, 12, 4, 2


class Block(nn.Module):
    """Attention and MLP side by side, of one norm or of two; ``how`` is what a port does instead."""

    def __init__(self, linear: Any, norm: Any, two: bool, how: str) -> None:
        super().__init__()
        self.how, self.two = how, two
        self.norm1 = norm(HIDDEN)
        if two:
            self.norm2 = norm(HIDDEN)
        self.qkv, self.out = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.up, self.down = linear(HIDDEN, 2 * HIDDEN), linear(2 * HIDDEN, HIDDEN)
        nn.init.normal_(self.qkv.bias, std=0.5)

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.how == "no bias of queries":
            qkv = qkv - torch.cat((self.qkv.bias[:HIDDEN], torch.zeros_like(self.qkv.bias[HIDDEN:])))
        x = x.transpose(0, 1) if self.how == "sequence first" else x
        qkv = qkv.transpose(0, 1) if self.how == "sequence first" else qkv
        heads = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in qkv.chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.out(y.transpose(0, 1) if self.how == "sequence first" else y)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        other = self.norm2 if self.two else self.norm1
        read = {"in sequence": None, "no norm": x}.get(self.how, other(x) if self.two else normed)
        attended = self.attention(normed)
        read = other(x + attended) if read is None else read
        y = self.down(F.gelu(self.up(read), approximate="tanh"))
        if self.how == "halved":
            return x + 0.5 * (attended + y)
        return x + attended + y


class Encoder(nn.Module):
    """Tokens and their types, blocks, and the first token's classes."""

    def __init__(
        self, linear: Any, norm: Any, two: bool = False, how: str = "", normed: bool = True, layer: int | None = None
    ) -> None:
        super().__init__()
        self.how = how
        hows = [how if layer in (None, number) else "" for number in range(LAYERS)]
        self.tokens, self.types = nn.Embedding(48, HIDDEN), nn.Embedding(2, HIDDEN)
        self.layers = nn.ModuleList(Block(linear, norm, two, one) for one in hows)
        self.norm = norm(HIDDEN) if normed else nn.Identity()
        self.head = linear(HIDDEN, 32)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        x = self.tokens(ids) + self.types(torch.zeros_like(types) if self.how == "no types" else types)
        for layer in self.layers:
            x = layer(x)
        x = x if self.how == "no last norm" else self.norm(x)
        return self.head(x[:, 1:].mean(1) if self.how == "mean of others" else x[:, 0])


def found(
    how: str,
    precision: str = "bf16",
    two: bool = False,
    normed: bool = True,
    also: Any = None,
    layer: int | None = None,
) -> tuple[str, str]:
    """Title and message of the first finding on such a port, or whose one layer alone is so; its status if none."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        plain = Encoder(nn.Linear, lambda width: nn.LayerNorm(width, eps=1e-5), two, normed=normed)
        ported = Encoder(te.Linear, lambda width: te.LayerNorm(width), two, how, normed, layer)
        return parity.Pair(
            plain,
            ported,
            lambda rng: (rng.integers(BATCH, SEQ, high=48), rng.integers(BATCH, SEQ, high=2)),
            weights={name: name for name, _ in plain.named_parameters()},
            call_candidate=None if also is None else lambda port, *inputs: also(port(*inputs)),
        )

    (one,) = parity.compare(parity.Case("encoder", factory, sizes=({},)), [precision])
    return (one.findings[0].title, one.findings[0].message) if one.status == "failed" else (one.status, one.reason)


PRECISIONS = ["fp32", "bf16"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("two", [False, True])
def test_parallel_blocks_that_follow_each_other_are_told(two, precision):
    assert found("", precision, two)[0] == "passed"
    assert found("in sequence", precision, two)[0] == "parallel-block"


@pytest.mark.parametrize("how", ["in sequence", "no norm", "sequence first"])
def test_one_layer_that_is_otherwise_is_told_with_its_name(how):
    titles = {"in sequence": "parallel-block", "no norm": "norm-missing", "sequence first": "sequence-first"}
    title, message = found(how, "fp32", layer=1)
    assert title == titles[how]
    assert "layers.1" in message
    assert "layers.0" not in message


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parallel_block_that_lacks_the_shared_norm_is_told(precision):
    assert found("no norm", precision)[0] == "norm-missing"


def test_branches_that_are_all_scaled_are_told_with_their_factor():
    # Before a norm, branches times a half cannot be told from a stream times two.
    title, message = found("halved", normed=False)
    assert title == "factor"
    assert "attention and MLP" in message
    assert message.endswith("multiplied by 0.5")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bias_of_queries_alone_that_is_left_out_is_told(precision):
    title, message = found("no bias of queries", precision)
    assert title == "bias-dropped"
    assert "first third" in message


def test_a_norm_whose_weight_gets_no_gradient_is_missing():
    assert found("no last norm")[0] == "norm-missing"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_token_types_that_were_not_passed_on_are_told(precision):
    title, message = found("no types", precision)
    assert title == "embedding-position"
    assert "token types" in message


def test_a_mean_for_the_first_token_is_told():
    title, message = found("mean of others")
    assert title == "operation"
    assert "mean over the others of dimension 1" in message


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_within_the_batch_in_a_batch_first_model_is_told(precision):
    title, message = found("sequence first", precision)
    assert title == "sequence-first"
    assert "layers.0" in message


def test_a_mistake_that_takes_nearly_all_of_an_error_is_told_though_something_else_is_wrong():
    title, message = found("in sequence", "fp32", also=lambda output: output + 2e-3 * torch.sin(7.0 * output))
    assert title == "parallel-block"
    assert "something else is wrong, too" in message
