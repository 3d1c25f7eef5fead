"""vllm-project/vllm#19 (https://github.com/vllm-project/vllm/pull/19)

An engine took log-probabilities in the 16 bits of its logits; a trainer has them in FP32.

parity says ``log-softmax-precision`` (PAR311): each number is one of BF16, though it is returned in FP32.

Repair: widen the logits before the log-softmax, not its result.
"""

from torch import nn

import parity


def log_probs(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0].float()


def head(te, prepare):
    return parity.Pair(
        reference=nn.Linear(64, 96, bias=False),
        candidate=te.Linear(64, 96, bias=False),
        inputs=lambda rng: (rng.normal(4, 32, 64), rng.integers(4, 32, high=96)),
        weights={"weight": "weight"},
        call_reference=lambda module, x, ids: log_probs(module(x).float(), ids),
        call_candidate=lambda module, x, ids: log_probs(prepare(module(x)), ids),
        evaluation=True,
    )


@parity.pair("log_probs_in_16_bits_wrong", precisions=["bf16"])
def wrong(te):
    return head(te, lambda logits: logits)


@parity.pair("log_probs_in_16_bits_right", precisions=["bf16"])
def right(te):
    return head(te, lambda logits: logits.float())
