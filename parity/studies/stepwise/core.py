"""``stepwise_attention`` in a model, in place of ``parity.reference.CoreAttention``.

Both directions are operators of their own to PyTorch's dispatcher, so a rounding model around the whole network
(``parity.rounding``) sees the attention as one operation and leaves what it rounds inside to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parity.studies.stepwise import gradient
from parity.studies.stepwise.attention import Algorithm, Attended, Steps, Tiles, as_kernels, baseline, everywhere, flash
from parity.studies.stepwise.number_formats import FORMATS


@dataclass(frozen=True)
class Arithmetic:
    """How an attention computes.

    Attributes:
        algorithm: baseline or flash.
        format: name of ``FORMATS``; inputs are rounded to it first.
        everywhere: whether each step is rounded to it, or what kernels round.
        tile: queries and keys of flash attention's tiles.
    """

    algorithm: Algorithm
    format: str
    everywhere: bool = False
    tile: int = 16

    @property
    def steps(self) -> Steps:
        return everywhere(self.format) if self.everywhere else as_kernels(self.algorithm, self.format)

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.tile, self.tile)


class StepwiseCore(nn.Module):
    """Causal attention in a given arithmetic, with grouped key-value heads.

    Args:
        arithmetic: of the forward and backward pass.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend.

        Args:
            query: ``[batch, seq, heads, head_dim]`` FP32.
            key: ``[batch, seq, groups, head_dim]``; heads are shared out to the groups in order.
            value: as key.

        Returns:
            ``[batch, seq, heads * head_dim]`` FP32.
        """
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
        chosen = self.arithmetic
        output, _ = _attend(
            *(x.transpose(1, 2) for x in (query, key, value)),
            chosen.algorithm,
            chosen.format,
            chosen.everywhere,
            chosen.tile,
        )
        return output.transpose(1, 2).flatten(2)


@torch.library.custom_op("parity::stepwise_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, algorithm: str, number_format: str, everywhere: bool, tile: int
) -> tuple[Tensor, Tensor]:
    arithmetic = Arithmetic(algorithm, number_format, everywhere, tile)  # type: ignore[arg-type]  # an op takes no Literal
    query, key, value = (FORMATS[number_format].round(x) for x in (query, key, value))
    if algorithm == "baseline":
        attended = baseline(query, key, value, arithmetic.steps, causal=True)
    else:
        attended = flash(query, key, value, arithmetic.steps, arithmetic.tiles, causal=True)
    return attended.output, attended.lse


@torch.library.custom_op("parity::stepwise_attention_backward", mutates_args=())
def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    output_grad: Tensor,
    algorithm: str,
    number_format: str,
    everywhere: bool,
    tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    arithmetic = Arithmetic(algorithm, number_format, everywhere, tile)  # type: ignore[arg-type]  # an op takes no Literal
    query, key, value, output_grad = (FORMATS[number_format].round(x) for x in (query, key, value, output_grad))
    if algorithm == "baseline":
        found = gradient.baseline(query, key, value, output_grad, arithmetic.steps, causal=True)
    else:
        attended = Attended(output, lse)
        found = gradient.flash(
            query, key, value, attended, output_grad, arithmetic.steps, arithmetic.tiles, causal=True
        )
    return found.query, found.key, found.value


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.arithmetic = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(*ctx.saved_tensors, output_grad, *ctx.arithmetic), None, None, None, None


_attend.register_autograd(_backward, setup_context=_remember)
