"""Two mistakes in one model, of which neither explains it alone, are reported together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import parity
from lab.corpus.models import Mistake, port
from parity.mistakes.hypothesis import Hypothesis, together
from parity.search.screen import Effects
from parity.trace.trace import Changed, Edit

NOT_ROTATED = dict(rotates_queries=False, rotates_keys=False)


@pytest.mark.parametrize(
    ("layers", "precision", "mistakes", "told"),
    [
        (1, "fp32", dict(causal=False, scaled_by=1.0), {"mask", "softmax-scale"}),
        (1, "fp32", dict(base=1e6, activation="geglu"), {"rope-base", "activation"}),
        (2, "bf16", dict(causal=False, groups_interleaved=True), {"mask", "gqa-head-order"}),
        (2, "bf16", dict(gate_last=True, **NOT_ROTATED), {"rope-missing", "gate-up-swapped"}),
        (2, "bf16", dict(residual_from_norm=True, interleaved=True), {"residual-placement", "rope-layout"}),
        (1, "fp32", dict(interleaved=True, logits_divided=2.0), {"rope-layout", "output-scale"}),
    ],
)
def test_both_mistakes_are_told(layers, precision, mistakes, told):
    (result,) = parity.compare(port("llama", Mistake(mistakes), layers), [precision])
    assert {finding.title for finding in result.findings} >= told, result.findings


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


@pytest.mark.parametrize(
    ("in_error", "alone", "found"),
    [
        ((1.0, 1.0), (1.0, 1.0), "as_they_are"),
        ((0.2, -3.0), (1.0, 1.0), "by_multiples"),  # effects need not have the sizes that they have alone
        ((1e4, 10.0), (1e4, 20.0), "by_multiples"),  # nor be of like size
    ],
)
def test_the_likeliest_pair_is_the_one_whose_effects_add_up_to_the_error(in_error, alone, found):
    known = [named(str(i)) for i in range(20)]
    effects = [torch.randn(500, generator=torch.Generator().manual_seed(i)) for i in range(20)]
    seen = Effects.of([in_error[0] * effects[3] + in_error[1] * effects[11]])
    effects[3], effects[11] = alone[0] * effects[3], alone[1] * effects[11]
    for one, effect in zip(known, effects, strict=True):
        seen.note(one, [effect])
    pairs = getattr(seen.likely_pairs(known, 4, lambda one, other: True), found)
    assert pairs[0] == (known[3], known[11])


def test_large_tensors_are_known_by_a_sample_that_is_not_of_one_column():
    column, row = torch.zeros(512, 512), torch.zeros(512, 512)
    column[:, 0], row[7] = 1.0, 1.0
    by_column, by_row = named("column"), named("row")
    seen = Effects.of([column + row])
    for one, effect in ((by_column, column), (by_row, row), (named("both"), row - column)):
        seen.note(one, [effect])
    pairs = seen.likely_pairs(list(seen.known), 4, lambda one, other: True)
    assert pairs.as_they_are[0] == (by_column, by_row)


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
