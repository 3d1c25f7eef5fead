"""Two mistakes in one model, of which neither explains it alone, are reported together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared
from torch import Tensor, nn

from parity.mistakes.hypothesis import Hypothesis, together
from parity.search.screen import Effects
from parity.trace.trace import Changed, Edit

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD_DIM, FFN = 96, 64, 4, 2, 16, 128
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


@dataclass(frozen=True)
class Options:
    layers: int = 1
    base: float = 1e4
    activation: str = "silu"
    causal: bool = True
    scale: float = 1.0
    eps: float = 1e-6
    rotated: bool = True
    interleaved: bool = False
    swapped: bool = False
    repeated: bool = False
    residual: bool = True
    embedding: float = 2.0
    logits: float = 1.0


def rotated(x: Tensor, base: float, interleaved: bool) -> Tensor:
    angles = torch.arange(x.shape[-2]).double()[:, None] * base ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


class Layer(nn.Module):
    def __init__(self, linear: Any, norm: Any, options: Options) -> None:
        super().__init__()
        self.options = options
        self.norm1, self.norm2 = norm(WIDTH, eps=options.eps), norm(WIDTH, eps=options.eps)
        self.q, self.k, self.v = (linear(WIDTH, n * HEAD_DIM, bias=False) for n in (HEADS, GROUPS, GROUPS))
        self.out, self.down = linear(WIDTH, WIDTH, bias=False), linear(FFN, WIDTH, bias=False)
        self.gate, self.up = linear(WIDTH, FFN, bias=False), linear(WIDTH, FFN, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        o = self.options
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if o.rotated:
            q, k = (rotated(y, o.base, o.interleaved) for y in (q, k))
        times = HEADS // GROUPS
        k, v = (y.repeat(1, times, 1, 1) if o.repeated else y.repeat_interleave(times, 1) for y in (k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=o.causal, scale=o.scale / math.sqrt(HEAD_DIM))
        return self.out(context.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        gate, up = self.gate(self.norm2(x)), self.up(self.norm2(x))
        gate, up = (up, gate) if self.options.swapped else (gate, up)
        y = self.down(ACTIVATIONS[self.options.activation](gate) * up)
        return x + y if self.options.residual else y


class Model(nn.Module):
    def __init__(self, linear: Any, norm: Any, options: Options) -> None:
        super().__init__()
        self.options = options
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer(linear, norm, options) for _ in range(options.layers))
        self.norm = norm(WIDTH, eps=options.eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.options.embedding
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.options.logits


@pytest.mark.parametrize(
    ("layers", "precision", "mistakes", "told"),
    [
        (1, "fp32", dict(causal=False, scale=4.0), {"mask", "softmax-scale"}),
        (1, "fp32", dict(base=1e6, activation="gelu"), {"rope-base", "activation"}),
        (2, "bf16", dict(causal=False, repeated=True), {"mask", "gqa-head-order"}),
        (2, "bf16", dict(rotated=False, swapped=True), {"rope-missing", "gate-up-swapped"}),
        (2, "bf16", dict(residual=False, interleaved=True), {"residual-placement", "rope-layout"}),
        (1, "fp32", dict(interleaved=True, logits=0.5), {"rope-layout", "output-scale"}),
    ],
)
def test_both_mistakes_are_told(layers, precision, mistakes, told):
    result = compared(
        lambda: Model(nn.Linear, nn.RMSNorm, Options(layers)),
        lambda te: Model(te.Linear, te.RMSNorm, replace(Options(layers), **mistakes)),
        lambda rng: rng.integers(2, 16, high=VOCABULARY),
        precision,
    )
    assert {finding.title for finding in result.findings} >= told


# How changes are combined, and how the likeliest pairs are found.


class Operation:
    def edits(self, **changes: Any) -> tuple[Edit, ...]:
        return (Edit(("layer", 0, "softmax", 0), (), lambda was: changes, of=Changed(self, changes)),)


def test_changes_of_one_operation_are_made_at_once():
    one = Operation()
    (both,) = together(one.edits(scale=2.0), one.edits(mask=None))
    assert both.compute(None) == {"scale": 2.0, "mask": None}


def test_what_two_mistakes_change_alike_cannot_hold_at_once():
    one = Operation()
    assert together(one.edits(scale=2.0), one.edits(scale=3.0)) is None
    assert together(one.edits(scale=2.0), Operation().edits(mask=None)) is None


def test_elements_of_a_layout_are_changed_together_where_none_is_changed_twice():
    one = Operation()
    keys, queries = one.edits(arrange=(None, "keys")), one.edits(arrange=("queries", None))
    (both,) = together(keys, queries)
    assert both.compute(None) == {"arrange": ("queries", "keys")}
    assert together(keys, keys) is None


def named(name: str, **options: Any) -> Hypothesis:
    return Hypothesis("operation", name, "", **options)


def test_the_likeliest_pair_is_the_one_whose_effects_add_up_to_the_error():
    effects = {named(str(i)): torch.randn(500, generator=torch.Generator().manual_seed(i)) for i in range(20)}
    known = list(effects)
    error = effects[known[3]] + effects[known[11]]
    seen = Effects.of([error])
    for one, effect in effects.items():
        seen.note(one, [effect])
    assert seen.likely_pairs(known, 4, lambda one, other: True).as_they_are[0] == (known[3], known[11])


def test_large_tensors_are_known_by_a_sample_that_is_not_of_one_column():
    column, row = torch.zeros(512, 512), torch.zeros(512, 512)
    column[:, 0], row[7] = 1.0, 1.0
    by_column, by_row = named("column"), named("row")
    seen = Effects.of([column + row])
    for one, effect in ((by_column, column), (by_row, row), (named("both"), row - column)):
        seen.note(one, [effect])
    pairs = seen.likely_pairs(list(seen.known), 4, lambda one, other: True)
    assert pairs.as_they_are[0] == (by_column, by_row)


def test_effects_need_not_have_the_sizes_that_they_have_alone():
    effects = {named(str(i)): torch.randn(500, generator=torch.Generator().manual_seed(i)) for i in range(20)}
    known = list(effects)
    seen = Effects.of([0.2 * effects[known[3]] - 3.0 * effects[known[11]]])
    for one, effect in effects.items():
        seen.note(one, [effect])
    assert seen.likely_pairs(known, 4, lambda one, other: True).by_multiples[0] == (known[3], known[11])


def test_a_small_effect_beside_a_large_one_is_known():
    effects = {named(str(i)): torch.randn(500, generator=torch.Generator().manual_seed(i)) for i in range(20)}
    known = list(effects)
    large, small = 1e4 * effects[known[3]], 10.0 * effects[known[11]]
    seen = Effects.of([large + small])
    for one, effect in {**effects, known[3]: large, known[11]: 2.0 * small}.items():
        seen.note(one, [effect])
    assert seen.likely_pairs(known, 4, lambda one, other: True).by_multiples[0] == (known[3], known[11])


def test_a_mistake_with_another_constant_is_no_other_pair():
    constants = {named(f"times {value:g}", value=value): value for value in (0.5, 0.5001, 0.4999)}
    output, other, unrelated = (torch.randn(500, generator=torch.Generator().manual_seed(i)) for i in range(3))
    seen = Effects.of([0.5 * output + other])
    for one, value in constants.items():
        seen.note(one, [value * output])
    seen.note(named("other"), [other])
    seen.note(named("unrelated"), [unrelated])
    pairs = seen.likely_pairs(list(seen.known), 3, lambda one, other: True).as_they_are
    assert [{one.name for one in pair} for pair in pairs[:1]] == [{"times 0.5", "other"}]
    assert (
        sum("other" in {one.name for one in pair} and "unrelated" not in {one.name for one in pair} for pair in pairs)
        == 1
    )


def test_of_mistakes_that_do_the_same_the_likelier_is_told_and_single_calls_last():
    first, same, other = named("first"), named("same"), named("other")
    call = named("call", scope="call")
    effect, others = torch.arange(10.0), torch.arange(10.0).flip(0)
    seen = Effects.of([effect + others])
    for one, does in ((call, effect), (same, effect), (first, effect), (other, others)):
        seen.note(one, [does])
    pairs = seen.likely_pairs([call, first, same, other], 4, lambda one, other: True)
    assert pairs.as_they_are[0] == (first, other)


@pytest.mark.parametrize(
    ("first", "second", "factors", "left"),
    [
        (1.0, 1.0, (-0.4, 3.0), 0.0),
        (100.0, 1.0, (-0.004, 3.0), 0.0),
        (1.0, 0.0, (-0.4, 0.0), 0.99),  # a mistake without an effect explains nothing
        (1.0, math.inf, (0.0, 0.0), 1.0),  # nor does one whose effect overflows
    ],
)
def test_multiples_of_effects_tell_what_other_constants_would_explain(first, second, factors, left):
    output, other = torch.eye(500)[:2] * 500**0.5
    seen, both = Effects.of([-0.4 * output + 3.0 * other]), [named("first"), named("second")]
    for one, effect in zip(both, (first * output, second * other), strict=True):
        seen.note(one, [effect])
    found, rest = seen.multiples(both)
    assert (*found, rest) == pytest.approx((*factors, left), abs=0.005)
