"""NVIDIA/TransformerEngine#2139 (https://github.com/NVIDIA/TransformerEngine/pull/2139)

The fused cross entropy scaled the gradients of all tokens by the gradient of the first token's loss. With a
loss mask, that of a prompt is 0, and so was every gradient.

parity says ``gradient-scale`` (PAR401): every gradient is 0, nothing flows back.

Repair: scale each token's gradient by its own.
"""

import torch
from torch import nn
from torch.nn import functional as F

import parity


class FusedCrossEntropy(torch.autograd.Function):
    """Computes the gradient of the logits in the forward pass, and scales it in the backward pass."""

    @staticmethod
    def forward(ctx, logits, labels, reads_all):
        ctx.save_for_backward(logits.float().softmax(-1) - F.one_hot(labels, logits.shape[-1]))
        ctx.reads_all, ctx.dtype = reads_all, logits.dtype
        return F.cross_entropy(logits.float(), labels, reduction="none")

    @staticmethod
    def backward(ctx, gradient):
        (of_logits,) = ctx.saved_tensors
        scale = gradient[:, None] if ctx.reads_all else gradient[0]
        return (scale * of_logits).to(ctx.dtype), None, None


def answers_loss(losses):
    return losses[16:].mean()  # a prompt of 16 tokens has no loss


def head(te, reads_all):
    return parity.Pair(
        reference=nn.Linear(64, 96, bias=False),
        candidate=te.Linear(64, 96, bias=False),
        inputs=lambda rng: (rng.normal(64, 64), rng.integers(64, high=96)),
        weights={"weight": "weight"},
        call_reference=lambda module, x, labels: answers_loss(F.cross_entropy(module(x), labels, reduction="none")),
        call_candidate=lambda module, x, labels: answers_loss(FusedCrossEntropy.apply(module(x), labels, reads_all)),
    )


@parity.pair("cross_entropy_first_gradient_wrong", precisions=["bf16"])
def wrong(te):
    return head(te, reads_all=False)


@parity.pair("cross_entropy_first_gradient_right", precisions=["bf16"])
def right(te):
    return head(te, reads_all=True)
