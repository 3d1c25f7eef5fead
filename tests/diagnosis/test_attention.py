"""Attention: its scale, biases, sinks, caps and heads, a cache's keys, and numbers that a port gets wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import FP32_AND_BF16, compared, decoders, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity
from lab.corpus.decoder import HEAD_DIM, HEADS, HIDDEN, Options, frequencies, turned
from parity.mistakes.masks import papers_slopes
from parity.te import state

# Sinks, biases by position, and heads whose values have another width than their keys.

SEQ, KEY_DIM, VALUE_DIM = 24, 32, 16
SLOPES = torch.tensor([0.5, 0.125])


class Reference(nn.Module):
    """Causal attention, written out as models write it, with optional extras."""

    def __init__(self, sinks: bool = False, alibi: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([1.0, -0.5])) if sinks else None
        self.alibi, self.flat, self.sinks_as = alibi, flat, lambda sinks: sinks

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = self._products_of_all_heads(query, key) if self.flat else self._products(query, key)
        scores = scores + torch.full((SEQ, SEQ), float("-inf"), dtype=scores.dtype).triu(1)
        if self.sinks is not None:
            sinks = self.sinks_as(self.sinks).to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
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
        """Return a bias that depends on the key's position alone; softmax ignores what depends only on the query's."""
        return SLOPES.to(dtype)[:, None, None] * torch.arange(SEQ, dtype=dtype)

    def _products(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) * KEY_DIM**-0.5
        return scores + self._bias(scores.dtype) if self.alibi else scores

    def _products_of_all_heads(self, query: Tensor, key: Tensor) -> Tensor:
        """Return scores computed as in Bloom, from ``[batch * heads, ...]``."""
        bias = self._bias(query.dtype).repeat(len(query), 1, 1)
        flat = (x.reshape(-1, SEQ, KEY_DIM) for x in (query, key))
        query, key = flat
        scores = torch.baddbmm(bias, query, key.transpose(-2, -1), beta=1.0, alpha=KEY_DIM**-0.5)
        return scores.view(-1, 2, SEQ, SEQ)


def with_extras(
    reference: dict[str, bool], call: dict[str, Any], value_dim: int = KEY_DIM, **options: Any
) -> parity.Result:
    """Compare attention with these extras with TE's attention of these options, called with these arguments."""

    def plain() -> nn.Module:
        module = Reference(**reference)
        if module.sinks is not None and options.get("softmax_type") != "learnable":  # TE's attention does not hold them
            sinks = module.sinks.detach()
            del module.sinks
            module.register_buffer("sinks", sinks)
        return module

    return compared(
        plain,
        lambda te: te.DotProductAttention(2, (KEY_DIM, value_dim), qkv_format="bshd", attention_dropout=0.0, **options),
        normal((2, SEQ, 2, KEY_DIM), (2, SEQ, 2, KEY_DIM), (2, SEQ, 2, value_dim)),
        weights={"sinks": "softmax_offset"} if options.get("softmax_type") == "learnable" else {},
        call_candidate=lambda core, *heads: core(*heads, attn_mask_type="causal", **call),
    )


def alibi(slopes: Tensor) -> dict[str, Any]:
    return dict(core_attention_bias_type="alibi", alibi_slopes=slopes)


@pytest.mark.parametrize(
    ("reference", "call", "options", "title"),
    [
        (dict(alibi=True), alibi(SLOPES), {}, "passed"),
        (dict(alibi=True), {}, {}, "attention-bias"),
        (dict(alibi=True, flat=True), alibi(SLOPES), {}, "passed"),
        (dict(alibi=True, flat=True), {}, {}, "attention-bias"),
        (dict(alibi=True), alibi(3 * SLOPES), {}, "attention-bias"),
        (dict(alibi=True), alibi(SLOPES.flip(0)), {}, "attention-bias"),
        (dict(sinks=True), {}, dict(softmax_type="learnable"), "passed"),
        (dict(sinks=True), {}, dict(softmax_type="vanilla"), "softmax-sink"),
        (dict(sinks=True), {}, dict(softmax_type="off-by-one"), "softmax-sink"),
        ({}, {}, dict(value_dim=VALUE_DIM), "passed"),
        ({}, {}, dict(value_dim=VALUE_DIM, softmax_scale=VALUE_DIM**-0.5), "softmax-scale"),
        ({}, {}, dict(softmax_scale=0.23), "softmax-scale"),
    ],
)
def test_another_bias_sink_or_scale_is_told(reference, call, options, title):
    tells_only(with_extras(reference, call, **options), title)


class Divided(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1) / math.sqrt(VALUE_DIM)
        hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (probabilities @ value.transpose(1, 2)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_scale_of_one_over_a_whole_number_is_told_where_the_reference_divides(precision):
    """Plant the scale of query-key layer scaling in layer 12: a search among decimal numbers only comes close to it."""
    scale = 1 / (12 * math.sqrt(VALUE_DIM))
    result = compared(
        Divided,
        lambda te: te.DotProductAttention(
            2, VALUE_DIM, qkv_format="bshd", attention_dropout=0.0, attn_mask_type="causal", softmax_scale=scale
        ),
        normal(*[(2, SEQ, 2, VALUE_DIM)] * 3),
        precision,
        weights={},
    )
    tells_only(result, "softmax-scale", f"the port's is {scale:.4g}")


@pytest.mark.parametrize(
    ("sinks_as", "told"),
    [
        (lambda sinks: sinks.flip(0), "the port has them in the reverse order of heads."),
        (lambda sinks: -sinks, "the port negates them."),
        (lambda sinks: 0.5 * sinks, "the port's are 0.5 times that."),
        (lambda sinks: sinks * torch.tensor([1.0, -1.0]), "the port negates them, in head 1."),
    ],
)
def test_other_sinks_are_told(sinks_as, told):
    def port(te: Any) -> nn.Module:
        module = Reference(sinks=True)
        module.sinks_as = sinks_as
        return module

    heads = (2, SEQ, 2, KEY_DIM)
    result = compared(lambda: Reference(sinks=True), port, normal(heads, heads, heads))
    tells_only(result, "softmax-sink", told)


# Slopes of ALiBi: TE uses the paper's by default, which differ from a reference's own formula.

OWN_SLOPES = 2.0 ** (-8.0 * torch.arange(1.0, 7.0) / 6)  # for six heads the paper's are not one geometric sequence


class Alibi(nn.Module):
    """Causal attention whose scores rise by each head's slope from key to key. Keys may be padded on either side."""

    def __init__(self, slopes: Tensor = OWN_SLOPES, padded: slice = slice(0)) -> None:
        super().__init__()
        self.slopes, self.padded = slopes, padded

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        positions = torch.arange(SEQ)
        distance = positions - positions[:, None]
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(16)
        scores = scores + (self.slopes[:, None, None] * distance).to(query.dtype)
        hidden = (distance > 0).expand(2, 1, SEQ, SEQ).clone()
        hidden[0, ..., self.padded] = True
        hidden &= distance != 0  # a padded query sees itself
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)


@in_turn(
    ("call", "title", "phrase"),
    [
        (dict(alibi_slopes=OWN_SLOPES), "passed", ""),
        ({}, "attention-bias", "alibi_slopes; the port has the paper's, which are its default"),
        (dict(alibi_slopes=papers_slopes(24)[:6].float()), "attention-bias", "the port has the first 6 of 24 heads'"),
        (
            dict(alibi_slopes=papers_slopes(3).repeat(2).float()),
            "attention-bias",
            "the port has those of 3 heads, repeated",
        ),
    ],
)
def test_tes_own_slopes_in_the_place_of_the_references_are_told(call, title, phrase, precision):
    result = compared(
        Alibi,
        lambda te: te.DotProductAttention(6, 16, qkv_format="bshd", attn_mask_type="causal"),
        normal(*[(2, SEQ, 6, 16)] * 3),
        precision,
        call_candidate=lambda core, *heads: core(*heads, core_attention_bias_type="alibi", **call),
    )
    tells_only(result, title, phrase)


PAPERS = papers_slopes(6)  # of six heads, not in descending order


@in_turn(
    ("right", "port", "padded", "phrase"),
    [
        (OWN_SLOPES, PAPERS, slice(0, 5), "the paper's, which are its default"),
        (OWN_SLOPES, PAPERS, slice(SEQ - 5, SEQ), "the paper's, which are its default"),
        (PAPERS / 4, PAPERS.sort(descending=True).values / 4, slice(0), "the same in descending order"),
        (PAPERS / 4, OWN_SLOPES / 4, slice(0), "2^(-8 i / 6)"),  # scaled with the scores, as in Falcon
    ],
)
def test_other_slopes_are_told_beside_a_padding_mask_and_scaled(right, port, padded, phrase, precision):
    heads = normal(*[(2, SEQ, 6, 16)] * 3)
    result = compared(lambda: Alibi(right, padded), lambda te: Alibi(port, padded), heads, precision)
    tells_only(result, "attention-bias", f"the port has {phrase}")


@pytest.mark.parametrize("heads", [2, 6, 8, 12])
def test_the_papers_slopes_are_tes(heads):
    port = parity.te.kernels("cpu").te.DotProductAttention(heads, 16, qkv_format="bshd", attn_mask_type="causal")
    query, key, value = (torch.randn(1, SEQ, heads, 16) for _ in range(3))
    contexts = []
    for slopes in (None, papers_slopes(heads).float()):
        with state.fresh_caches():  # TE keeps slopes for the whole process
            contexts.append(port(query, key, value, core_attention_bias_type="alibi", alibi_slopes=slopes))
    torch.testing.assert_close(*contexts)


# Numbers of heads into which TE's attention splits the results of the same linear layers.

WIDTH = 128


class Grouped(nn.Module):
    def __init__(self, linear: Any, heads: int, groups: int, te: Any = None) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = heads, groups, WIDTH // heads
        keys = groups * self.head_dim
        self.q, self.k, self.v, self.out = (linear(WIDTH, n, bias=False) for n in (WIDTH, keys, keys, WIDTH))
        options = dict(num_gqa_groups=groups, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0)
        self.attention = None if te is None else te.DotProductAttention(heads, self.head_dim, **options)

    def forward(self, x: Tensor) -> Tensor:
        split = zip((self.q, self.k, self.v), (self.heads, self.groups, self.groups), strict=True)
        q, k, v = (layer(x).unflatten(-1, (count, self.head_dim)) for layer, count in split)
        if self.attention is not None:
            return self.out(self.attention(q, k, v))
        k, v = (y.repeat_interleave(self.heads // self.groups, 2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("right", "wrong", "precision", "layers"),
    [
        ((8, 8), (2, 2), "bf16", 1),
        ((8, 2), (4, 1), "fp8_current", 2),
        ((4, 2), (16, 8), "bf16", 1),
        ((8, 8), (1, 1), "fp32", 1),
    ],
)
def test_another_number_of_heads_is_told_with_both(right, wrong, precision, layers):
    phrase = f"num_attention_heads={right[0]}, as the reference has; the port has {wrong[0]}"
    tells_only(with_heads(right, wrong, precision, layers), "head-count", phrase)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_the_same_number_of_heads_passes(heads):
    assert with_heads(heads, heads, "bf16").passed


def with_heads(right: tuple[int, int], wrong: tuple[int, int], precision: str, layers: int = 1) -> parity.Result:
    """Compare layers of ``right`` heads and groups with TE's layers of ``wrong`` ones."""
    return compared(
        lambda: Stack(*(Grouped(nn.Linear, *right) for _ in range(layers))),
        lambda te: Stack(*(Grouped(te.Linear, *wrong, te) for _ in range(layers))),
        normal((2, 32, WIDTH)),
        precision,
    )


# Caps of scores and of logits by tanh.


CAPPED_LOGITS = dict(logits_cap=3.0)


@in_turn(
    ("right", "port", "phrase"),
    [
        (Options(loss=False), CAPPED_LOGITS, "leave activations uncapped, as the reference does; they are"),
        (Options(logits_cap=5.0), CAPPED_LOGITS, "cap activations at 5 by tanh, as the reference does;"),
        (
            Options(loss=False, **CAPPED_LOGITS),
            dict(logits_cap=math.inf),
            "cap activations at 3 by tanh, as the reference does; none are",
        ),
        (Options(loss=False), dict(softcap=1.0), "leave the scores uncapped as the reference does, softcap=0.0 in TE;"),
        (
            Options(softcap=8.0),
            dict(softcap=1.0),
            "as the reference does, softcap=8; the port has",
        ),
    ],
)
def test_a_cap_is_told_with_both_numbers(right, port, phrase, precision):
    tells(decoders(right, precision, **port), "softcap", phrase)


@FP32_AND_BF16
def test_the_same_caps_pass(precision):
    assert decoders(Options(softcap=8.0, logits_cap=5.0), precision).passed


# A decoding step with a cache of keys and values.

CACHED = 12


@dataclass(frozen=True)
class Step:
    """Hold what is wrong: an offset of positions, the step's own keys missing, and the number of lost old keys."""

    position: int = 0
    late: bool = False
    lost: int = 0


class Decoding(nn.Module):
    def __init__(self, linear: Any, step: Step) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.step = step

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        positions = torch.arange(CACHED, CACHED + tokens) + self.step.position
        q, k = (turned(one, frequencies(), positions) for one in (q, k))
        if not self.step.late:
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        keys, values = keys[:, :, self.step.lost :], values[:, :, self.step.lost :]
        scores = q @ keys.transpose(-1, -2) / math.sqrt(HEAD_DIM)
        if tokens > 1 and not self.step.late:
            later = torch.ones(tokens, keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - tokens + 1)
            scores = scores.masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


@in_turn(
    ("tokens", "step", "title"),
    [
        (1, Step(), "passed"),
        (1, Step(position=1), "rope-position"),
        (1, Step(late=True), "cache-step"),
        (4, Step(), "passed"),
        (4, Step(position=-1), "rope-position"),
        (4, Step(position=-CACHED), "rope-position"),
        (4, Step(late=True), "cache-step"),
        (4, Step(lost=1), "cache-step"),
    ],
)
def test_what_is_off_in_a_step_of_decoding_is_told(tokens, step, title, precision):
    inputs = normal((4, tokens, HIDDEN), *[(4, HEADS, CACHED, HEAD_DIM)] * 2)
    tells(twins(Decoding, dict(step=step), inputs, precision, right=dict(step=Step())), title)


# Numbers that no table of common values contains.

LATE = 5  # positions
RIGHT = dict(base=10_000.0, window=8, eps=1e-5, softcap=50.0, scale=0.25)


class WithNumbers(nn.Module):
    """Pre-norm attention with a window, a cap of its scores and rotary embeddings, written out."""

    def __init__(self, base: float, window: int, eps: float, softcap: float, scale: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=eps)
        self.qkv, self.out = nn.Linear(64, 3 * 64, bias=False), nn.Linear(64, 64, bias=False)
        self.base, self.window, self.softcap, self.scale = base, window, softcap, scale

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.base ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32, device=x.device), frequencies)
        cos, sin = (torch.cat((table, table), -1).to(x.dtype) for table in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def turned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), self.rotated(k), v

    def capped(self, scores: Tensor) -> Tensor:
        return self.softcap * torch.tanh(scores / self.softcap)

    def masked(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return self.capped(scores).masked_fill(hidden, -1e9)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = self.turned(*heads.unbind(0))
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[:, None] - position
        scores = self.masked(q @ k.mT * self.scale, (distance < 0) | (distance > self.window))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class CappedAfterTheMask(WithNumbers):
    """Attention that caps scores after the mask, so that hidden keys are seen."""

    def masked(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return self.capped(scores.masked_fill(hidden, -1e9))


class WithLateKeys(WithNumbers):
    """Attention whose keys are counted from ``LATE``."""

    def turned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), self.rotated(F.pad(k, (0, 0, LATE, 0)))[..., LATE:, :], v


class WithRotatedValues(WithNumbers):
    """Attention that rotates values as well as queries and keys."""

    def turned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(q), self.rotated(k), self.rotated(v)


@pytest.mark.parametrize(
    ("number", "value", "title", "phrase", "size"),
    [
        ("eps", 5e-6, "norm-eps", "it computes with eps=5e-06", 0.01),
        ("base", 20_000.0, "rope-base", "it rotates with base 20000", 1.0),
        ("window", 10, "window", "it sees 10", 1.0),
        ("window", 5, "window", "it sees 5", 1.0),
        ("softcap", 20.0, "softcap", "the port has 20", 1.0),
        ("scale", 0.2, "softmax-scale", "the port's is 0.2", 1.0),
        # Nearer to the reference's number than any known one is.
        ("base", 10_400.0, "rope-base", "it rotates with base 10400", 1.0),
        ("softcap", 31.0, "softcap", "the port has 31", 1.0),
        ("scale", 0.26, "softmax-scale", "the port's is 0.26", 1.0),
        ("scale", 0.237, "softmax-scale", "the port's is 0.237", 1.0),
    ],
)
def test_a_number_that_nobody_uses_is_told(number, value, title, phrase, size):
    tells(with_numbers(WithNumbers(**RIGHT | {number: value}), size), title, phrase)


@pytest.mark.parametrize(
    ("port", "right", "title", "phrase"),
    [
        (WithRotatedValues, {}, "rope-unwanted", "the port rotates values as well"),
        (WithLateKeys, {}, "rope-position", f"the key's are off by +{LATE}, or the query's by -{LATE}"),
        (CappedAfterTheMask, dict(softcap=5.0), "softcap", "capped after it, hidden keys have the score -5"),
    ],
)
def test_what_else_is_done_to_queries_keys_and_scores_is_told(port, right, title, phrase):
    tells(with_numbers(port(**RIGHT | right), right=right), title, phrase)


def with_numbers(port: nn.Module, size: float = 1.0, right: Mapping[str, float] = RIGHT) -> parity.Result:
    """Compare attention of the right numbers with another; ``size`` is the inputs' standard deviation."""
    return compared(
        lambda: WithNumbers(**{**RIGHT, **right}), lambda te: port, lambda rng: rng.normal(2, 32, 64) * size, "fp32"
    )


# Attention that is nearly uniform: its scale shows only in the gradients of queries and keys.


class Uniform(nn.Module):
    """Residual attention with a small scale, as in Granite."""

    def __init__(self, linear: Any, scale: float = 1 / 64) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        made = (layer(x) for layer in (self.query, self.key, self.value))
        query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in made)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("scale", [1 / 32, 0.25])
def test_the_scale_of_nearly_uniform_attention_is_told_by_its_gradients(scale):
    result = twins(Uniform, dict(scale=scale), normal((2, SEQ, HIDDEN)), "fp8_current")
    tells(result, "softmax-scale", "softmax_scale=0.01562, as the reference has")


@pytest.mark.parametrize("precision", ["bf16", "fp8_current"])
def test_a_scale_that_is_applied_twice_is_told(precision):
    twice = dict(scale=0.11**2)
    result = twins(Uniform, twice, normal((2, SEQ, HIDDEN)), precision, right=dict(scale=0.11))
    tells_only(result, "softmax-scale", "the port's is its square, 0.0121, as if both queries and scores were scaled")
