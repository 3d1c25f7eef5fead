"""Embeddings whose padding row gets no gradient on one side alone."""

from __future__ import annotations

import pytest
from torch import nn

import parity

ROWS, WIDTH, PADDING = 32, 64, 3


class Model(nn.Module):
    """Looks tokens up, with a padding row or without one; logits read the table too, where it is tied."""

    def __init__(self, linear, padding_idx, tied):
        super().__init__()
        self.table, self.layer, self.tied = nn.Embedding(ROWS, WIDTH, padding_idx), linear(WIDTH, WIDTH), tied

    def forward(self, ids):
        x = self.layer(self.table(ids))
        return nn.functional.linear(x, self.table.weight) if self.tied else x


def findings(reference, candidate, precision="bf16", tied=False):
    def factory(te, **_):
        model = Model(nn.Linear, reference, tied)
        return parity.Pair(
            model,
            Model(te.Linear, candidate, tied),
            weights={name: name for name, _ in model.named_parameters()},
            inputs=lambda rng, batch, seq: rng.integers(batch, seq, high=ROWS),
        )

    (result,) = parity.compare(parity.Case("looked_up", factory, sizes=(dict(batch=4, seq=32),)), [precision])
    return [(finding.title, finding.message) for finding in result.findings] or result.status


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_padding_row_that_the_port_lacks_is_named(precision, tied):
    assert findings(PADDING, PADDING, precision, tied) == "passed"
    ((title, message),) = findings(PADDING, None, precision, tied)
    assert title == "padding-row"
    assert f"give the embedding of table.weight padding_idx={PADDING}" in message


@pytest.mark.parametrize("tied", [False, True])
def test_a_padding_row_that_the_port_alone_has_is_named(tied):
    ((title, message),) = findings(None, PADDING, tied=tied)
    assert title == "padding-row"
    assert f"leave out padding_idx={PADDING} of the embedding of table.weight" in message
