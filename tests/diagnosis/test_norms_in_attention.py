"""Norms of queries, keys or values that a port alone has."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import parity

WIDTH, HEADS = 64, 2
HEAD = WIDTH // HEADS


class Attention(nn.Module):
    """Without norms, or with those of queries and keys."""

    normed = False

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.qkv, self.out = mistake, linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        if self.normed:
            self.of_q, self.of_k = (nn.RMSNorm(HEAD, eps=1e-6) for _ in range(2))
            nn.init.uniform_(self.of_k.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        if self.normed:
            q, k = self.of_q(q), self.of_k(k)
            v = self.of_k(v) if self.mistake == "keys' norm" else v
        if "all heads" in self.mistake:
            q, k = (F.rms_norm(one.transpose(1, 2).flatten(2), (WIDTH,), eps=1e-5) for one in (q, k))
            q, k = (one.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for one in (q, k))
        else:
            q, k, v = (
                F.rms_norm(one, (HEAD,), eps=1e-5) if name in self.mistake.split() else one
                for name, one in zip("qkv", (q, k, v), strict=True)
            )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Normed(Attention):
    normed = True


def result(module: type[Attention], mistake: str, precision: str) -> parity.Result:
    def factory(te: Any, **_: Any) -> parity.Pair:
        right, port = module(nn.Linear), module(te.Linear, mistake)
        names = {name: name for name, _ in right.named_parameters()}
        return parity.Pair(right, port, lambda rng: rng.normal(2, 16, WIDTH), weights=names)

    (one,) = parity.compare(parity.Case("normed", factory, sizes=({},)), [precision])
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("module", "mistake", "told"),
    [
        (Attention, "v", "attention has a RMSNorm of values"),
        (Attention, "q k v", "attention has a RMSNorm of queries, keys and values"),
        (Attention, "k", "attention has a RMSNorm of keys"),
        (Attention, "all heads", "attention has a RMSNorm of queries and keys, all heads at once"),
        (Normed, "v", "attention has a RMSNorm of values"),
        (Normed, "keys' norm", "they go through the norm of the keys"),
    ],
)
def test_a_norm_of_the_port_alone_is_told_by_what_it_is_of(module, mistake, told, precision):
    (finding,) = result(module, mistake, precision).findings
    assert finding.title == "norm-missing"
    assert finding.message.endswith(told)


@pytest.mark.parametrize("module", [Attention, Normed])
def test_the_same_norms_pass(module):
    assert result(module, "", "bf16").passed
