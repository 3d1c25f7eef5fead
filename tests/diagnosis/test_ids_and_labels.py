"""Token ids and labels that a port takes otherwise: ids off by one or a position, labels that should not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

VOCABULARY, HIDDEN, BATCH, SEQ = 64, 48, 2, 15

Ids = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, linear: Any, ids: Ids, loss: Loss) -> None:
        super().__init__()
        self.tokens, self.up, self.head = (
            nn.Embedding(VOCABULARY, HIDDEN),
            linear(HIDDEN, HIDDEN),
            linear(HIDDEN, VOCABULARY),
        )
        self.ids, self.loss = ids, loss

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.tokens(self.ids(ids))
        logits = self.head(F.silu(self.up(x + x.cumsum(1) / SEQ)))
        if labels is None:
            return logits
        logits = logits.float() if logits.dtype is torch.bfloat16 else logits  # a sum of losses is large
        return self.loss(logits.flatten(0, 1), labels.flatten())


def found(precision: str, ids: Ids = lambda ids: ids, loss: Loss | None = None) -> tuple[str, str]:
    """Title and message of the first finding; the status where the comparison did not fail."""

    def inputs(rng: Any) -> Any:
        given = 1 + rng.integers(BATCH, SEQ, high=VOCABULARY - 2)
        labels = torch.where(torch.arange(SEQ) % 3 == 0, -100, rng.integers(BATCH, SEQ, high=VOCABULARY))
        return (given, labels) if loss else given

    def factory(te: Any, **_: Any) -> parity.Pair:
        plain, port = Model(nn.Linear, lambda ids: ids, F.cross_entropy), Model(te.Linear, ids, loss or F.cross_entropy)
        return parity.Pair(plain, port, inputs, weights={name: name for name, _ in plain.named_parameters()})

    (one,) = parity.compare(parity.Case("model", factory, sizes=({},)), [precision])
    return (one.findings[0].title, one.findings[0].message) if one.status == "failed" else (one.status, "")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (lambda ids: ids + 1, "they are off by +1"),
        (lambda ids: ids - 1, "they are off by -1"),
        (lambda ids: ids.roll(1, -1), "it is that of the position before"),
        (lambda ids: ids.roll(-1, -1), "it is that of the position after"),
        (lambda ids: F.pad(ids, (1, 0))[:, :-1], "it is that of the position before, 0 for the first"),
    ],
)
def test_other_ids_are_told(ids, told, precision):
    title, message = found(precision, ids)
    assert title == "embedding-position"
    assert message.endswith(told)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("loss", "title", "told"),
    [
        (
            lambda logits, labels: F.cross_entropy(logits, labels.clamp(min=0)),
            "ignored-label",
            "leave out tokens whose label is -100, as the reference does (ignore_index); they count as class 0",
        ),
        (
            lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum") / labels.numel(),
            "loss-scale",
            "it is the mean over all tokens, those that do not count included",
        ),
    ],
)
def test_labels_that_should_not_count_and_do_are_told(loss, title, told, precision):
    found_title, message = found(precision, loss=loss)
    assert found_title == title
    assert message.endswith(told)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [None, F.cross_entropy])
def test_the_same_ids_and_labels_pass(loss, precision):
    assert found(precision, loss=loss)[0] == "passed"
