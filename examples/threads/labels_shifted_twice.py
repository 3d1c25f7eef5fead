"""huggingface/transformers#47395 (https://github.com/huggingface/transformers/pull/47395)

A model shifted its labels by a position, and gave them to a loss that began to shift them as well. So each
position learned the second next token.

parity says ``labels-shifted`` (PAR260): logits meet the label of the second next position.

Repair: shift them once.
"""

from torch import nn
from torch.nn import functional as F

import parity


def next_token_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def shifted(labels):
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def head(te, prepare):
    return parity.Pair(
        reference=nn.Linear(64, 96, bias=False),
        candidate=te.Linear(64, 96, bias=False),
        inputs=lambda rng: (rng.normal(4, 32, 64), rng.integers(4, 32, high=96)),
        weights={"weight": "weight"},
        call_reference=lambda module, x, labels: next_token_loss(module(x), labels),
        call_candidate=lambda module, x, labels: next_token_loss(module(x).float(), prepare(labels)),
    )


@parity.pair("labels_shifted_twice_wrong", precisions=["bf16"])
def wrong(te):
    return head(te, shifted)


@parity.pair("labels_shifted_twice_right", precisions=["bf16"])
def right(te):
    return head(te, lambda labels: labels)
