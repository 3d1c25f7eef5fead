"""A call of fused attention, apart from its precision: sequences, layouts, and what the forward hands to the backward.

Follows ``csrc/extensions/attention.cpp`` of TransformerEngine 2.20.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.cpu.attention import layouts
from parity.cpu.attention.layouts import Layout, Sequences
from parity.cpu.attention.scores import Attention


@dataclass(frozen=True)
class Problem:
    """What forward and backward share, whatever the precision.

    Attributes:
        attention: without bias and seed, which each sequence has its own part of.
        bias: of the whole batch, or None.
        seed: of the dropout masks.
        cumulative: lengths of queries and of keys, ``[batch + 1]`` INT32 each.
        padded: the same with padding between sequences, or None.
        output_format: of O: ``bshd``, ``sbhd`` or ``thd``.
    """

    layout: Layout
    attention: Attention
    bias: Tensor | None
    seed: int
    is_padded: bool
    cumulative: tuple[Tensor, Tensor]
    padded: tuple[Tensor | None, Tensor | None]
    output_format: str
    page_table: Tensor | None = None


@dataclass(frozen=True)
class GradientFormats:
    """How gradients lie in memory: that of O, which comes in, and those of Q, K and V, which go out."""

    output: str
    inputs: Layout


def parts(problem: Problem, query: Tensor, key: Tensor) -> Iterator[tuple[Sequences, Attention]]:
    """The sequences to work on, each with its part of the bias and a seed of its own."""
    if problem.is_padded:
        query_lengths = layouts.lengths(problem.cumulative[0], problem.padded[0])
        key_lengths = layouts.lengths(problem.cumulative[1], problem.padded[1])
        found = layouts.each_sequence(problem.layout, query_lengths, key_lengths, problem.page_table)
    else:
        found = layouts.whole_batch(problem.layout, query, key)
    for number, sequences in enumerate(found):
        bias = None if problem.bias is None else part_of_bias(problem.bias, sequences)
        yield sequences, replace(problem.attention, bias=bias, seed=problem.seed + number)


def part_of_bias(bias: Tensor, sequences: Sequences) -> Tensor:
    """``[batch or 1, heads or 1, queries or 1, keys]`` of these sequences, a view."""
    if bias.shape[0] > 1:
        bias = bias[sequences.query.batch]
    return bias[:, :, : sequences.query.length, : sequences.key.length]


def new_output(problem: Problem, query: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised O, or zeros where padding will stay."""
    shape = layouts.reshaped((*query.shape[:-1], value.shape[-1]), problem.layout.query, problem.output_format)
    return torch.zeros(shape, dtype=dtype) if problem.is_padded else torch.empty(shape, dtype=dtype)


def new_statistics(problem: Problem, query: Tensor, max_seqlen_q: int) -> Tensor:
    """FP32 ``[batch, heads, max_seqlen_q, 1]``, or ``[tokens, heads, 1]`` in ``thd``, as cuDNN 9.6 and later lay them
    out; minus infinity, which stays where there is padding."""
    layout = problem.layout.query
    if layout == "thd":
        shape = [*query.shape[:2], 1]
    else:
        shape = [query.shape[layout.index("b")], query.shape[layout.index("h")], max_seqlen_q, 1]
    return torch.full(shape, float("-inf"))


def new_gradients(
    problem: Problem, layout: Layout, qkv: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Zeros for the gradients of Q, K and V in ``layout``, in one tensor where it says so."""
    old = (problem.layout.query, problem.layout.key, problem.layout.key)
    new = (layout.query, layout.key, layout.key)
    shapes = [layouts.reshaped(tensor.shape, *formats) for tensor, *formats in zip(qkv, old, new, strict=True)]
    return layouts.gradient_buffers(layout, shapes, dtype)


def in_gradients(gradients: list[Tensor], layout: Layout, sequences: Sequences) -> list[Tensor]:
    """The views of ``new_gradients`` that belong to these sequences, ``[batch, heads, seq, features]``."""
    places = (sequences.query.in_format(layout.query), *(2 * [sequences.key.in_format(layout.key)]))
    return [place.of(gradient) for place, gradient in zip(places, gradients, strict=True)]
