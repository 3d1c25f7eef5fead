"""Attention in FP8 with one scale a tensor, on sequences of one length, a block of queries at a time.

What is multiplied and rounded, and where, is the graph that TransformerEngine builds of cuDNN
(``common/fused_attn/fused_attn_fp8.cu`` in TE's repository at 01144a02, which has the calls of 2.20 to ``sdpa_fp8`` and
``sdpa_fp8_backward``), as NVIDIA/cudnn-frontend spells it out node by node in ``include/cudnn_frontend/node``:
``sdpa_fp8.h`` at 1b0b5eac, ``sdpa_fp8_bwd.h`` at 0b73d066 and ``matmul_fp8.h`` at 0b1577c8 (1.15). Whatever is not said
to be rounded is FP32, sums too:

==========================  ===========================================================================================
scores                      products of codes, times the attention's scale and what the codes of Q and K stand for
P, the softmax of scores    normalised; amax taken; then times ``scale_s`` cast to the type of Q, for the product with V
O                           product of codes, times ``descale_s`` and what the codes of V stand for
backward: P                 ``exp(score - lse)``; as above cast for the product with dO, and not for dS
backward: ``sum(dO O)``     of codes of dO, and of O as it is given: codes, or FP16 and BF16 with current scaling
backward: dS, scaled        ``P (dP - sum(dO O)) scale``; amax taken; then times ``scale_dp`` cast to the type of dO,
                            for the products with Q and K
==========================  ===========================================================================================

Two liberties. A flash kernel may cast P before it is normalised, which the graph does not tell: its errors would be
others, of the same size. And the frontend's backward graph does not apply the dropout mask to dP, without which dS is
no gradient; here it does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.cpu.attention import scores
from parity.cpu.attention.scores import Attention, Gradients, grouped, in_fp32
from parity.cpu.quantized import float8


@dataclass(frozen=True)
class Operand:
    """A tensor as a kernel reads it: ``values`` times ``descale``.

    Attributes:
        values: what FP8 codes stand for without their scale, in a dtype that holds it exactly; or unquantized values.
        descale: 1 for unquantized values.
    """

    values: Tensor
    descale: float


@dataclass(frozen=True)
class Cast:
    """How an intermediate tensor is cast: ``dtype`` of FP8, after a multiplication by ``scale``."""

    dtype: torch.dtype
    scale: float

    @property
    def descale(self) -> float:
        return 1.0 / self.scale

    def of(self, values: Tensor) -> Tensor:
        """What the codes of FP32 ``values`` stand for without the scale, FP32."""
        return float8.rounded(values * self.scale, self.dtype)


@dataclass(frozen=True)
class Result:
    """What the forward computes.

    Attributes:
        output: ``[batch, heads, queries, value features]`` FP32.
        lse: log of the sum of ``exp(score)``, ``[batch, heads, queries, 1]`` FP32; minus infinity for no key.
        amax: of P, an FP32 scalar.
    """

    output: Tensor
    lse: Tensor
    amax: Tensor


def forward(query: Operand, key: Operand, value: Operand, attention: Attention, probabilities: Cast) -> Result:
    """``softmax(scale q k^T) v``, shapes as in ``parity.cpu.attention.flash.forward``.

    Args:
        probabilities: the cast of P.
    """
    batch, heads, queries, _ = query.values.shape
    groups = key.values.shape[1]
    of_codes = replace(attention, scale=attention.scale * query.descale * key.descale)
    keys, values = in_fp32(key.values), in_fp32(value.values)
    output = torch.zeros(batch, heads, queries, values.shape[-1])
    lse = torch.empty(batch, heads, queries, 1)
    amax = torch.zeros(())
    generator, sink = scores.generator(attention), scores.sink(attention)
    for block in scores.blocks(attention, query.values, keys):
        rows = block.row_slice
        if not block.columns:
            lse[:, :, rows] = sink
            continue
        weights = scores.of_block(query.values, keys, of_codes, block)
        top = torch.maximum(weights.amax(-1, keepdim=True), sink)
        shift = top.masked_fill(top == -math.inf, 0.0)
        weights = weights.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True).add_((sink - shift).exp_())
        lse[:, :, rows] = total.log().add_(shift)
        weights.div_(total.masked_fill_(total == 0, 1.0))
        amax = torch.maximum(amax, float8.amax_of(weights))
        scores.drop(weights, attention, generator)
        product = grouped(probabilities.of(weights), groups) @ values[:, :, block.column_slice]
        output[:, :, rows] = product.view(batch, heads, len(block.rows), -1)
    return Result(output.mul_(probabilities.descale * value.descale), lse, amax)


def backward(
    query: Operand,
    key: Operand,
    value: Operand,
    output: Operand,
    output_grad: Operand,
    lse: Tensor,
    attention: Attention,
    probabilities: Cast,
    score_grads: Cast,
) -> tuple[Gradients, Tensor]:
    """The gradients of ``forward``, from its inputs, its output and its log-sum-exp, and the amax of dS.

    Args:
        probabilities: the cast of P, the forward's.
        score_grads: the cast of dS.
    """
    groups = key.values.shape[1]
    of_codes = replace(attention, scale=attention.scale * query.descale * key.descale)
    keys, values = in_fp32(key.values), in_fp32(value.values)
    gradients = scores.zero_gradients(query.values, keys, values, attention)
    amax = torch.zeros(())
    generator = scores.generator(attention)
    for block in scores.blocks(attention, query.values, keys):
        rows, columns = block.row_slice, block.column_slice
        incoming = in_fp32(output_grad.values[:, :, rows])
        inner = (incoming * output.values[:, :, rows]).sum(-1, keepdim=True)
        inner *= output_grad.descale * output.descale
        row_lse = lse[:, :, rows].masked_fill(lse[:, :, rows] == -math.inf, math.inf)
        if gradients.sink is not None:
            gradients.sink.sub_(((scores.sink(attention) - row_lse).exp_() * inner).sum((0, 2, 3)))
        if not block.columns:
            continue
        weights = scores.of_block(query.values, keys, of_codes, block).sub_(row_lse).exp_()
        incoming = grouped(incoming, groups)
        weight_grad = (incoming @ values[:, :, columns].mT).view_as(weights).mul_(output_grad.descale * value.descale)
        kept = scores.drop(weight_grad, attention, generator)
        dropped = weights if kept is None else weights * kept
        gradients.value[:, :, columns] += grouped(probabilities.of(dropped), groups).mT @ incoming
        score_grad = weight_grad.sub_(inner).mul_(weights).mul_(attention.scale)
        amax = torch.maximum(amax, float8.amax_of(score_grad))
        score_grad = grouped(score_grads.of(score_grad), groups)
        gradients.query[:, :, rows] = (score_grad @ keys[:, :, columns]).view_as(gradients.query[:, :, rows])
        gradients.key[:, :, columns] += score_grad.mT @ grouped(in_fp32(query.values[:, :, rows]), groups)
    gradients.value.mul_(probabilities.descale * output_grad.descale)
    gradients.query.mul_(score_grads.descale * key.descale)
    gradients.key.mul_(score_grads.descale * query.descale)
    return gradients, amax
