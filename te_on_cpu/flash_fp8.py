"""Attention in FP8 with one scale per tensor, and in MXFP8, forward and backward, a block of queries at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from te_on_cpu import attention_problem, float8, mxfp8
from te_on_cpu.attention_problem import (
    Attention,
    GradientFormats,
    Gradients,
    Problem,
    Span,
    grouped,
    in_fp32,
    in_gradients,
    new_gradients,
    new_output,
    new_statistics,
    parts,
    times_keys,
)

# Attention in FP8, on sequences of one length, a block of queries at a time. First with one scale per tensor.
#
# Products and roundings follow the cuDNN graph that TransformerEngine builds
# (``common/fused_attn/fused_attn_fp8.cu`` in TE's repository at 01144a02, which has the calls of 2.20 to ``sdpa_fp8``
# and ``sdpa_fp8_backward``), as NVIDIA/cudnn-frontend spells it out node by node in ``include/cudnn_frontend/node``:
# ``sdpa_fp8.h`` at 1b0b5eac, ``sdpa_fp8_bwd.h`` at 0b73d066 and ``matmul_fp8.h`` at 0b1577c8 (1.15). Everything else,
# including sums, is FP32:
#
# ==========================  =====================================================================================
# scores                      products of codes, times the attention's scale and the descales of Q and K
# P, the softmax of scores    normalised; amax taken; then times ``scale_s`` cast to the type of Q, for the V product
# O                           product of codes, times ``descale_s`` and the descale of V
# backward: P                 ``exp(score - lse)``; cast as above for the product with dO, and not for dS
# backward: ``sum(dO O)``     from codes of dO, and O as it is given: codes, or FP16 and BF16 with current scaling
# backward: dS, scaled        ``P (dP - sum(dO O)) scale``; amax taken; then times ``scale_dp`` cast to the type of dO,
#                             for the products with Q and K
# ==========================  =====================================================================================
#
# This differs from the GPU in two ways. First, a flash kernel may cast P before it is normalised, which the graph does
# not show. Its errors would differ, but have the same size. Second, the frontend's backward graph does not apply the
# dropout mask to dP; here it is applied, because dS is not the gradient without it.
#
# In MXFP8, the frontend's graphs decode operands before each product (``scaled_dot_product_flash_attention.h`` and
# ``sdpa_fp8_bwd.h`` at 3929da2), in blocks along the dimension that is summed over: Q, K, V and dO along their features
# for the scores and for dP, and along the sequence for the products with P and dS. P and dS stay FP32, and
# ``sum(dO O)`` takes both in FP16 or BF16. A kernel has to cast P and dS for its tensor cores, but the graphs do not
# show how, so these casts are not modelled.


@dataclass(frozen=True)
class Operand:
    """A tensor as a kernel reads it: ``values`` times ``descale``.

    Attributes:
        values: the unscaled values of FP8 codes, in a dtype that holds them exactly, or unquantized values.
        descale: 1 for unquantized values.
    """

    values: Tensor
    descale: float


@dataclass(frozen=True)
class Cast:
    """Describe the cast of an intermediate tensor: multiply by ``scale``, then round to the FP8 ``dtype``.

    Without a dtype, nothing is rounded.
    """

    dtype: torch.dtype | None
    scale: float

    @property
    def descale(self) -> float:
        return 1.0 / self.scale

    def of(self, values: Tensor) -> Tensor:
        """Return the unscaled FP32 values of the codes of FP32 ``values``."""
        return values if self.dtype is None else float8.rounded(values * self.scale, self.dtype)


@dataclass(frozen=True)
class Result:
    """Hold the results of the forward.

    Attributes:
        output: ``[batch, heads, queries, value features]`` FP32.
        lse: log of the sum of ``exp(score)``, ``[batch, heads, queries, 1]`` FP32; minus infinity without keys.
        amax: the amax of P, an FP32 scalar.
    """

    output: Tensor
    lse: Tensor
    amax: Tensor


def forward(query: Operand, key: Operand, value: Operand, attention: Attention, probabilities: Cast) -> Result:
    """Compute ``softmax(scale q k^T) v``, with shapes as in ``te_on_cpu.flash.forward``.

    Args:
        probabilities: the cast of P.
    """
    batch, heads, queries, _ = query.values.shape
    of_codes = replace(attention, scale=attention.scale * query.descale * key.descale)
    keys, values = in_fp32(key.values), in_fp32(value.values)
    output = torch.zeros(batch, heads, queries, values.shape[-1])
    lse = torch.empty(batch, heads, queries, 1)
    amax = torch.zeros(())
    generator = attention_problem.generator_of(attention)
    for block in attention_problem.blocks(attention, query.values, keys):
        rows, sink = block.of_queries, attention_problem.sink_of(attention, block)
        if not block.columns:
            lse[rows] = sink
            continue
        weights = attention_problem.of_block(query.values, keys, of_codes, block)
        top = torch.maximum(weights.amax(-1, keepdim=True), sink)
        shift = top.masked_fill(top == -math.inf, 0.0)
        weights = weights.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True).add_((sink - shift).exp_())
        lse[rows] = total.log().add_(shift)
        weights.div_(total.masked_fill_(total == 0, 1.0))
        amax = torch.maximum(amax, float8.amax_of(weights))
        attention_problem.drop(weights, attention, generator)
        output[rows] = times_keys(probabilities.of(weights), values[block.of_keys])
    return Result(output.mul_(probabilities.descale * value.descale), lse, amax)


@dataclass(frozen=True)
class Operands:
    """Hold the tensors of the backward as its products read them.

    Attributes:
        query, key, value, output_grad: for the scores and for dP, which sum over the features.
        query_by_token, key_by_token, output_grad_by_token: for the products with P and dS, which sum over tokens. Only
            in MXFP8 they differ from the others.
        output, exact_output_grad: for ``sum(dO O)``.
    """

    query: Operand
    key: Operand
    value: Operand
    output_grad: Operand
    query_by_token: Operand
    key_by_token: Operand
    output_grad_by_token: Operand
    output: Operand
    exact_output_grad: Operand


def with_one_scale(query: Operand, key: Operand, value: Operand, output: Operand, output_grad: Operand) -> Operands:
    """Return the operands of tensors with one scale each, whose codes are the same for every product."""
    return Operands(query, key, value, output_grad, query, key, output_grad, output, output_grad)


def backward(
    operands: Operands, lse: Tensor, attention: Attention, probabilities: Cast, score_grads: Cast
) -> tuple[Gradients, Tensor]:
    """Return the gradients of ``forward``, from its inputs, its output and its log-sum-exp, and the amax of dS.

    Args:
        probabilities: the forward's cast of P.
        score_grads: the cast of dS.
    """
    query, key, value, output_grad = operands.query, operands.key, operands.value, operands.output_grad
    output, exact_output_grad = operands.output, operands.exact_output_grad
    of_codes = replace(attention, scale=attention.scale * query.descale * key.descale)
    keys, values, keys_by_token = (in_fp32(each.values) for each in (key, value, operands.key_by_token))
    gradients = attention_problem.zero_gradients(query.values, keys, values, attention)
    amax = torch.zeros(())
    generator = attention_problem.generator_of(attention)
    for block in attention_problem.blocks(attention, query.values, keys):
        rows, columns = block.of_queries, block.of_keys
        incoming = in_fp32(output_grad.values[rows])
        inner = (in_fp32(exact_output_grad.values[rows]) * output.values[rows]).sum(-1, keepdim=True)
        inner *= exact_output_grad.descale * output.descale
        row_lse = lse[rows].masked_fill(lse[rows] == -math.inf, math.inf)
        if gradients.sink is not None:
            sink = attention_problem.sink_of(attention, block)
            gradients.sink[block.heads] -= ((sink - row_lse).exp_() * inner).sum((0, 2, 3))
        if not block.columns:
            continue
        weights = attention_problem.of_block(query.values, keys, of_codes, block).sub_(row_lse).exp_()
        groups = values[columns].shape[1]
        weight_grad = times_keys(incoming, values[columns].mT).mul_(output_grad.descale * value.descale)
        kept = attention_problem.drop(weight_grad, attention, generator)
        dropped = weights if kept is None else weights * kept
        incoming_by_token = in_fp32(operands.output_grad_by_token.values[rows])
        gradients.value[columns] += grouped(probabilities.of(dropped), groups).mT @ grouped(incoming_by_token, groups)
        score_grad = weight_grad.sub_(inner).mul_(weights).mul_(attention.scale)
        amax = torch.maximum(amax, float8.amax_of(score_grad))
        score_grad = score_grads.of(score_grad)
        gradients.query[rows] = times_keys(score_grad, keys_by_token[columns])
        queries = in_fp32(operands.query_by_token.values[rows])
        gradients.key[columns] += grouped(score_grad, groups).mT @ grouped(queries, groups)
    gradients.value.mul_(probabilities.descale * output_grad.descale)
    gradients.query.mul_(score_grads.descale * key.descale)
    gradients.key.mul_(score_grads.descale * query.descale)
    return gradients, amax


# Fused attention in FP8, forward and backward, on all sequences of a batch.
#
# Quantizers are used as in ``csrc/extensions/attention.cpp`` of TransformerEngine 2.20.2 and
# ``common/fused_attn/fused_attn_fp8.cu`` (see above):
#
# =================  ==================================  ======================================================
# tensor             delayed scaling                     current scaling
# =================  ==================================  ======================================================
# Q, K, V, dO        come in as codes                    come in as codes
# P (S in TE), dS    the quantizer's scale, amax kept    the same, as TE uses delayed scaling for these two
# O                  codes, amax kept                    rounded to FP16 or BF16
# dQ, dK, dV         codes, one amax of the three kept   rounded to FP16 or BF16
# =================  ==================================  ======================================================
#
# A kept amax replaces the quantizer's if it is larger; TE's recipe sets the quantizer's to 0 between steps. In MXFP8,
# TE passes no quantizers of P and dS, and results are rounded to FP16 or BF16.


@dataclass(frozen=True)
class Tensors:
    """Hold the backward's inputs: TE's FP8 tensors, an ``output`` that may be FP16 or BF16, and FP32 ``lse``.

    In MXFP8, ``exact_output_grad`` is the gradient of the output as it was before it was quantized.
    """

    query: Any
    key: Any
    value: Any
    output: Any
    output_grad: Any
    lse: Tensor
    exact_output_grad: Tensor | None = None


def forward_of_batch(
    problem: Problem,
    query: Any,
    key: Any,
    value: Any,
    max_seqlen_q: int,
    s_quantizer: Any,
    o_quantizer: Any,
    dtype: torch.dtype,
) -> tuple[Any, Tensor]:
    """Return O and the log-sum-exp.

    Args:
        query: TE's FP8 tensor, like key and value.
        s_quantizer: the quantizer of P; None in MXFP8.
        o_quantizer: the quantizer of O.
        dtype: FP16 or BF16, the dtype of O; the nominal dtype if O is quantized.
    """
    layout = problem.layout
    q, k = _operand(query, layout.query), _operand(key, layout.key)
    v = _operand(value, layout.key, by_token=True)
    probabilities = _cast(s_quantizer, "S")
    output = _Written(o_quantizer, dtype)
    buffer = new_output(problem, q.values, v.values, output.buffer_dtype)
    lse = new_statistics(problem, q.values, max_seqlen_q)
    for sequences, attention in parts(problem, q.values, k.values):
        result = forward(
            _part(q, sequences.query),
            _part(k, sequences.key),
            _part(v, sequences.key),
            attention,
            probabilities,
        )
        output.write(sequences.query.in_format(problem.output_format).of(buffer), result.output)
        sequences.per_query.of(lse).copy_(result.lse)
        if s_quantizer is not None:
            float8.keep_amax(s_quantizer, result.amax)
    return output.finished(buffer), lse


def backward_of_batch(
    problem: Problem,
    tensors: Tensors,
    formats: GradientFormats,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    dtype: torch.dtype,
) -> list[Any]:
    """Return the gradients of Q, K, V, the bias (None: FP8 has no bias) and the softmax offset."""
    operands = _operands(problem, tensors, formats)
    q, k, v = operands.query, operands.key, operands.value
    probabilities, score_grads = _cast(s_quantizer, "S"), _cast(dp_quantizer, "dP")
    written = _Written(dqkv_quantizer, dtype)
    buffers = new_gradients(problem, formats.inputs, (q.values, k.values, v.values), written.buffer_dtype)
    sink = problem.attention.sink
    sink_grad = None if sink is None else torch.zeros(1, sink.numel(), 1, 1)
    for sequences, attention in parts(problem, q.values, k.values):
        queries, keys = sequences.query, sequences.key
        outputs, output_grads = queries.in_format(problem.output_format), queries.in_format(formats.output)
        own = Operands(
            query=_part(operands.query, queries),
            key=_part(operands.key, keys),
            value=_part(operands.value, keys),
            output_grad=_part(operands.output_grad, output_grads),
            query_by_token=_part(operands.query_by_token, queries),
            key_by_token=_part(operands.key_by_token, keys),
            output_grad_by_token=_part(operands.output_grad_by_token, output_grads),
            output=_part(operands.output, outputs),
            exact_output_grad=_part(operands.exact_output_grad, output_grads),
        )
        lse = sequences.per_query.of(tensors.lse)
        gradients, amax = backward(own, lse, attention, probabilities, score_grads)
        if dp_quantizer is not None:
            float8.keep_amax(dp_quantizer, amax)
        views = in_gradients(buffers, formats.inputs, sequences)
        for view, gradient in zip(views, (gradients.query, gradients.key, gradients.value), strict=True):
            written.write(view, gradient)
        if sink_grad is not None and gradients.sink is not None:
            sink_grad += gradients.sink.view(1, -1, 1, 1)
    return [*(written.finished(buffer) for buffer in buffers), None, sink_grad]


@dataclass(frozen=True)
class _Written:
    """Describe how FP32 results are stored: as codes with delayed scaling, otherwise rounded to ``dtype``.

    With current scaling, TE's kernel also writes high precision, and TE's Python quantizes it where needed.
    """

    quantizer: Any
    dtype: torch.dtype

    @property
    def buffer_dtype(self) -> torch.dtype:
        return torch.uint8 if self._makes_codes else self.dtype

    @property
    def _makes_codes(self) -> bool:
        return float8.is_delayed(self.quantizer)

    def write(self, view: Tensor, values: Tensor) -> None:
        """Write a part into its place, and keep its amax if it is cast to codes."""
        if not self._makes_codes:
            view.copy_(values)
            return
        float8.keep_amax(self.quantizer, float8.amax_of(values))
        view.copy_(float8.encode(values, self.quantizer.scale, float8.fp8_dtype(self.quantizer)).data)

    def finished(self, buffer: Tensor) -> Any:
        """Return the whole result, as TE's tensor if it holds codes."""
        if not self._makes_codes:
            return buffer
        codes = float8.Codes(buffer, self.quantizer.scale.detach().reshape(1).reciprocal())
        return float8.new(self.quantizer, self.dtype, codes)


def _operands(problem: Problem, tensors: Tensors, formats: GradientFormats) -> Operands:
    queries, keys, output_grads = problem.layout.query, problem.layout.key, formats.output
    read = with_one_scale(
        query=_operand(tensors.query, queries),
        key=_operand(tensors.key, keys),
        value=_operand(tensors.value, keys),
        output=_operand(tensors.output, problem.output_format),
        output_grad=_operand(tensors.output_grad, output_grads),
    )
    if tensors.exact_output_grad is None:
        return read
    return replace(
        read,
        query_by_token=_operand(tensors.query, queries, by_token=True),
        key_by_token=_operand(tensors.key, keys, by_token=True),
        output_grad_by_token=_operand(tensors.output_grad, output_grads, by_token=True),
        exact_output_grad=_operand(tensors.exact_output_grad, output_grads),
    )


def _operand(tensor: Any, data_format: str, by_token: bool = False) -> Operand:
    """Decode codes to BF16, which holds them exactly; in MXFP8 those whose blocks lie along the sequence, if asked."""
    if mxfp8.is_mxfp8_tensor(tensor):
        return Operand(mxfp8.of_attention(tensor, by_token, data_format), 1.0)
    if not float8.is_float8_tensor(tensor):
        return Operand(tensor.detach(), 1.0)
    values = float8.decode(tensor._data, float8.fp8_dtype(tensor), torch.bfloat16)
    return Operand(values, tensor._scale_inv.item())


def _part(operand: Operand, span: Span) -> Operand:
    return Operand(span.of(operand.values), operand.descale)


def _cast(quantizer: Any, name: str) -> Cast:
    if quantizer is None:
        return Cast(None, 1.0)
    if not float8.is_delayed(quantizer):
        raise RuntimeError(
            f"FP8 attention reads a scale of {name} that earlier steps set, and keeps its amax, but the quantizer of "
            f"{name} is a {type(quantizer).__name__}, which has neither; return a DelayedScalingRequest for "
            f"module_type='dpa' and tensor_type={name.lower()!r}"
        )
    return Cast(float8.fp8_dtype(quantizer), quantizer.scale.item())
