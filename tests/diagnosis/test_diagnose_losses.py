"""Mistakes with a module that returns a loss: one number, and gradients that tell what is wrong with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parity

BATCH, SEQ, HIDDEN, CLASSES, IGNORED, PAD = 4, 24, 64, 48, -100, 0


class Model(nn.Module):
    """A language model's last layer and its loss, ``loss(logits, labels)``."""

    def __init__(self, linear, loss) -> None:
        super().__init__()
        self.head, self.loss = linear(HIDDEN, CLASSES, bias=False), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(x), labels)


def shifted(logits: Tensor, labels: Tensor, first: int = 0, label: int = 1, **arguments) -> Tensor:
    """Position ``first`` meets ``label``, and so on."""
    count = SEQ - max(first, label)
    x = logits[:, first : first + count].flatten(0, 1)
    x = x.float() if x.dtype is not torch.float64 else x
    return F.cross_entropy(x, labels[:, label : label + count].reshape(-1), **arguments)


def of(**arguments):
    return lambda logits, labels: shifted(logits, labels, **arguments)


def padded(ignored: int):
    """Every label that does not count is the padding token's; ``ignored`` is ignored."""
    return lambda logits, labels: shifted(logits, labels.clamp(min=PAD), ignore_index=ignored)


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).transpose(1, 2), labels)


def mean_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    losses = shifted(logits, labels, reduction="none").view(BATCH, -1)
    return (losses.sum(1) / (labels[:, 1:] != IGNORED).sum(1)).mean()


def over_all(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(logits, labels, reduction="none").mean()


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    counts = (labels[:, 1:] != IGNORED).float()
    extra = logits[:, :-1].float().logsumexp(-1).square()
    return shifted(logits, labels) + 1e-3 * (extra * counts).sum() / counts.sum()


def found(reference, port, precision: str):
    def inputs(rng, batch):
        labels = rng.integers(batch, SEQ, high=CLASSES)
        labels[0, 9:], labels[1, 3:7], labels[2, 5:15] = IGNORED, IGNORED, PAD
        return 3.0 * rng.normal(batch, SEQ, HIDDEN), labels

    def factory(te, **_):
        return parity.Pair(
            Model(nn.Linear, reference), Model(te.Linear, port), inputs, weights={"head.weight": "head.weight"}
        )

    (result,) = parity.compare(parity.Case("loss", factory, sizes=(dict(batch=BATCH),)), [precision])
    return [finding.title for finding in result.findings] if result.status == "failed" else [result.status]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("reference", "port", "title"),
    [
        (of(), of(), "passed"),
        (of(), of(reduction="sum"), "loss-scale"),
        (of(reduction="sum"), of(), "loss-scale"),
        (of(), over_all, "loss-scale"),
        (of(), mean_of_means, "loss-scale"),
        (of(), lambda *x: shifted(*x) / 3, "loss-scale"),
        (log_probabilities, lambda *x: 7 * log_probabilities(*x), "loss-scale"),
        (of(label_smoothing=0.1), of(), "label-smoothing"),
        (of(), of(label_smoothing=0.1), "label-smoothing"),
        (padded(PAD), padded(IGNORED), "ignored-label"),
        (of(), of(label=0), "labels-shifted"),
        (of(), of(first=1, label=0), "labels-shifted"),
        (of(), of(label=2), "labels-shifted"),
        (log_probabilities, of(), "labels-shifted"),
        (of(), z_loss, "z-loss"),
    ],
)
def test_what_is_wrong_with_a_loss_is_found(reference, port, title, precision):
    assert found(reference, port, precision) == [title]


def test_a_padding_label_that_counts_is_told_by_its_own_number():
    def inputs(rng, batch):
        labels = rng.integers(batch, SEQ, low=3, high=CLASSES)  # none that another tokenizer pads with
        labels[0, 9:] = PAD
        return rng.normal(batch, SEQ, HIDDEN), labels

    def factory(te, **_):
        weights = {"head.weight": "head.weight"}
        return parity.Pair(Model(nn.Linear, padded(PAD)), Model(te.Linear, padded(IGNORED)), inputs, weights)

    (result,) = parity.compare(parity.Case("loss", factory, sizes=(dict(batch=BATCH),)), ["fp32"])
    (finding,) = result.findings
    assert "leave out tokens whose label is 0, as the reference does" in finding.message


def test_a_factor_of_no_known_average_is_told_as_a_number():
    def factory(te, **_):
        return parity.Pair(
            Model(nn.Linear, of()),
            Model(te.Linear, lambda *x: shifted(*x) / 3),
            lambda rng, batch: (rng.normal(batch, SEQ, HIDDEN), rng.integers(batch, SEQ, high=CLASSES)),
            weights={"head.weight": "head.weight"},
        )

    (result,) = parity.compare(parity.Case("third", factory, sizes=(dict(batch=BATCH),)), ["bf16"])
    (finding,) = result.findings
    assert finding.message.startswith("output and every gradient are 1/3 times what they should be")
