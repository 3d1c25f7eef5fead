"""Norms of queries and keys that take each head's channels together, and ports that take those of all heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

SEQ, HEADS, GROUPS, HEAD_DIM = 24, 4, 2, 16
HIDDEN = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are normalised over each head, or over all of them.

    ``sums_of_squares`` may be over other channels than ``per_head`` says the gains are of.
    """

    def __init__(self, linear: Any, norm: Any, per_head: bool, taken_per_head: bool) -> None:
        super().__init__()
        self.q, self.kv = linear(HIDDEN, HIDDEN), linear(HIDDEN, 2 * GROUPS * HEAD_DIM)
        self.q_norm, self.k_norm = (norm(HEAD_DIM if per_head else heads * HEAD_DIM) for heads in (HEADS, GROUPS))
        self.out = linear(HIDDEN, HIDDEN)
        self.taken_per_head = taken_per_head

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        q, k = self.normalized(q, self.q_norm), self.normalized(k, self.k_norm)
        q, k, v = (heads.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for heads in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(context.transpose(1, 2).flatten(-2))

    def normalized(self, x: Tensor, norm: nn.Module) -> Tensor:
        """With the gain of ``norm``, over the channels that are asked for."""
        heads, gain = x.unflatten(-1, (-1, HEAD_DIM)), norm.weight
        if gain.numel() == HEAD_DIM and self.taken_per_head:
            return norm(heads).flatten(-2)
        if gain.numel() == HEAD_DIM:
            return (F.rms_norm(x, x.shape[-1:], eps=1e-5).unflatten(-1, (-1, HEAD_DIM)) * gain).flatten(-2)
        if self.taken_per_head:
            return F.rms_norm(heads, (HEAD_DIM,), eps=1e-5).flatten(-2) * gain
        return norm(x)


def compared(per_head: bool, taken_per_head: bool, precision: str) -> parity.Result:
    def factory(te: Any) -> parity.Pair:
        reference = Attention(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-5), per_head, per_head)
        candidate = Attention(te.Linear, te.RMSNorm, per_head, taken_per_head)
        return parity.Pair(
            reference,
            candidate,
            lambda rng: rng.normal(2, SEQ, HIDDEN),
            {name: name for name, _ in reference.named_parameters()},
        )

    (result,) = parity.compare(parity.Case("attention", factory, sizes=({},)), [precision])
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
class TestNormsOfQueriesAndKeys:
    @pytest.mark.parametrize("per_head", [True, False])
    def test_as_in_the_reference_pass(self, per_head, precision):
        assert compared(per_head, per_head, precision).passed

    def test_of_each_head_for_all_are_named(self, precision):
        first = compared(False, True, precision).findings[0]
        assert (first.title, "16 at a time" in first.message) == ("norm-groups", True)

    def test_of_all_heads_for_each_are_named(self, precision):
        first = compared(True, False, precision).findings[0]
        assert (first.title, "all are, at once" in first.message) == ("norm-groups", True)


class Mixer(nn.Module):
    """Mamba 2's gate, and its norm in groups of channels."""

    def __init__(self, linear: Any, groups: int) -> None:
        super().__init__()
        self.into, self.out, self.groups = linear(HIDDEN, 4 * HIDDEN), linear(2 * HIDDEN, HIDDEN), groups
        self.gain = nn.Parameter(torch.rand(2 * HIDDEN) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.into(x).chunk(2, -1)
        parts = (y * F.silu(gate)).unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-5)
        return x + self.out(parts.flatten(-2) * self.gain)


@pytest.mark.parametrize(("groups", "of_port"), [(4, 1), (4, 2), (2, 4), (1, 8)])
def test_another_number_of_groups_is_named(groups, of_port):
    def factory(te: Any) -> parity.Pair:
        reference = Mixer(nn.Linear, groups)
        names = {name: name for name, _ in reference.named_parameters()}
        return parity.Pair(reference, Mixer(te.Linear, of_port), lambda rng: rng.normal(2, SEQ, HIDDEN), names)

    told = "all are, at once" if of_port == 1 else f"{2 * HIDDEN // of_port} at a time"
    (result,) = parity.compare(parity.Case("mixer", factory, sizes=({},)), ["bf16"])
    first = result.findings[0]
    assert (first.title, told in first.message) == ("norm-groups", True)
