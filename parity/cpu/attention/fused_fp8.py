"""Fused attention in FP8 with one scale a tensor, forward and backward, on all sequences of a batch.

Which quantizer makes which tensor follows ``csrc/extensions/attention.cpp`` of TransformerEngine 2.20.2 and
``common/fused_attn/fused_attn_fp8.cu`` (see ``flash_fp8``):

=================  ==================================  ======================================================
tensor             delayed scaling                     current scaling
=================  ==================================  ======================================================
Q, K, V, dO        come in as codes                    come in as codes
P (S in TE), dS    the quantizer's scale, amax kept    the same: TE gives these two delayed scaling
O                  codes, amax kept                    rounded to FP16 or BF16
dQ, dK, dV         codes, one amax of the three kept   rounded to FP16 or BF16
=================  ==================================  ======================================================

An amax is kept if it exceeds the one that the quantizer has, which TE's recipe sets to 0 between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.cpu import versions
from parity.cpu.attention import flash_fp8
from parity.cpu.attention.flash_fp8 import Cast, Operand
from parity.cpu.attention.layouts import Span
from parity.cpu.attention.problem import (
    GradientFormats,
    Problem,
    in_gradients,
    new_gradients,
    new_output,
    new_statistics,
    parts,
)
from parity.cpu.quantized import float8, quantize


@dataclass(frozen=True)
class Tensors:
    """What the backward reads: TE's FP8 tensors; ``output`` may be FP16 or BF16; ``lse`` is FP32."""

    query: Any
    key: Any
    value: Any
    output: Any
    output_grad: Any
    lse: Tensor


def forward(
    problem: Problem,
    query: Any,
    key: Any,
    value: Any,
    max_seqlen_q: int,
    s_quantizer: Any,
    o_quantizer: Any,
    dtype: torch.dtype,
) -> tuple[Any, Tensor]:
    """O and the log-sum-exp.

    Args:
        query: TE's FP8 tensor; as key and value.
        s_quantizer: of P.
        dtype: FP16 or BF16: what O is, or seems to be if it is quantized.
    """
    q, k, v = (_operand(tensor) for tensor in (query, key, value))
    probabilities = _cast(s_quantizer, "S")
    output = _Written(o_quantizer, dtype)
    buffer = new_output(problem, q.values, v.values, output.buffer_dtype)
    lse = new_statistics(problem, q.values, max_seqlen_q)
    for sequences, attention in parts(problem, q.values, k.values):
        result = flash_fp8.forward(
            _part(q, sequences.query),
            _part(k, sequences.key),
            _part(v, sequences.key),
            attention,
            probabilities,
        )
        output.write(sequences.query.in_format(problem.output_format).of(buffer), result.output)
        sequences.per_query.of(lse).copy_(result.lse)
        _keep(s_quantizer, result.amax)
    return output.finished(buffer), lse


def backward(
    problem: Problem,
    tensors: Tensors,
    formats: GradientFormats,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    dtype: torch.dtype,
) -> list[Any]:
    """The gradients of Q, K, V, the bias (None: FP8 has no bias) and the softmax offset."""
    q, k, v = (_operand(tensor) for tensor in (tensors.query, tensors.key, tensors.value))
    o, do = _operand(tensors.output), _operand(tensors.output_grad)
    probabilities, score_grads = _cast(s_quantizer, "S"), _cast(dp_quantizer, "dP")
    written = _Written(dqkv_quantizer, dtype)
    buffers = new_gradients(problem, formats.inputs, (q.values, k.values, v.values), written.buffer_dtype)
    sink = problem.attention.sink
    sink_grad = None if sink is None else torch.zeros(1, sink.numel(), 1, 1)
    for sequences, attention in parts(problem, q.values, k.values):
        gradients, amax = flash_fp8.backward(
            _part(q, sequences.query),
            _part(k, sequences.key),
            _part(v, sequences.key),
            _part(o, sequences.query.in_format(problem.output_format)),
            _part(do, sequences.query.in_format(formats.output)),
            sequences.per_query.of(tensors.lse),
            attention,
            probabilities,
            score_grads,
        )
        _keep(dp_quantizer, amax)
        views = in_gradients(buffers, formats.inputs, sequences)
        for view, gradient in zip(views, (gradients.query, gradients.key, gradients.value), strict=True):
            written.write(view, gradient)
        if sink_grad is not None and gradients.sink is not None:
            sink_grad += gradients.sink.view(1, -1, 1, 1)
    return [*(written.finished(buffer) for buffer in buffers), None, sink_grad]


@dataclass(frozen=True)
class _Written:
    """How FP32 results go out: as codes of a delayed quantizer, else rounded to ``dtype``.

    With current scaling TE's kernel writes high precision too, and TE's Python quantizes it where it needs to.
    """

    quantizer: Any
    dtype: torch.dtype

    @property
    def buffer_dtype(self) -> torch.dtype:
        return torch.uint8 if self._makes_codes else self.dtype

    @property
    def _makes_codes(self) -> bool:
        return quantize.is_delayed(self.quantizer)

    def write(self, view: Tensor, values: Tensor) -> None:
        """Put a part into its place; keeps its amax."""
        if not self._makes_codes:
            view.copy_(values)
            return
        _keep(self.quantizer, float8.amax_of(values))
        view.copy_(float8.encode(values, self.quantizer.scale, float8.fp8_dtype(self.quantizer)).data)

    def finished(self, buffer: Tensor) -> Any:
        """The whole tensor, as TE's."""
        if not self._makes_codes:
            return buffer
        codes = float8.Codes(buffer, self.quantizer.scale.detach().reshape(1).reciprocal())
        return float8.new(self.quantizer, self.dtype, codes)


def _operand(tensor: Any) -> Operand:
    """FP8 codes decoded to BF16, which holds them exactly."""
    if not float8.is_float8_tensor(tensor):
        return Operand(tensor.detach(), 1.0)
    values = float8.decode(tensor._data, float8.fp8_dtype(tensor), torch.bfloat16)
    return Operand(values, tensor._scale_inv.item())


def _part(operand: Operand, span: Span) -> Operand:
    return Operand(span.of(operand.values), operand.descale)


def _cast(quantizer: Any, name: str) -> Cast:
    if not quantize.is_delayed(quantizer):
        raise NotImplementedError(
            f"the CPU kernels' FP8 attention casts {name} with delayed scaling, and not with a "
            f"{type(quantizer).__name__}, which TransformerEngine {versions.installed_version()} asked for"
        )
    return Cast(float8.fp8_dtype(quantizer), quantizer.scale.item())


def _keep(quantizer: Any, amax: Tensor) -> None:
    quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
