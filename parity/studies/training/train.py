"""Trains a language model with FP32 master weights, and returns the loss of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from parity.precision import Precision
from parity.rounding.model import rounded
from parity.rounding.parts import Rounding
from parity.te import Kernels

# Does a forward and a backward pass on tokens ``[batch, seq + 1]``, which leaves gradients; returns the loss.
Pass = Callable[[nn.Module, Tensor], float]


@dataclass(frozen=True)
class Schedule:
    """How the optimizer steps; it is AdamW with betas 0.9 and 0.95 and PyTorch's weight decay of 0.01.

    Attributes:
        learning_rate: after the warmup.
        warmup: steps over which the learning rate grows linearly.
    """

    learning_rate: float
    warmup: int


def train(
    model: nn.Module,
    schedule: Schedule,
    batches: Sequence[Tensor],
    forward_backward: Pass,
    dtype: torch.dtype,
    loss_scale: float = 1.0,
    observe: Callable[[int, Sequence[Tensor]], None] | None = None,
    masters: Sequence[Tensor] | None = None,
) -> list[float]:
    """Take one step on each batch.

    The optimizer holds FP32 masters; after each step the model gets them rounded to ``dtype``, and gradients reach the
    optimizer rounded to it: what Megatron-LM does, and TE's FusedAdam with ``master_weights=True``.

    Args:
        model: its parameters have ``dtype``, or FP32 to hold numbers of ``dtype``.
        batches: int64 ``[batch, seq + 1]`` each.
        loss_scale: that the pass multiplies its gradients by; it is taken out again in FP32.
        observe: called after each step with the number of steps so far and the masters, in the order of
            ``model.parameters()``.
        masters: FP32, where they are to start from other numbers than the model's.

    Returns:
        The loss on each batch before its step, in nats a token.
    """
    parameters = list(model.parameters())
    masters = [start.detach().float().clone() for start in masters or parameters]
    optimizer = torch.optim.AdamW(masters, lr=schedule.learning_rate, betas=(0.9, 0.95))
    losses = []
    for step, tokens in enumerate(batches):
        optimizer.param_groups[0]["lr"] = schedule.learning_rate * min(1.0, (step + 1) / schedule.warmup)
        model.zero_grad(set_to_none=True)
        losses.append(forward_backward(model, tokens))
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to(dtype).float() / loss_scale
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master.to(dtype))
        if observe is not None:
            observe(step + 1, masters)
    return losses


def plain_pass(model: nn.Module, tokens: Tensor) -> float:
    """The plain model in its own dtype."""
    loss = _loss(model(tokens[:, :-1]), tokens)
    loss.backward()
    return loss.item()


def rounded_pass(rounding: Rounding, loss_scale: float = 1.0) -> Pass:
    """The plain model, FP32, under a rounding model."""

    def forward_backward(model: nn.Module, tokens: Tensor) -> float:
        with rounded(rounding, model.parameters()) as phase:
            loss = _loss(model(tokens[:, :-1]), tokens)
            phase.begin_backward()
            (loss * loss_scale).backward()
        return loss.item()

    return forward_backward


def te_pass(precision: Precision, kernels: Kernels, loss_scale: float = 1.0) -> Pass:
    """TE's model under the precision's recipe."""

    def forward_backward(model: nn.Module, tokens: Tensor) -> float:
        tokens = tokens.to(kernels.device)
        with precision.autocast(kernels):
            logits = model(tokens[:, :-1])
        loss = _loss(logits, tokens)
        (loss * loss_scale).backward()
        return loss.item()

    return forward_backward


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, computed in FP32."""
    return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
