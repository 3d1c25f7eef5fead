"""Layers that stand in another order, compute twice, are told as one mistake."""

from __future__ import annotations

from typing import Any

import pytest
from language_model import BATCH, VOCABULARY, LanguageModel, Options
from torch import nn

import parity

LAYERS = 4


def found(order: tuple[int, ...], loop: tuple[int, ...] = (0, 1, 2, 3), precision: str = "bf16") -> parity.Finding:
    """Of a port whose layers are filled in this order, and called in that one."""

    def factory(te: Any, **_: Any) -> parity.Pair:
        options = Options(layers=LAYERS, loss=False)
        plain = LanguageModel(nn.Linear, lambda width: nn.RMSNorm(width, eps=1e-5), options)
        ported = LanguageModel(te.Linear, te.RMSNorm, options)

        def called(model: LanguageModel, ids: Any) -> Any:
            x = model.tokens(ids)
            for number in loop:
                x = model.layers[number](x)
            return model.head(model.norm(x))

        def right(name: str) -> str:
            parts = name.split(".")
            return ".".join([parts[0], str(order[int(parts[1])]), *parts[2:]]) if parts[0] == "layers" else name

        return parity.Pair(
            plain,
            ported,
            lambda rng, batch, seq: rng.integers(batch, seq, high=VOCABULARY),
            weights={name: right(name) for name, _ in plain.named_parameters()},
            call_candidate=called,
        )

    (one,) = parity.compare(parity.Case("layers", factory, sizes=(dict(batch=BATCH, seq=16),)), [precision])
    assert one.status == "failed"
    return one.findings[0]


@pytest.mark.parametrize(
    ("order", "held"),
    [
        ((3, 2, 1, 0), "3, 2, 1, 0"),
        ((1, 2, 3, 0), "3, 0, 1, 2"),
        ((2, 0, 3, 1), "1, 3, 0, 2"),
        ((1, 0, 2, 3), "1, 0, 2, 3"),
    ],
)
def test_layers_that_the_map_fills_in_another_order_are_told_with_that_order(order, held):
    finding = found(order)
    assert finding.title == "layers-permuted"
    assert finding.message.endswith(f"they hold its layers {held}")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8_current"])
def test_layers_that_are_called_in_reverse_are_told(precision):
    assert found((0, 1, 2, 3), loop=(3, 2, 1, 0), precision=precision).title == "layers-permuted"


def test_a_layer_that_computes_in_the_place_of_another_is_told():
    finding = found((0, 1, 2, 3), loop=(0, 1, 1, 3))
    assert finding.title == "layer-repeated"
    assert "call TE's layers.2; layers.1 computes" in finding.message
