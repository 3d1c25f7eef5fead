"""In which order mistakes are tried, since a budget may not last for all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import tensor
from torch import nn

from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.weight_maps import weight_hypotheses
from parity.passes.nominal_clock import Clock
from parity.search.failure import Budget, while_it_lasts
from parity.search.search import _nearest_first


def test_where_gradients_alone_tell_mistakes_without_a_place_come_first_then_those_near_the_worst_gradient():
    module = nn.Identity()
    far, near, everywhere, with_decimals = (
        Hypothesis("title", name, "", module)
        for name in ("exchanged layers.0.q.weight", "layers.1.v scaled", "window", "norm eps=0.0001")
    )
    results = [tensor(margin=0.1), tensor("layers.1.v.weight", "weight gradient", margin=9.0)]
    golden = {("output", "output"): torch.zeros(2, 64)}
    prepared = SimpleNamespace(golden=SimpleNamespace(outputs={"output": torch.zeros(2, 64)}))
    failed: Any = SimpleNamespace(results=results, outputs=results[:1], golden=golden, prepared=prepared)
    assert _nearest_first(failed, [far, near, everywhere, with_decimals]) == [everywhere, with_decimals, near, far]


@pytest.mark.parametrize(
    ("one", "other", "scope"),
    [
        ("layers.0.q.weight", "layers.0.o.weight", "all"),
        ("layers.0.q.weight", "layers.1.q.weight", "all"),
        ("layers.0.q.weight", "layers.1.o.weight", "call"),
    ],
)
def test_an_exchange_of_two_kinds_of_parameters_in_two_layers_is_tried_last(one, other, scope):
    shapes = dict.fromkeys((one, other), (8, 8))
    found = weight_hypotheses({one: one, other: other}, shapes, shapes, None, nn.Identity())
    assert [each.scope for each in found if each.title == "parameters-exchanged"] == [scope]


def test_what_one_share_of_a_budget_does_not_last_for_is_left_for_another():
    budget, left = (
        Budget.of(Clock(), 1e9),
        iter([(Hypothesis("title", name, "", nn.Identity()),) for name in ("one", "other")]),
    )
    assert list(while_it_lasts(left, budget.share(0.0))) == []
    assert [one.name for (one,) in while_it_lasts(left, budget)] == ["one", "other"]
    assert not budget.exceeded
