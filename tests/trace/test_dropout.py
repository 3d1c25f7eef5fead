"""Dropout is switched off and on again, and each call that drops is recorded with its tensor and generator state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parity.trace.digests import recorded, switched_off


class Layer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.inner, self.hidden_dropout, self.call = nn.Dropout(0.25), 0.1, call

    def forward(self, x):
        return self.call(self, x)


def attend(module, x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=module.hidden_dropout)


CALLS = {
    "a module": (lambda module, x: module.inner(x), [("dropout", "inner (Dropout)")]),
    "a function": (lambda module, x: F.dropout(x, module.hidden_dropout), [("dropout", "the module (Layer)")]),
    "attention": (attend, [("scaled_dot_product_attention", "the module (Layer)")]),
    "twice": (lambda module, x: module.inner(module.inner(x)), [("dropout", "inner (Dropout)")] * 2),
    "nothing": (lambda module, x: 2 * x, []),
    "numbers drawn for something else": (lambda module, x: x + torch.randn(x.shape), []),
}


@pytest.mark.parametrize(("call", "dropped"), CALLS.values(), ids=CALLS)
def test_calls_that_drop_are_recorded_with_their_module(call, dropped):
    layer = Layer(call)
    with recorded(layer) as drops:
        layer(torch.ones(1, 2, 8, 4))
    assert [(one.function, one.module) for one in drops.made] == dropped


def test_a_call_is_known_by_its_tensor_and_by_the_generator_s_state():
    layer, x = Layer(CALLS["a module"][0]), torch.ones(8, 8)

    def drop(x, seed):
        torch.manual_seed(seed)
        with recorded(layer) as drops:
            layer(x)
        return drops.made[0]

    first = drop(x, 1)
    assert drop(x, 1) == first
    assert (drop(x, 2).given == first.given, drop(x, 2).state == first.state) == (True, False)
    assert (drop(2 * x, 1).given == first.given, drop(2 * x, 1).state == first.state) == (False, True)


def test_dropout_that_is_switched_off_draws_nothing_until_it_is_restored():
    layer = Layer(lambda module, x: F.dropout(module.inner(x), module.hidden_dropout))
    off = switched_off(layer)
    assert {one.name: one.value for one in off} == {"hidden_dropout": 0.1, "inner.p": 0.25}
    with recorded(layer) as drops:
        layer(torch.ones(8))
        assert drops.made == []
        for one in off:
            one.restore()
        layer(torch.ones(8))
    assert len(drops.made) == 2
