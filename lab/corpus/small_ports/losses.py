"""Losses: a single number, and gradients that show a mistake in the loss or in the model before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.decoder import HIDDEN, decoder, frequencies
from lab.corpus.small import Host, twins
from parity.case.case import Rng

BATCH, SEQ, CLASSES, IGNORED, PAD = 4, 24, 48, -100, 0

Loss = Callable[[Tensor, Tensor], Tensor]  # maps logits [batch, seq, classes] and labels [batch, seq] to a number


class HeadWithLoss(nn.Module):
    """A language model's last layer and its loss."""

    def __init__(self, linear: Any, loss: Loss) -> None:
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


def of(**arguments: Any) -> Loss:
    return lambda logits, labels: shifted(logits, labels, **arguments)


def ahead(*steps: int) -> Loss:
    """Return the sum of the losses of tokens this many positions ahead, as in models with several heads."""
    return lambda logits, labels: torch.stack([shifted(logits, labels, label=step) for step in steps]).sum()


def padded(ignored: int) -> Loss:
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


def of_all_kinds(rng: Rng) -> tuple[Tensor, Tensor]:
    """Return activations and labels, some of them ignored and some the padding token's."""
    labels = rng.integers(BATCH, SEQ, high=CLASSES)
    labels[0, 9:], labels[1, 3:7], labels[2, 5:15] = IGNORED, IGNORED, PAD
    return 3.0 * rng.normal(BATCH, SEQ, HIDDEN), labels


def without_small_labels(rng: Rng) -> tuple[Tensor, Tensor]:
    """Return activations and labels, of which those of padding are the only ones that tokenizers pad with."""
    labels = rng.integers(BATCH, SEQ, low=3, high=CLASSES)
    labels[0, 9:] = PAD
    return rng.normal(BATCH, SEQ, HIDDEN), labels


def with_loss(name: str, loss: Loss, inputs: Callable[[Rng], Any] = of_all_kinds) -> Host:
    return twins(HeadWithLoss, inputs, f"loss_{name}", settings=dict(loss=loss))


MEAN, SUM = with_loss("mean", of()), with_loss("sum", of(reduction="sum"))
SMOOTHED = with_loss("smoothed", of(label_smoothing=0.1))
OF_LOG_PROBABILITIES = with_loss("of_log_probabilities", log_probabilities)
PADDED = with_loss("without_padding", padded(PAD), without_small_labels)
TWO_AHEAD, OF_TWO = with_loss("two_ahead", ahead(2)), with_loss("of_two", ahead(1, 2))
LEAVES_OUT = "leave out tokens whose label is"

OF_HEADS = (
    MEAN.right(),
    MEAN.wrong("loss-scale", "the port's is the sum over all tokens.", name="sum for mean", loss=of(reduction="sum")),
    SUM.wrong("loss-scale", "the port's is the mean over the tokens that count.", name="mean for sum", loss=of()),
    MEAN.wrong(
        "loss-scale", "the port's is the mean over all tokens, those that do not count included.", loss=over_all
    ),
    MEAN.wrong("loss-scale", "the mean of each sequence's mean.", loss=mean_of_means),
    MEAN.wrong(
        "loss-scale", "output and every gradient are 1/3 times what they should be", name="a third",
        loss=lambda *x: shifted(*x) / 3,
    ),
    OF_LOG_PROBABILITIES.wrong("loss-scale", name="seven times", loss=lambda *x: 7 * log_probabilities(*x)),
    SMOOTHED.wrong("label-smoothing", name="not smoothed", loss=of()),
    MEAN.wrong("label-smoothing", name="smoothed", loss=of(label_smoothing=0.1)),
    PADDED.wrong(
        "ignored-label", f"{LEAVES_OUT} 0, as the reference does", name="-100 for 0", loss=padded(IGNORED)
    ),
    MEAN.wrong(
        "ignored-label", f"{LEAVES_OUT} -100, as the reference does (ignore_index); the port counts them as class 0.",
        name="ignored labels counted", loss=lambda logits, labels: shifted(logits, labels.clamp(min=0)),
    ),
    MEAN.wrong("labels-shifted", "with its own label.", name="labels not shifted", loss=of(label=0)),
    MEAN.wrong(
        "labels-shifted", "with the label of the position before.", name="logits shifted", loss=of(first=1, label=0)
    ),
    MEAN.wrong("labels-shifted", name="labels shifted twice", loss=of(label=2)),
    OF_LOG_PROBABILITIES.wrong("labels-shifted", name="labels shifted", loss=of()),
    OF_TWO.wrong("labels-shifted", name="labels not shifted", loss=ahead(0, 1)),
    MEAN.wrong("labels-shifted", loss=across_rows),
    TWO_AHEAD.wrong("labels-shifted", name="across_rows", loss=partial(across_rows, further=2)),
    MEAN.wrong("z-loss", loss=z_loss),
)  # fmt: skip

# Mistakes of a decoder before its loss, which hardly shows them in BF16.

SCALED = math.sqrt(HIDDEN)
DECODER, LONG = decoder("decoder_with_loss"), decoder("longer_decoder_with_loss", seq=32)
OF_TWO_LAYERS = decoder("decoder_of_two_layers_with_loss", layers=2)
SCALED_EMBEDDING = decoder("decoder_of_scaled_embeddings_with_loss", embedding=SCALED)
FP8 = ("bf16", "fp8_current")

OF_DECODERS = (
    DECODER.right(precisions=("fp32", "bf16", "fp16", "fp8_current")),
    DECODER.wrong("loss-scale", reduction="sum", precisions=FP8),
    SCALED_EMBEDDING.wrong("factor", embedding=1.0, precisions=FP8),
    DECODER.wrong("factor", embedding=SCALED),
    SCALED_EMBEDDING.wrong("factor", embedding=float(HIDDEN)),
    OF_TWO_LAYERS.wrong("softmax-scale", scales=(1.0, 0.5)),
    DECODER.wrong("residual-placement", mlp_sum=False),
    DECODER.wrong("residual-placement", from_norm=True, precisions=FP8),
    # Gradients alone fail.
    LONG.wrong("rope-base", name="another base", frequency=lambda: frequencies(500_000.0)),
    # A mistake that reproduces the loss, but not the gradients, is not reported.
    DECODER.wrong("unexplained", others=True, precisions=("fp32",), shift=3, scales=(1.7,), embedding=3.0, branch=0.3),
)

PORTS = (*OF_HEADS, *OF_DECODERS)
