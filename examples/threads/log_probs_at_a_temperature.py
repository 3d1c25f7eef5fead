"""huggingface/trl#4159 (https://github.com/huggingface/trl/issues/4159)

A trainer took log-probabilities at the temperature at which its engine sampled, and the engine returned those of the
logits as they were, so that the ratio of the two was far from 1 before any step. vllm-project/vllm#42259 collects
what engines and trainers mean by a log-probability.

parity says ``temperature`` (PAR266): logits divided by 0.6.

Repair: the same on both sides.
"""

from torch import nn

import parity


def log_probs(logits, ids, temperature=1.0):
    return (logits.float() / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def head(te, temperature):
    return parity.Pair(
        reference=nn.Linear(64, 96, bias=False),
        candidate=te.Linear(64, 96, bias=False),
        inputs=lambda rng: (rng.normal(4, 32, 64), rng.integers(4, 32, high=96)),
        weights={"weight": "weight"},
        call_reference=lambda module, x, ids: log_probs(module(x), ids),
        call_candidate=lambda module, x, ids: log_probs(module(x), ids, temperature),
        evaluation=True,
    )


@parity.pair("log_probs_at_a_temperature_wrong", precisions=["bf16"])
def wrong(te):
    return head(te, 0.6)


@parity.pair("log_probs_at_a_temperature_right", precisions=["bf16"])
def right(te):
    return head(te, 1.0)
