"""A language model of one Llama layer with tied embeddings, returning logits or a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from parity.case.case import Pair, Rng
from parity.case.weight_map import Side, under
from parity.lab.zoo.hosts.case import host
from parity.lab.zoo.hosts.layer import LLAMA_WEIGHTS, te_llama_layer
from parity.reference import LlamaLayer

SMALL = dict(batch=2, seq=32, vocabulary=96, hidden=64, ffn=128, heads=4, groups=2)
LARGE = dict(batch=2, seq=128, vocabulary=256, hidden=256, ffn=512, heads=8, groups=2)
EMBEDDING_STD = 0.5
# Of labels that do not count, as in ``F.cross_entropy``.
IGNORED = -100


class Model(nn.Module):
    """Embeddings, a layer, a norm, and the embeddings again as output projection."""

    def __init__(self, vocabulary: int, hidden: int, ffn: int, heads: int, groups: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.tokens.weight, std=EMBEDDING_STD)
        self.layer = LlamaLayer(hidden, ffn, heads, groups)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``."""
        return F.linear(self.norm(self.layer(self.tokens(tokens))), self.tokens.weight)


class TEModel(nn.Module):
    """The same of TE's modules.

    Attributes:
        frequencies: from a length to RoPE's phases, ``[length, 1, 1, head_dim]``, FP32. No submodule, so that casting
            the model does not round the frequencies, as it did in TransformerEngine issue 1245.
        tie: from the embeddings to the output projection's weight.
        final_norm: from the last layer's output to what the output projection reads.
    """

    def __init__(self, te: ModuleType, vocabulary: int, hidden: int, ffn: int, heads: int, groups: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.frequencies = partial(te.RotaryPositionEmbedding(hidden // heads))
        self.layer = te_llama_layer(te, hidden, ffn, heads, groups)
        self.norm = te.RMSNorm(hidden)
        self.head = te.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.tie: Callable[[Tensor], Tensor] = lambda weight: weight
        self.final_norm: Callable[[Tensor], Tensor] = lambda x: self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes as ``Model``'s."""
        x = self.layer(self.tokens(tokens), rotary_pos_emb=self.frequencies(tokens.shape[1]))
        return functional_call(self.head, {"weight": self.tie(self.tokens.weight)}, (self.final_norm(x),))


class WithLoss(nn.Module):
    """A model whose output is its loss, ``[1]``.

    Attributes:
        reduce: from the losses of the tokens that count, ``[batch, seq]`` with 0 elsewhere, and where they are, to
            a number.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.reduce = mean_of_counted

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Both ``[batch, seq]``; labels that are ``IGNORED`` do not count."""
        logits = self.model(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return self.reduce(losses.view(labels.shape), labels != IGNORED).view(1)


def mean_of_counted(losses: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over the tokens that count."""
    return losses.sum() / counts.sum()


@host("tied_model", SMALL, LARGE)
def tied_model(te: ModuleType, vocabulary: int, hidden: int, ffn: int, heads: int, groups: int, **_: Any) -> Pair:
    return Pair(
        reference=Model(vocabulary, hidden, ffn, heads, groups),
        candidate=TEModel(te, vocabulary, hidden, ffn, heads, groups),
        weights=_weights(""),
        inputs=lambda rng, batch, seq: rng.integers(batch, seq, high=vocabulary),
    )


@host("model_with_loss", SMALL, LARGE)
def model_with_loss(te: ModuleType, vocabulary: int, hidden: int, ffn: int, heads: int, groups: int, **_: Any) -> Pair:
    def inputs(rng: Rng, batch: int, seq: int) -> tuple[Tensor, Tensor]:
        labels = rng.integers(batch, seq, high=vocabulary)
        lengths = torch.arange(1, batch + 1)[:, None] * seq // (batch + 1)
        return rng.integers(batch, seq, high=vocabulary), labels.masked_fill(torch.arange(seq) >= lengths, IGNORED)

    return Pair(
        reference=WithLoss(Model(vocabulary, hidden, ffn, heads, groups)),
        candidate=WithLoss(TEModel(te, vocabulary, hidden, ffn, heads, groups)),
        weights=_weights("model."),
        inputs=inputs,
    )


def _weights(prefix: str) -> dict[Side, Side]:
    """Return the map of a model whose parameters' names begin with a prefix."""
    return under(
        {**under(LLAMA_WEIGHTS, "layer."), "tokens.weight": "tokens.weight", "norm.weight": "norm.weight"}, prefix
    )


HOSTS = (tied_model, model_with_loss)
