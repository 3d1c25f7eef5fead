"""Norms: their eps, divisors, kinds and groups, however they are written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import FP32_AND_BF16, compared, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity
from parity.mistakes.alternatives import numbers
from parity.mistakes.hypothesis import Mistake
from parity.mistakes.norms import Norm

WIDTH = 64

# LayerNorms that divide by n - 1 or add eps to the root, as ``x.std(-1) + eps`` does.

EPS = 1e-3
INPUTS = 0.1  # standard deviation, at which eps is a tenth of the variance


class LayerNorm(nn.Module):
    """LayerNorm as people write it out."""

    def __init__(self, unbiased: bool, eps_outside: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.unbiased, self.eps_outside = unbiased, eps_outside

    def forward(self, x: Tensor) -> Tensor:
        difference = x - x.mean(-1, keepdim=True)
        if self.eps_outside:
            y = difference / (x.std(-1, keepdim=True, unbiased=self.unbiased) + EPS)
        else:
            y = difference * torch.rsqrt(x.var(-1, keepdim=True, unbiased=self.unbiased) + EPS)
        return y * self.weight + self.bias


def layer_norms(reference: nn.Module, port: Callable[[Any], nn.Module]) -> parity.Result:
    return compared(lambda: reference, port, lambda rng: rng.normal(2, 32, WIDTH) * INPUTS, "fp32")


WAYS = tuple(product((False, True), repeat=2))  # unbiased, eps outside


@pytest.mark.parametrize(("reference", "port"), list(product(WAYS, WAYS)))
def test_another_divisor_and_another_place_of_eps_are_told(reference, port):
    result = layer_norms(LayerNorm(*reference), lambda te: LayerNorm(*port))
    if reference == port:
        assert result.passed
        return
    told = result.findings[0].message
    titles = {finding.title for finding in result.findings}
    if reference[0] != port[0]:
        assert "norm-statistics" in titles
        assert ("by n - 1" if reference[0] else "unbiased=False") in told or "write the norm" in told
    if reference[1] != port[1]:
        assert "norm-eps" in titles or "together with PAR201" in told or "inside the root, not outside" in told


@pytest.mark.parametrize(
    ("reference", "phrase"),
    [((True, False), "multiply the weight of TE's LayerNorm by sqrt((n - 1) / n)"), ((True, True), "in plain PyTorch")],
)
def test_tes_layer_norm_in_the_place_of_one_that_divides_by_n_minus_1_is_told(reference, phrase):
    result = layer_norms(LayerNorm(*reference), lambda te: te.LayerNorm(WIDTH, eps=EPS))
    assert phrase in result.findings[0].message


# A norm that is applied twice, as with a fused TE module after a norm that the port has kept.


class Head(nn.Module):
    """A norm, which may be applied more than once, and a linear layer."""

    def __init__(self, linear: Any, norm: Callable[..., nn.Module], times: int = 1) -> None:
        super().__init__()
        self.norm, self.head = norm(WIDTH), linear(WIDTH, 96, bias=False)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(x)
        return self.head(x)


@in_turn(
    ("norm", "times", "title"),
    [
        (nn.RMSNorm, 1, "passed"),
        (nn.LayerNorm, 1, "passed"),
        (nn.RMSNorm, 2, "norm-twice"),
        (nn.LayerNorm, 2, "norm-twice"),
    ],
)
def test_a_norm_that_is_applied_again_is_told(norm, times, title, precision):
    result = compared(
        lambda: Head(nn.Linear, norm), lambda te: Head(te.Linear, norm, times), normal((2, 24, WIDTH)), precision
    )
    tells_only(result, title)


# Another eps in TE's norm where it matters, in one norm and in the norms of all layers but the last.


def test_another_eps_is_told_where_it_matters():
    small = lambda rng: rng.normal(2, 32, 128, std=1e-2)  # noqa: E731
    tells_only(
        compared(lambda: nn.RMSNorm(128, eps=1e-6), lambda te: te.RMSNorm(128, eps=1e-5), small, "fp32"), "norm-eps"
    )


class Normed(nn.Module):
    """A stream of branches with a norm each and a last norm, on inputs as small as embeddings."""

    def __init__(self, linear: Any, norm: Any, last: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(norm(64), linear(64, 64)) for _ in range(3))
        self.norm = last(64)

    def forward(self, x: Tensor) -> Tensor:
        x = 1e-3 * x
        for layer in self.layers:
            x = x + 1e-3 * layer(x)
        return self.norm(x)


@FP32_AND_BF16
def test_an_eps_of_all_layers_is_told_with_their_list_where_the_last_norm_is_right(precision):
    right = lambda width: nn.RMSNorm(width, eps=1e-6)  # noqa: E731
    result = compared(
        lambda: Normed(nn.Linear, right, right),
        lambda te: Normed(te.Linear, te.RMSNorm, lambda width: te.RMSNorm(width, eps=1e-6)),
        normal((2, 32, WIDTH)),
        precision,
        probe=False,
    )
    tells_only(result, "norm-eps", "it computes with eps=1e-05 in norms of 64 channels in layers")


def some_mistake(value: float) -> Mistake[Norm]:
    """Return a mistake with a number."""
    return Mistake[Norm]("norm-eps", f"number {value:g}", "", lambda norm: ())


def test_the_search_begins_at_usual_numbers_and_on_both_sides_of_the_references_own():
    found = [one.value for one in numbers(some_mistake, own=[2.0, math.inf, 0.0], usual=(8.0, 2.0, math.inf))]
    assert found == [8.0, 2.0, pytest.approx(1.8), pytest.approx(2.2)]


def test_each_number_leads_to_any_other():
    first = next(numbers(some_mistake, own=[1.0]))
    assert first.tuned is not None
    other = first.tuned(7.0)
    assert (other.name, other.value) == ("number 7", 7.0)
    assert other.tuned is not None


# Norms that give each row the length 1, which TE calls L2Normalization: left out, or mistaken for RMSNorm.

OUT, ROWS = 48, 40


class Projected(nn.Module):
    """A linear layer behind a function."""

    def __init__(self, function: Callable[[Tensor], Tensor], linear: nn.Module) -> None:
        super().__init__()
        self.function, self.linear = function, linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))


def to_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def to_mean_square_one(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def normalized(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def projected(reference: Callable[[Tensor], Tensor], port: Callable[[Any], Any], precision: str) -> parity.Result:
    """Compare a linear layer behind a norm with TE's, behind a norm from ``te.ops``."""
    return compared(
        lambda: Projected(reference, nn.Linear(32, OUT)),
        lambda te: Projected(port(te.ops), te.Linear(32, OUT)),
        normal((ROWS, 32)),
        precision,
    )


@in_turn(
    ("reference", "port", "title", "phrase"),
    [
        (to_length_one, lambda ops: ops.L2Normalization(eps=1e-6), "passed", ""),
        (to_length_one, lambda ops: ops.Identity(), "norm-missing", ""),
        (to_length_one, lambda ops: to_mean_square_one, "norm-kind", "give TE L2Normalization"),
        (normalized, lambda ops: ops.L2Normalization(eps=1e-24), "passed", ""),
        (normalized, lambda ops: ops.Identity(), "norm-missing", ""),
        (normalized, lambda ops: to_mean_square_one, "norm-kind", "give TE L2Normalization"),
        (to_mean_square_one, lambda ops: ops.L2Normalization(), "norm-kind", "give TE RMSNorm"),
    ],
)
def test_a_norm_to_the_length_1_that_is_left_out_or_taken_for_rms_norm_is_told(
    reference, port, title, phrase, precision
):
    tells_only(projected(reference, port, precision), title, phrase)


def test_tes_default_eps_in_the_place_of_pytorchs_is_told():
    tells_only(projected(normalized, lambda ops: ops.L2Normalization(), "fp32"), "norm-eps", "1e-24")


class NormedHeads(nn.Module):
    """Attention with two heads whose queries and keys are scaled to length 1 (``qk_norm_type="L2Normalization"``)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(to_length_one(query), to_length_one(key), value)
        return self.out(context.transpose(1, 2).flatten(2))


def test_heads_that_the_port_does_not_normalize_are_told():
    options = dict(attention_dropout=0.0, attn_mask_type="no_mask", qkv_format="bshd", input_layernorm=False)
    names = {name: f"qkv.{name}_" for name in ("query", "key", "value")} | {"out": "proj."}
    weights = {f"{left}.{kind}": f"{right}{kind}" for left, right in names.items() for kind in ("weight", "bias")}
    port = lambda te: te.MultiheadAttention(32, 2, **options)  # noqa: E731
    tells_only(compared(NormedHeads, port, normal((2, ROWS, 32)), weights=weights), "norm-missing")


# Norms over each head against norms over all heads, and norms over other groups of channels.

SEQ, HEADS, GROUPS, HEAD_DIM = 24, 4, 2, 16
HIDDEN = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are normalised over each head, or over all heads at once.

    ``per_head`` says which channels the gains cover, ``taken_per_head`` which ones the sums of squares cover.
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
        """Return the input normalised over these channels, with the gain of ``norm``."""
        heads, gain = x.unflatten(-1, (-1, HEAD_DIM)), norm.weight
        if gain.numel() == HEAD_DIM and self.taken_per_head:
            return norm(heads).flatten(-2)
        if gain.numel() == HEAD_DIM:
            return (F.rms_norm(x, x.shape[-1:], eps=1e-5).unflatten(-1, (-1, HEAD_DIM)) * gain).flatten(-2)
        if self.taken_per_head:
            return F.rms_norm(heads, (HEAD_DIM,), eps=1e-5).flatten(-2) * gain
        return norm(x)


@in_turn(
    ("per_head", "taken_per_head", "title", "phrase"),
    [
        (True, True, "passed", ""),
        (False, False, "passed", ""),
        (False, True, "norm-groups", "16 at a time"),
        (True, False, "norm-groups", "the port normalises all at once"),
    ],
)
def test_norms_of_each_head_for_those_of_all_are_told(per_head, taken_per_head, title, phrase, precision):
    result = compared(
        lambda: Attention(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-5), per_head, per_head),
        lambda te: Attention(te.Linear, te.RMSNorm, per_head, taken_per_head),
        normal((2, SEQ, HIDDEN)),
        precision,
    )
    tells(result, title, phrase)


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


@pytest.mark.parametrize(
    ("groups", "of_port", "phrase"),
    [(4, 1, "the port normalises all at once"), (4, 2, "64 at a time"), (2, 4, "32 at a time"), (1, 8, "16 at a time")],
)
def test_another_number_of_groups_is_told(groups, of_port, phrase):
    result = twins(Mixer, dict(groups=of_port), normal((2, SEQ, HIDDEN)), right=dict(groups=groups))
    tells(result, "norm-groups", phrase)
