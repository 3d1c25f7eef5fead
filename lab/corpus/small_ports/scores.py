"""Attention's scale, biases, sinks, caps and heads, and the keys of a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.decoder import HEAD_DIM, HEADS, HIDDEN, capped, decoder, frequencies, turned
from lab.corpus.small import Host, normal, twins
from parity.mistakes.masks import papers_slopes

# Sinks, biases by position, and heads whose values have another width than their keys.

SEQ, KEY_DIM, VALUE_DIM = 24, 32, 16
SLOPES = torch.tensor([0.5, 0.125])


class Reference(nn.Module):
    """Causal attention, written out as models write it, with optional extras."""

    def __init__(
        self, sinks: bool = False, alibi: bool = False, flat: bool = False, sinks_as: Any = lambda sinks: sinks
    ) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([1.0, -0.5])) if sinks else None
        self.alibi, self.flat, self.sinks_as = alibi, flat, sinks_as

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
        query, key = (x.reshape(-1, SEQ, KEY_DIM) for x in (query, key))
        scores = torch.baddbmm(bias, query, key.transpose(-2, -1), beta=1.0, alpha=KEY_DIM**-0.5)
        return scores.view(-1, 2, SEQ, SEQ)


def with_kept_sinks() -> nn.Module:
    """Return attention whose sinks are no parameter, as TE's attention does not always hold them."""
    module = Reference(sinks=True)
    assert module.sinks is not None
    sinks = module.sinks.detach()
    del module.sinks
    module.register_buffer("sinks", sinks)
    return module


def against_te(
    name: str,
    module: Callable[[], nn.Module],
    shape: tuple[int, int, int] = (2, KEY_DIM, KEY_DIM),
    weights: Mapping[str, str] | None = None,
    **port: Any,
) -> Host:
    """Return the host of TE's causal attention.

    Args:
        name: the host's name.
        module: makes the reference.
        shape: the number of heads and the widths of their keys and values.
        weights: the weight map.
        port: the options of TE's attention, and as ``bias`` those of its call.
    """
    heads, key_dim, value_dim = shape

    def call(bias: Mapping[str, Any] = {}, **_: Any) -> Mapping[str, Any]:
        return dict(call_candidate=lambda core, *inputs: core(*inputs, attn_mask_type="causal", **bias))

    def make(te: Any, bias: Any = None, **options: Any) -> nn.Module:
        return te.DotProductAttention(heads, (key_dim, value_dim), qkv_format="bshd", attention_dropout=0.0, **options)

    keys = (2, SEQ, heads, key_dim)
    inputs = normal(keys, keys, (2, SEQ, heads, value_dim))
    return Host(name, lambda **_: module(), make, inputs, port, weights, call)


def alibi(slopes: Tensor | None = None) -> Mapping[str, Any]:
    return dict(core_attention_bias_type="alibi", alibi_slopes=slopes)


BY_KEY = against_te("bias_by_key", lambda: Reference(alibi=True), bias=alibi(SLOPES))
FLAT = against_te("bias_of_all_heads", lambda: Reference(alibi=True, flat=True), bias=alibi(SLOPES))
NARROW = against_te("narrow_values", Reference, (2, KEY_DIM, VALUE_DIM))
LEARNT = against_te(
    "learnt_sinks", lambda: Reference(sinks=True), weights={"sinks": "softmax_offset"}, softmax_type="learnable"
)
NO_SINKS = against_te("sinks_unported", with_kept_sinks, softmax_type="vanilla")
SINKS = Host(
    "sinks",
    lambda **settings: Reference(True, **settings),
    lambda te, **settings: Reference(True, **settings),
    normal(*[(2, SEQ, 2, KEY_DIM)] * 3),
)


class Divided(nn.Module):
    """Causal attention that divides scores by a root."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query.transpose(1, 2) @ key.permute(0, 2, 3, 1) / math.sqrt(VALUE_DIM)
        hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (probabilities @ value.transpose(1, 2)).transpose(1, 2).flatten(2)


DIVIDED = against_te("divided_scores", Divided, (2, VALUE_DIM, VALUE_DIM))
OF_LAYER_12 = 1 / (12 * math.sqrt(VALUE_DIM))  # query-key layer scaling, near to which some decimal numbers come

# Slopes of ALiBi: TE uses the paper's by default, which differ from a reference's own formula.

OWN_SLOPES = 2.0 ** (-8.0 * torch.arange(1.0, 7.0) / 6)  # for six heads the paper's are not one geometric sequence
PAPERS = papers_slopes(6)  # not in descending order


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


def of_slopes(name: str, slopes: Tensor, padded: slice = slice(0)) -> Host:
    """Return the host of such attention on both sides."""
    return Host(
        name,
        lambda slopes: Alibi(slopes, padded),
        lambda te, slopes: Alibi(slopes, padded),
        normal(*[(2, SEQ, 6, 16)] * 3),
        dict(slopes=slopes),
    )


ALIBI = against_te("alibi", Alibi, (6, 16, 16), bias=alibi(OWN_SLOPES))
PADDED_LEFT = of_slopes("alibi_padded_on_the_left", OWN_SLOPES, slice(0, 5))
PADDED_RIGHT = of_slopes("alibi_padded_on_the_right", OWN_SLOPES, slice(SEQ - 5, SEQ))
SCALED = of_slopes("alibi_scaled_with_scores", PAPERS / 4)  # as in Falcon

# Numbers of heads into which TE's attention splits the results of the same linear layers.

WIDTH = 128


class Grouped(nn.Module):
    """Causal attention with grouped keys, by TE's attention if ``te`` is given."""

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
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def of_heads(name: str, layers: int, heads: int, groups: int) -> Host:
    return Host(
        name,
        lambda **shape: Stack(*(Grouped(nn.Linear, **shape) for _ in range(layers))),
        lambda te, **shape: Stack(*(Grouped(te.Linear, te=te, **shape) for _ in range(layers))),
        normal((2, 32, WIDTH)),
        dict(heads=heads, groups=groups),
    )


EIGHT, GROUPS = of_heads("eight_heads", 1, 8, 8), of_heads("heads_in_groups", 2, 8, 2)

# Caps of scores and of logits by tanh.


class CappedScores(nn.Module):
    """Causal attention whose scores are capped."""

    def __init__(self, softcap: float) -> None:
        super().__init__()
        self.softcap = softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = capped(query @ key.mT / math.sqrt(KEY_DIM), self.softcap)
        hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


UNCAPPED_SCORES, CAPPED_SCORES = (
    Host(name, CappedScores, lambda te, softcap: CappedScores(softcap), normal(*[(2, 2, SEQ, KEY_DIM)] * 3), settings)
    for name, settings in (("uncapped_scores", dict(softcap=math.inf)), ("capped_scores", dict(softcap=8.0)))
)
UNCAPPED, CAPPED = decoder("decoder_uncapped", loss=False), decoder("decoder_capped", loss=False, logits_cap=5.0)

# A decoding step with a cache of keys and values.

CACHED = 12


class Decoding(nn.Module):
    """Attention to cached keys and a step's own, which may be missing, where old keys are lost or positions are off."""

    def __init__(self, linear: Any, position: int = 0, late: bool = False, lost: int = 0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.position, self.late, self.lost = position, late, lost

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        positions = torch.arange(CACHED, CACHED + tokens) + self.position
        q, k = (turned(one, frequencies(), positions) for one in (q, k))
        if not self.late:
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        keys, values = keys[:, :, self.lost :], values[:, :, self.lost :]
        scores = q @ keys.transpose(-1, -2) / math.sqrt(HEAD_DIM)
        if tokens > 1 and not self.late:
            later = torch.ones(tokens, keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - tokens + 1)
            scores = scores.masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


ONE_TOKEN, FOUR_TOKENS = (
    twins(Decoding, normal((4, tokens, HIDDEN), *[(4, HEADS, CACHED, HEAD_DIM)] * 2), f"step_of_{tokens}")
    for tokens in (1, 4)
)

# Attention that is nearly uniform: its scale shows only in the gradients of queries and keys.


class Uniform(nn.Module):
    """Residual attention with a small scale, as in Granite."""

    def __init__(self, linear: Any, scale: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        made = (layer(x) for layer in (self.query, self.key, self.value))
        query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in made)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return x + self.out(y.transpose(1, 2).flatten(2))


UNIFORM, SCALED_ONCE = (
    twins(Uniform, normal((2, SEQ, HIDDEN)), name, settings=dict(scale=scale))
    for name, scale in (("uniform", 1 / 64), ("scaled_once", 0.11))
)

PORTS = (
    *(
        host.right()
        for host in (BY_KEY, FLAT, NARROW, LEARNT, ALIBI, EIGHT, GROUPS, CAPPED_SCORES, CAPPED, ONE_TOKEN, FOUR_TOKENS)
    ),
    BY_KEY.wrong("attention-bias", name="no bias", bias={}),
    BY_KEY.wrong("attention-bias", name="three times the bias", bias=alibi(3 * SLOPES)),
    FLAT.wrong("attention-bias", name="no bias", bias={}),
    NARROW.wrong("softmax-scale", softmax_scale=VALUE_DIM**-0.5),
    NO_SINKS.wrong("softmax-sink", name="no sinks"),
    NO_SINKS.wrong("softmax-sink", softmax_type="off-by-one"),
    SINKS.wrong(
        "softmax-sink",
        "the port has them in the reverse order of heads.",
        name="in reverse",
        sinks_as=lambda sinks: sinks.flip(0),
    ),
    SINKS.wrong("softmax-sink", "the port's are 0.5 times that.", name="halved", sinks_as=lambda sinks: 0.5 * sinks),
    SINKS.wrong(
        "softmax-sink",
        "the port negates them, in head 1.",
        name="one negated",
        sinks_as=lambda sinks: sinks * torch.tensor([1.0, -1.0]),
    ),
    DIVIDED.wrong("softmax-scale", f"the port's is {OF_LAYER_12:.4g}", softmax_scale=OF_LAYER_12),
    ALIBI.wrong(
        "attention-bias",
        "alibi_slopes; the port has the paper's, which are its default",
        name="default slopes",
        bias=alibi(),
    ),
    ALIBI.wrong(
        "attention-bias",
        "the port has the first 6 of 24 heads'",
        name="slopes of 24 heads",
        bias=alibi(papers_slopes(24)[:6].float()),
    ),
    ALIBI.wrong(
        "attention-bias",
        "the port has those of 3 heads, repeated",
        name="slopes of 3 heads",
        bias=alibi(papers_slopes(3).repeat(2).float()),
    ),
    *(
        host.wrong(
            "attention-bias", "the port has the paper's, which are its default", name="paper's slopes", slopes=PAPERS
        )
        for host in (PADDED_LEFT, PADDED_RIGHT)
    ),
    SCALED.wrong(
        "attention-bias",
        "the port has the same in descending order",
        name="sorted slopes",
        slopes=PAPERS.sort(descending=True).values / 4,
    ),
    SCALED.wrong("attention-bias", "the port has 2^(-8 i / 6)", name="geometric slopes", slopes=OWN_SLOPES / 4),
    EIGHT.wrong("head-count", "num_attention_heads=8, as the reference has; the port has 2", heads=2, groups=2),
    GROUPS.wrong("head-count", "num_attention_heads=8, as the reference has; the port has 4", heads=4, groups=1),
    GROUPS.wrong("head-count", "num_attention_heads=8, as the reference has; the port has 16", heads=16, groups=4),
    UNCAPPED.wrong("softcap", "leave activations uncapped, as the reference does; they are", logits_cap=3.0),
    CAPPED.wrong("softcap", "cap activations at 5 by tanh, as the reference does; they are", logits_cap=3.0),
    CAPPED.wrong(
        "softcap",
        "cap activations at 5 by tanh, as the reference does; none are",
        logits_cap=math.inf,
        precisions=("fp32",),
    ),
    UNCAPPED_SCORES.wrong(
        "softcap", "leave the scores uncapped as the reference does, softcap=0.0 in TE;", softcap=1.0
    ),
    CAPPED_SCORES.wrong("softcap", "as the reference does, softcap=8; the port has", softcap=1.0),
    ONE_TOKEN.wrong("rope-position", position=1),
    ONE_TOKEN.wrong("cache-step", late=True, others=True),
    FOUR_TOKENS.wrong("rope-position", position=-CACHED),
    FOUR_TOKENS.wrong("cache-step", lost=1),
    UNIFORM.wrong(
        "softmax-scale",
        "softmax_scale=0.01562, 1/sqrt(4096), as the reference has",
        scale=0.25,
        precisions=("fp8_current",),
    ),
    SCALED_ONCE.wrong(
        "softmax-scale",
        "the port's is its square, 0.0121, as if both queries and scores were scaled",
        scale=0.11**2,
        precisions=("bf16", "fp8_current"),
    ),
)
