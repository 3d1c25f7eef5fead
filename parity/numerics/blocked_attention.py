"""Compute attention by blocks of queries, so that its memory grows linearly with the sequence.

Ordinary attention in FP64 holds the scores of every head at once: 64 GiB for 16,384 tokens and 32 heads, and several
times that with gradients. Here the blocks of queries are computed one after another, in the forward pass and again in
the backward pass. The result differs from ordinary attention only by the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from parity.numerics.formats import AttentionPart

# Causal masks and sliding windows: the keys that a query may see because of its position.


@dataclass(frozen=True)
class Band:
    """A mask with which query i sees the keys from ``i - left`` to ``i + right``.

    Attributes:
        left: infinite if there is no limit to earlier keys.
        right: infinite if there is no limit to later keys; 0 for a causal mask.
    """

    left: float = math.inf
    right: float = math.inf

    def hidden(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return ``[queries, keys]``, True where a query must not see a key."""
        distance = distance_of(queries, keys, device)
        return (distance > self.right) | (distance < -self.left)

    def hides(self, queries: range, keys: range) -> bool:
        """Return whether any of the queries must not see any of the keys; neither range may be empty."""
        return keys[-1] - queries[0] > self.right or keys[0] - queries[-1] < -self.left

    def visible(self, queries: range, keys: int) -> range:
        """Return the range of keys that any of the queries sees, out of ``keys`` keys, or one key if there is none."""
        start = min(int(max(queries[0] - self.left, 0)), keys - 1)
        stop = max(int(min(queries[-1] + self.right + 1, keys)), start + 1)
        return range(start, stop)


def distance_of(queries: range, keys: range, device: torch.device) -> Tensor:
    """Return the position of each key relative to each query, ``[queries, keys]``."""
    rows = torch.arange(queries.start, queries.stop, device=device)
    return torch.arange(keys.start, keys.stop, device=device) - rows[:, None]


# Attention by blocks of queries, without a matrix of all scores. Compared with ordinary attention, only the gradients
# of keys and values add up in another order.


WRITTEN_OUT = 2**25
"""With at most this many scores over all heads (256 MiB in FP64), attention need not be computed in blocks."""
# The number of scores in a block: few compared with those of 16,384 tokens, but enough to keep a GEMM busy.
_BLOCK = 2**22


def as_it_is(x: Tensor) -> Tensor:
    """Return ``x`` unrounded."""
    return x


@dataclass(frozen=True)
class Arithmetic:
    """The roundings between the steps of attention, by default none.

    Attributes:
        tensor: rounds one of attention's tensors as a GEMM reads it, which sums over dimension -1 or -2 of it, or as a
            result is stored.
        probabilities: rounds the probabilities of the forward pass as the GEMM with the values reads them.
        scores: rounds scores and their gradient between two kernels.
        pointwise: rounds probabilities and the gradient of the scores.
        mean_from_context: whether the softmax's backward computes the mean gradient of a row from the context, as flash
            attention does (Dao et al., arXiv 2205.14135, appendix B.2, equation 4), or from gradients and
            probabilities; the two differ in rounding.
        splits: into how many parts a product of a block splits the summed dimension.
        alone: entered around all steps, so that modes outside do not see them.
    """

    tensor: Callable[[Tensor, AttentionPart, int], Tensor] = lambda x, *_: x
    probabilities: Callable[[Tensor], Tensor] = as_it_is
    scores: Callable[[Tensor], Tensor] = as_it_is
    pointwise: Callable[[Tensor], Tensor] = as_it_is
    mean_from_context: bool = False
    splits: int = 1
    alone: Callable[[], AbstractContextManager[None]] = nullcontext

    def product(self, left: Tensor, right: Tensor, parts: tuple[AttentionPart, AttentionPart]) -> Tensor:
        """Return ``left @ right``, with the operands, which are these parts of attention, as a GEMM reads them."""
        return self._multiply_in_parts(self.tensor(left, parts[0], -1), self.tensor(right, parts[1], -2))

    def context(self, probabilities: Tensor, value: Tensor) -> Tensor:
        """Return ``probabilities @ value``, with the operands as the forward pass's GEMM reads them."""
        return self._multiply_in_parts(self.probabilities(probabilities), self.tensor(value, "qkv", -2))

    def _multiply_in_parts(self, left: Tensor, right: Tensor) -> Tensor:
        parts = zip(left.tensor_split(self.splits, -1), right.tensor_split(self.splits, -2), strict=True)
        first, *others = (a @ b for a, b in parts if a.shape[-1])
        for other in others:
            first += other
        return first


EXACT = Arithmetic()


def are_too_many_scores(query: Tensor, key: Tensor) -> bool:
    """Return whether attention of ``[..., seq, head_dim]`` has more scores than should be held at once."""
    return math.prod(query.shape[:-1]) * key.shape[-2] > WRITTEN_OUT


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    band: Band | None = None,
    scale: float | None = None,
    empty_rows: float = math.nan,
    arithmetic: Arithmetic = EXACT,
) -> Tensor:
    """Compute ``softmax(scale * query key^T + mask) value`` as a single function for a ``TorchFunctionMode``.

    Args:
        query: ``[..., heads, seq_q, head_dim]``.
        key: ``[..., groups, seq_kv, head_dim]``; heads are assigned to the groups in order.
        value: ``[..., groups, seq_kv, value_dim]``.
        mask: broadcasts to ``[..., heads, seq_q, seq_kv]``; either True where a key is seen, or numbers that are added
            to the scores and get a gradient.
        band: the keys that a query sees because of its position; None for all.
        scale: the scale of the scores; None for ``1 / sqrt(head_dim)``.
        empty_rows: the probabilities of a query that sees no key: NaN as in ``softmax``, or 0 as in
            ``F.scaled_dot_product_attention``.
        arithmetic: the roundings between the steps.

    Returns:
        ``[..., heads, seq_q, value_dim]``; differentiable once.
    """
    given = (query, key, value, mask, band, scale, empty_rows, arithmetic)
    if has_torch_function((query, key, value)):
        return handle_torch_function(attention, (query, key, value), *given)
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    if mask is not None:
        mask = _with_four_dimensions(mask, batch if len(batch) > 1 else mask.shape[:-3])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    context: Tensor = _Attention.apply(
        *(_with_four_dimensions(x, batch) for x in (query, key, value)),
        mask,
        _Settings(band or Band(), scale, empty_rows, arithmetic),
    )
    return context.reshape(*query.shape[:-1], value.shape[-1]) if query.dim() < 4 else context.unflatten(0, batch)


def _with_four_dimensions(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Return a tensor as ``[batch, heads, ...]``, with its dimensions before the heads broadcast to ``batch``."""
    x = x.reshape((1,) * (3 - x.dim()) + x.shape)
    return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


@dataclass(frozen=True)
class _Block:
    """A range of a head's queries, and the keys that any of them sees."""

    queries: range
    keys: range

    @property
    def rows(self) -> slice:
        return slice(self.queries.start, self.queries.stop)

    @property
    def columns(self) -> slice:
        return slice(self.keys.start, self.keys.stop)

    def of_mask(self, mask: Tensor) -> Tensor:
        """Return a view of a mask that broadcasts to ``[queries, keys]``."""
        rows, columns = (
            part if size > 1 else slice(None) for part, size in zip((self.rows, self.columns), mask.shape, strict=True)
        )
        return mask[rows, columns]


@dataclass(frozen=True)
class _Settings:
    """The settings that all heads share, as in ``attention``."""

    band: Band
    scale: float
    empty_rows: float
    arithmetic: Arithmetic


@dataclass(frozen=True)
class _Head:
    """The attention of one head, whose tensors have two dimensions, ``[seq, head_dim]``.

    Attributes:
        query: the head's queries.
        key, value: the keys and values of the head's group.
        mask: broadcasts to ``[seq_q, seq_kv]``.
        settings: the settings that all heads share.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    settings: _Settings

    def blocks(self) -> Iterator[_Block]:
        queries, keys = len(self.query), len(self.key)
        height = max(1, _BLOCK // keys)
        for start in range(0, queries, height):
            rows = range(start, min(start + height, queries))
            yield _Block(rows, self.settings.band.visible(rows, keys))

    def probabilities(self, block: _Block) -> Tensor:
        band, arithmetic, empty_rows = self.settings.band, self.settings.arithmetic, self.settings.empty_rows
        product = arithmetic.product(self.query[block.rows], self.key[block.columns].t(), ("qkv", "qkv"))
        scores = arithmetic.scores(product) * self.settings.scale
        if self.mask is not None:
            mask = block.of_mask(self.mask)
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
        if band.hides(block.queries, block.keys):
            scores = scores.masked_fill(band.hidden(block.queries, block.keys, scores.device), -math.inf)
        probabilities = scores.softmax(-1)
        if not math.isnan(empty_rows):
            probabilities.masked_fill_((scores == -math.inf).all(-1, keepdim=True), empty_rows)
        return arithmetic.pointwise(probabilities)

    def attend(self, context: Tensor) -> None:
        """Write the result into ``context``, ``[seq_q, value_dim]``."""
        arithmetic = self.settings.arithmetic
        for block in self.blocks():
            product = arithmetic.context(self.probabilities(block), self.value[block.columns])
            context[block.rows] = arithmetic.tensor(product, "context", -1)

    def differentiate(
        self, gradient: Tensor, context: Tensor | None, mask_gradient: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``query``, ``key`` and ``value``, and add that of the mask to ``mask_gradient``.

        Args:
            gradient: the gradient with respect to the context.
            context: the stored context, if the softmax's mean gradient comes from it.
            mask_gradient: has the mask's shape; None if the mask needs no gradient.
        """
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (self.query, self.key, self.value))
        arithmetic, scale = self.settings.arithmetic, self.settings.scale
        for block in self.blocks():
            rows, columns = block.rows, block.columns
            probabilities, above = self.probabilities(block), gradient[rows]
            of_value[columns] += arithmetic.product(probabilities.t(), above, ("probabilities", "context_gradients"))
            of_probabilities = arithmetic.product(above, self.value[columns].t(), ("context_gradients", "qkv"))
            change = arithmetic.scores(of_probabilities)
            if context is not None:
                mean = (arithmetic.tensor(above, "context_gradients", -1) * context[rows]).sum(-1, keepdim=True)
                of_scores = probabilities * (change - mean)
            else:
                mean = (change * probabilities).sum(-1, keepdim=True)
                of_scores = arithmetic.pointwise(probabilities * (change - mean))
            if mask_gradient is not None:
                part = block.of_mask(mask_gradient)
                part += of_scores.sum_to_size(part.shape)
            of_scores = of_scores * scale
            of_query[rows] = arithmetic.product(of_scores, self.key[columns], ("score_gradients", "qkv"))
            of_key[columns] += arithmetic.product(of_scores.t(), self.query[rows], ("score_gradients", "qkv"))
        of_query, of_key, of_value = (arithmetic.tensor(x, "qkv_gradients", -1) for x in (of_query, of_key, of_value))
        return of_query, of_key, of_value


def _of_head(x: Tensor, sample: int, head: int, heads: int) -> Tensor:
    """Return a view of one head, ``[seq, ...]``, of ``[batch, groups, seq, ...]``, where batch or groups may be 1."""
    return x[sample % x.shape[0], head // (heads // x.shape[1])]


def _iterate_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: _Settings
) -> Iterator[tuple[tuple[int, int, int], _Head]]:
    """Yield every head of every sample, with the indices by which ``_of_head`` finds its part of a tensor."""
    samples, heads = query.shape[:2]
    for at in product(range(samples), range(heads), (heads,)):
        q, k, v = (_of_head(x, *at) for x in (query, key, value))
        yield at, _Head(q, k, v, None if mask is None else _of_head(mask, *at), settings)


class _Attention(torch.autograd.Function):
    """The autograd function of ``attention``; all tensors have four dimensions."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: _Settings
    ) -> Tensor:
        samples, heads, queries, _ = query.shape
        # In this layout, the heads can be joined after attention without a copy.
        context = value.new_empty(samples, queries, heads, value.shape[-1]).transpose(1, 2)
        with settings.arithmetic.alone():
            for at, head in _iterate_heads(query, key, value, mask, settings):
                head.attend(_of_head(context, *at))
        ctx.save_for_backward(query, key, value, mask, context if settings.arithmetic.mean_from_context else None)
        ctx.settings = settings
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, context = ctx.saved_tensors
        settings: _Settings = ctx.settings
        gradients = [torch.zeros_like(x) for x in (query, key, value)]
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        with settings.arithmetic.alone():
            for at, head in _iterate_heads(query, key, value, mask, settings):
                stored, below = (None if x is None else _of_head(x, *at) for x in (context, of_mask))
                parts = head.differentiate(_of_head(gradient, *at), stored, below)
                for whole, part in zip(gradients, parts, strict=True):
                    _of_head(whole, *at).add_(part)
        return *gradients, of_mask, None
