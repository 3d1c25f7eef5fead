"""Losses: a single number, and gradients that show a mistake in the loss or in the model before it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, decoders, in_turn, tells, tells_only, twins
from torch import Tensor, nn

import parity
from lab.corpus.decoder import HIDDEN, Options, frequencies
from parity.case.case import Rng

# A language model's last layer and its loss.

BATCH, SEQ, CLASSES, IGNORED, PAD = 4, 24, 48, -100, 0


class Model(nn.Module):
    """A language model's last layer and its loss, ``loss(logits, labels)``."""

    def __init__(self, linear: Any, loss: Any) -> None:
        super().__init__()
        self.head, self.loss = linear(HIDDEN, CLASSES, bias=False), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(x), labels)


def shifted(logits: Tensor, labels: Tensor, first: int = 0, label: int = 1, **arguments: Any) -> Tensor:
    """Return the loss of the logits from position ``first`` on against the labels from position ``label`` on."""
    count = SEQ - max(first, label)
    x = logits[:, first : first + count].flatten(0, 1)
    x = x.float() if x.dtype is not torch.float64 else x
    return F.cross_entropy(x, labels[:, label : label + count].reshape(-1), **arguments)


def of(**arguments: Any) -> Any:
    return lambda logits, labels: shifted(logits, labels, **arguments)


def ahead(*labels: int) -> Any:
    """Return the sum of the losses of tokens this many positions ahead, as in models with several heads."""
    return lambda *x: sum(shifted(*x, label=label) for label in labels)


def padded(ignored: int) -> Any:
    """Return the loss that ignores a label, computed on labels whose ignored entries are the padding token."""
    return lambda logits, labels: shifted(logits, labels.clamp(min=PAD), ignore_index=ignored)


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).transpose(1, 2), labels)


def mean_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    losses = shifted(logits, labels, reduction="none").view(BATCH, -1)
    return (losses.sum(1) / (labels[:, 1:] != IGNORED).sum(1)).mean()


def across_rows(logits: Tensor, labels: Tensor, further: int = 1) -> Tensor:
    """Return the loss of rows that are packed without padding, whose last tokens have the next row's first label."""
    ends = [int((row != IGNORED).nonzero().max()) + 1 for row in labels]
    x, y = (torch.cat([row[:end] for row, end in zip(rows, ends, strict=True)]) for rows in (logits, labels))
    return F.cross_entropy(x[:-further].float(), y[further:])


def over_all(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(logits, labels, reduction="none").mean()


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    counts = (labels[:, 1:] != IGNORED).float()
    extra = logits[:, :-1].float().logsumexp(-1).square()
    return shifted(logits, labels) + 1e-3 * (extra * counts).sum() / counts.sum()


def heads(reference: Any, port: Any, inputs: Any, precision: str) -> parity.Result:
    return compared(lambda: Model(nn.Linear, reference), lambda te: Model(te.Linear, port), inputs, precision)


def of_all_kinds(rng: Rng) -> tuple[Tensor, Tensor]:
    """Return activations and labels, some of them ignored and some the padding token's."""
    labels = rng.integers(BATCH, SEQ, high=CLASSES)
    labels[0, 9:], labels[1, 3:7], labels[2, 5:15] = IGNORED, IGNORED, PAD
    return 3.0 * rng.normal(BATCH, SEQ, HIDDEN), labels


@in_turn(
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
        (ahead(1, 2), ahead(0, 1), "labels-shifted"),
        (of(), across_rows, "labels-shifted"),
        (ahead(2), lambda *x: across_rows(*x, further=2), "labels-shifted"),
        (of(), z_loss, "z-loss"),
    ],
)
def test_what_is_wrong_with_a_loss_is_told(reference, port, title, precision):
    tells_only(heads(reference, port, of_all_kinds, precision), title)


def test_a_padding_label_that_counts_is_told_by_its_own_number():
    def inputs(rng: Rng) -> tuple[Tensor, Tensor]:
        labels = rng.integers(BATCH, SEQ, low=3, high=CLASSES)  # no label that another tokenizer pads with
        labels[0, 9:] = PAD
        return rng.normal(BATCH, SEQ, HIDDEN), labels

    result = heads(padded(PAD), padded(IGNORED), inputs, "fp32")
    tells_only(result, "ignored-label", "leave out tokens whose label is 0, as the reference does")


def test_a_factor_of_no_known_average_is_told_as_a_number():
    inputs = lambda rng: (rng.normal(BATCH, SEQ, HIDDEN), rng.integers(BATCH, SEQ, high=CLASSES))  # noqa: E731
    result = heads(of(), lambda *x: shifted(*x) / 3, inputs, "bf16")
    tells_only(result, "loss-scale")
    assert result.findings[0].message.startswith("output and every gradient are 1/3 times what they should be")


# Labels of a whole model that are counted but should not be, or are smoothed by another number.


class Classifier(nn.Module):
    """Map ids to logits, and return the mean loss of the labels that count."""

    def __init__(self, linear: Any, loss: Any = F.cross_entropy) -> None:
        super().__init__()
        self.tokens, self.up, self.head = nn.Embedding(64, 48), linear(48, 48), linear(48, 64)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        logits = self.head(F.silu(self.up(x + x.cumsum(1) / 15)))
        logits = logits.float() if logits.dtype is torch.bfloat16 else logits  # a sum of losses is large
        return self.loss(logits.flatten(0, 1), labels.flatten())


def smoothed(logits: Tensor, labels: Tensor, by: float = 0.1) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=by)


@in_turn(
    ("right", "port", "title", "phrase"),
    [
        (F.cross_entropy, F.cross_entropy, "passed", ""),
        (
            F.cross_entropy,
            lambda logits, labels: F.cross_entropy(logits, labels.clamp(min=0)),
            "ignored-label",
            "leave out tokens whose label is -100, as the reference does (ignore_index); the port counts "
            "them as class 0.",
        ),
        (
            F.cross_entropy,
            lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum") / labels.numel(),
            "loss-scale",
            "the port's is the mean over all tokens, those that do not count included.",
        ),
        (smoothed, lambda *x: smoothed(*x, by=0.2), "label-smoothing", "the port smooths them by 0.2."),
    ],
)
def test_labels_that_should_not_count_or_are_smoothed_more_are_told(right, port, title, phrase, precision):
    def inputs(rng: Rng) -> tuple[Tensor, Tensor]:
        ids = 1 + rng.integers(2, 15, high=62)
        return ids, torch.where(torch.arange(15) % 3 == 0, -100, rng.integers(2, 15, high=64))

    tells(twins(Classifier, dict(loss=port), inputs, precision, right=dict(loss=right)), title, phrase)


# Mistakes of a decoder before its loss, which hardly shows them in BF16.

SCALED = math.sqrt(HIDDEN)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8_current"])
def test_a_right_decoder_passes(precision):
    assert decoders(Options(), precision).passed


@pytest.mark.parametrize(
    ("reference", "port", "title", "precision"),
    [
        *((Options(), dict(reduction="sum"), "loss-scale", precision) for precision in ("bf16", "fp8_current")),
        (Options(embedding=SCALED), dict(embedding=1.0), "factor", "fp8_current"),
        (Options(), dict(embedding=SCALED), "factor", "bf16"),
        (Options(embedding=SCALED), dict(embedding=float(HIDDEN)), "factor", "fp32"),
        (Options(layers=2), dict(scales=(1.0, 0.5)), "softmax-scale", "bf16"),
        (Options(), dict(mlp_sum=False), "residual-placement", "bf16"),
        (Options(), dict(from_norm=True), "residual-placement", "fp8_current"),
    ],
)
def test_a_mistake_behind_a_loss_is_told(reference, port, title, precision):
    tells(decoders(reference, precision, **port), title)


def test_another_base_is_told_by_gradients_alone():
    result = decoders(Options(), "bf16", seq=32, frequency=lambda: frequencies(500_000.0))
    assert all(tensor.passed for tensor in result.tensors if tensor.kind == "output")
    tells(result, "rope-base")


def test_no_mistake_is_told_of_a_single_number_alone():
    """If nothing explains the gradients, a mistake that reproduces the loss is not reported."""
    result = decoders(Options(), "fp32", shift=3, scales=(1.7,), embedding=3.0, branch=0.3)
    assert result.status == "failed"
    assert {finding.code for finding in result.findings} <= {"PAR501", "PAR502"}
