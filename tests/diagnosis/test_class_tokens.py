"""A class token at the other end, and what stands for an image: the class token, a mean with it, or without it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS, PATCHES = 64, 2, 12
HEAD = WIDTH // HEADS

Pool = Literal["class token", "patches", "all"]


def rotated(x: Tensor) -> Tensor:
    """Patches by their positions, and the first token, which has none, not at all."""
    token, patches = x[:, :, :1], x[:, :, 1:]
    rates = 100.0 ** -torch.linspace(0.0, 1.0, HEAD // 2).to(x)
    angles = torch.arange(patches.shape[2]).to(x)[:, None] * rates
    left, right = patches.chunk(2, -1)
    turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
    return torch.cat((token, torch.cat(turned, -1)), 2)


class Vit(nn.Module):
    def __init__(self, linear: Any, pool: Pool, last: bool = False) -> None:
        super().__init__()
        self.pool, self.last = pool, last
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.qkv, self.out, self.head = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        x = torch.cat((x, token) if self.last else (token, x), 1)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(rotated(q), rotated(k), v).transpose(1, 2).flatten(2))
        if self.pool == "class token":
            return self.head(x[:, -1] if self.last else x[:, 0])
        return self.head((x if self.pool == "all" else x[:, 1:]).mean(1))


def result(right: Pool, port: Pool, precision: str, last: bool = False) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        reference = Vit(nn.Linear, right)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, Vit(te.Linear, port, last), lambda rng: rng.normal(4, PATCHES, WIDTH), names)

    (one,) = parity.compare(parity.Case("vit", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("right", "port", "told"),
    [
        ("class token", "patches", "it is the mean over the others of dimension 1"),
        ("class token", "all", "it is the mean over dimension 1"),
        ("patches", "class token", "it takes the first of dimension 1, so many times"),
        ("patches", "all", "it takes all of dimension 1"),
        ("all", "class token", "it takes the first of dimension 1"),
        ("all", "patches", "it leaves out the first of dimension 1"),
    ],
)
def test_another_pooling_is_told(right, port, told, precision):
    finding = result(right, port, precision).findings[0]
    assert finding.title == "operation"
    assert finding.message.endswith(told)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_class_token_at_the_other_end_that_is_read_there_is_told(precision):
    finding = result("class token", "class token", precision, last=True).findings[0]
    assert finding.title == "operation"
    assert "join the parts of the 1st 'cat' of the module in the reference's order" in finding.message


@pytest.mark.parametrize("pool", ["class token", "patches", "all"])
def test_the_same_pooling_passes(pool):
    assert result(pool, pool, "bf16").passed
