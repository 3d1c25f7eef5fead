"""The parts of attention that do not depend on precision: masks, scores, and the memory layout of sequences.

``flash`` (FP16, BF16) and ``flash_fp8`` both build on this, and compute a block of queries at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from te_on_cpu import cuda
from te_on_cpu.enums import NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout

# The keys that a query attends to, and ALiBi's distance penalty.
#
# Follows how TransformerEngine 2.20.2 describes masks to cuDNN
# (``common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu``) and to its users (``get_full_mask`` and ``get_alibi`` in
# ``attention/dot_product_attention/utils.py``).


@dataclass(frozen=True)
class Band:
    """The keys that query i attends to: ``i + offset - left`` to ``i + offset + right``, both included.

    Attributes:
        left: keys before the diagonal; None for all.
        right: keys after the diagonal; None for all.
        bottom_right: whether the diagonal ends at the last query and the last key (the offset is keys minus queries);
            otherwise it starts at the first ones (the offset is 0).
    """

    left: int | None
    right: int | None
    bottom_right: bool


def band_of(mask_type: int, window: Sequence[int], bottom_right: bool) -> Band:
    """Return the band of an ``NVTE_Mask_Type`` and a sliding window ``(left, right)``, where -1 stands for all keys."""
    left, right = (None if side == -1 else side for side in window)
    return Band(left, 0 if is_causal(mask_type) else right, bottom_right)


def is_causal(mask_type: int) -> bool:
    return "CAUSAL" in NVTE_Mask_Type(mask_type).name


def is_padding(mask_type: int) -> bool:
    """Return whether the sequences of a batch may differ in length."""
    return "PADDING" in NVTE_Mask_Type(mask_type).name


def visible_keys(band: Band, rows: range, queries: int, keys: int) -> range:
    """Return the keys that at least one query of ``rows`` may attend to, out of ``queries`` and ``keys`` altogether."""
    offset = keys - queries if band.bottom_right else 0
    first = 0 if band.left is None else max(0, rows.start + offset - band.left)
    last = keys if band.right is None else min(keys, rows.stop + offset + band.right)
    return range(first, max(first, last))


def hidden_keys(band: Band, rows: range, columns: range, queries: int, keys: int) -> Tensor | None:
    """Return a mask ``[rows, columns]``, True where a query must not see a key; None if nothing is hidden."""
    offset = keys - queries if band.bottom_right else 0
    left_is_free = band.left is None or columns.start >= rows.stop - 1 + offset - band.left
    right_is_free = band.right is None or columns.stop - 1 <= rows.start + offset + band.right
    if left_is_free and right_is_free:
        return None
    distance = torch.arange(columns.start, columns.stop) - torch.arange(rows.start, rows.stop)[:, None] - offset
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if band.left is not None:
        hidden |= distance < -band.left
    if band.right is not None:
        hidden |= distance > band.right
    return hidden


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes, ``[heads]`` FP32.

    They are ``2^(-8 i / n)`` for i = 1..n, with every other step of a finer series for heads beyond a power of two n
    (Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409, and their published code).
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = torch.pow(2.0 ** (-8.0 / power), torch.arange(1, power + 1))
    finer = torch.pow(2.0 ** (-4.0 / power), torch.arange(1, 2 * (heads - power) + 1, 2))
    return torch.cat([slopes, finer]).float()


def alibi(slopes: Tensor, rows: range, columns: range) -> Tensor:
    """Return ALiBi's penalty, ``[heads, rows, columns]`` FP32: minus slope times the distance between query and key.

    Query 0 and key 0 are at distance 0, because fused attention aligns ALiBi top left (TE's table of biases).
    """
    distance = torch.arange(columns.start, columns.stop) - torch.arange(rows.start, rows.stop)[:, None]
    return distance.abs().neg() * slopes[:, None, None]


# Attention scores of one block of queries, which the kernels of all precisions share.


# The number of FP32 scores in memory at a time. Attention with no more scores is a single block; larger attention is
# split into blocks of a few heads with enough queries to keep matrix products fast. A half or a quarter of both numbers
# took longer (4,096 tokens, 8 heads of 128, an AMD EPYC).
_SCORES_IN_A_BLOCK, _QUERIES_IN_A_BLOCK = 1 << 20, 256


@dataclass(frozen=True)
class Attention:
    """Hold the parameters that turn queries and keys into probabilities.

    Attributes:
        scale: factor of ``q k``.
        band: the keys that a query attends to.
        alibi: whether ALiBi's penalty is added.
        bias: added to the scaled scores, ``[batch or 1, heads or 1, queries or 1, keys]``; None for no bias.
        sink: one more score for each head, that of a key without a value, ``[heads]`` FP32; None for no sink.
        dropout: the chance that an attention weight is dropped; the others are multiplied by ``1 / (1 - dropout)``.
        seed: the seed of the dropout mask, the same in forward and backward.
        modify: maps the scaled scores of a block, ``[entries, heads, rows, columns]`` FP32, to others; None for none.
        modify_grad: maps the gradient of such scores to that of the scaled ones, once they are known; None for none.
    """

    scale: float
    band: Band
    alibi: bool = False
    bias: Tensor | None = None
    sink: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    modify: Callable[[Tensor, Block], Tensor] | None = None
    modify_grad: Callable[[Tensor, Block], Tensor] | None = None


@dataclass(frozen=True)
class Block:
    """Some queries of some heads, and the keys that at least one of them may see.

    Attributes:
        entries: entries of the batch.
        heads: query heads.
        groups: the GQA groups of these heads.
    """

    entries: slice
    heads: slice
    groups: slice
    rows: range
    columns: range

    @property
    def of_queries(self) -> tuple[slice, slice, slice]:
        """Return the index into a tensor that has a row for each query."""
        return self.entries, self.heads, slice(self.rows.start, self.rows.stop)

    @property
    def of_keys(self) -> tuple[slice, slice, slice]:
        """Return the index into a tensor that has a row for each key."""
        return self.entries, self.groups, slice(self.columns.start, self.columns.stop)

    @property
    def of_keys_by_head(self) -> tuple[slice, slice, slice]:
        """Return the index into a tensor that has a row for each key and query head."""
        return self.entries, self.heads, slice(self.columns.start, self.columns.stop)


@dataclass(frozen=True)
class Gradients:
    """FP32 gradients in the shapes of the inputs; ``bias`` and ``sink`` are None if the attention has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sink: Tensor | None


def blocks(attention: Attention, query: Tensor, key: Tensor) -> Iterator[Block]:
    """Yield blocks of queries with the keys that they may see; small attention is a single block."""
    batch, heads, queries, _ = query.shape
    groups, keys = key.shape[1:3]
    rows_at_once, heads_at_once = queries, batch * heads
    if heads_at_once * queries * keys > _SCORES_IN_A_BLOCK:
        rows_at_once = max(1, min(queries, _QUERIES_IN_A_BLOCK, _SCORES_IN_A_BLOCK // keys))
        heads_at_once = max(1, _SCORES_IN_A_BLOCK // (rows_at_once * keys))
    for entries, of_queries, of_keys in _shares(batch, heads, groups, heads_at_once):
        for start in range(0, queries, rows_at_once):
            rows = range(start, min(start + rows_at_once, queries))
            yield Block(entries, of_queries, of_keys, rows, visible_keys(attention.band, rows, queries, keys))


def _shares(batch: int, heads: int, groups: int, heads_at_once: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield entries of the batch, query heads and their groups, in whole entries or groups where they fit."""
    in_group = heads // groups
    step = min(heads, heads_at_once // in_group * in_group or math.gcd(in_group, heads_at_once))
    entries = max(1, heads_at_once // heads)
    for entry in range(0, batch, entries):
        for head in range(0, heads, step):
            stop = min(head + step, heads)
            own = slice(head // in_group, -(-stop // in_group))
            yield slice(entry, min(entry + entries, batch)), slice(head, stop), own


def of_block(query: Tensor, key: Tensor, attention: Attention, block: Block) -> Tensor:
    """Return scaled and biased scores, ``[entries, heads, rows, columns]`` FP32; hidden keys get minus infinity.

    Args:
        query: all queries.
        key: all keys, FP32.
    """
    queries, keys = query.shape[2], key.shape[2]
    rows, columns = in_fp32(query[block.of_queries]), key[block.of_keys]
    scores = times_keys(rows, columns.mT).mul_(attention.scale)
    if attention.modify is not None:
        scores = attention.modify(scores, block)
    if attention.bias is not None:
        scores += slice_for_block(attention.bias, block)
    if attention.alibi:
        scores += alibi(alibi_slopes(query.shape[1])[block.heads], block.rows, block.columns)
    for part in _edges(attention.band, block, queries, keys):
        hidden = hidden_keys(attention.band, block.rows, part, queries, keys)
        if hidden is not None:
            scores[..., part.start - block.columns.start : part.stop - block.columns.start].masked_fill_(
                hidden, -math.inf
            )
    return scores


def _edges(band: Band, block: Block, queries: int, keys: int) -> Iterator[range]:
    """Yield the keys at the left and at the right of a block that may be hidden from some of its queries."""
    offset = keys - queries if band.bottom_right else 0
    columns, rows = block.columns, block.rows
    left = (
        columns.start
        if band.left is None
        else min(max(rows.stop - 1 + offset - band.left, columns.start), columns.stop)
    )
    right = columns.stop if band.right is None else min(max(rows.start + offset + band.right + 1, left), columns.stop)
    yield range(columns.start, left)
    yield range(right, columns.stop)


def add_bias_grad(bias_grad: Tensor, score_grad: Tensor, block: Block) -> None:
    """Add the gradient of a block's scores to that of the bias, summed over the dimensions that share a bias."""
    part = slice_for_block(bias_grad, block)
    part += score_grad.sum_to_size(part.shape)


def slice_for_block(tensor: Tensor, block: Block) -> Tensor:
    """Return a view of the part of a tensor, ``[batch, heads, queries, keys]`` or 1 for each, that a block reads."""
    everything, of_block = slice(None), (*block.of_queries, block.of_keys[2])
    return tensor[tuple(own if size > 1 else everything for own, size in zip(of_block, tensor.shape, strict=True))]


def in_fp32(tensor: Tensor) -> Tensor:
    """Return a contiguous FP32 copy, or the tensor itself if it is already contiguous FP32."""
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


def grouped(tensor: Tensor, groups: int) -> Tensor:
    """Reshape ``[batch, heads, rows, n]`` to ``[batch, groups, heads of a group * rows, n]``."""
    return tensor.reshape(tensor.shape[0], groups, -1, tensor.shape[-1])


def times_keys(of_heads: Tensor, of_groups: Tensor) -> Tensor:
    """Multiply ``[batch, heads, rows, k]`` by ``[batch, groups, k, n]``, each head by its group's matrix."""
    product = grouped(of_heads, of_groups.shape[1]) @ of_groups
    return product.view(*of_heads.shape[:3], -1)


def sink_of(attention: Attention, block: Block) -> Tensor:
    """Return the scores of the sinks of a block's heads, ``[1, heads, 1, 1]``.

    Without sinks they are minus infinity, which changes nothing.
    """
    if attention.sink is None:
        return torch.full((1, 1, 1, 1), -math.inf)
    return attention.sink[block.heads].view(1, -1, 1, 1)


def generator_of(attention: Attention) -> torch.Generator:
    """Return the generator that the dropout masks are drawn from, block by block."""
    return torch.Generator().manual_seed(attention.seed)


def drop(weights: Tensor, attention: Attention, masks_from: torch.Generator) -> Tensor | None:
    """Drop entries of ``weights`` in place, and return the factor of each, or None without dropout."""
    if attention.dropout == 0.0:
        return None
    kept = torch.empty_like(weights).bernoulli_(1 - attention.dropout, generator=masks_from)
    kept *= 1 / (1 - attention.dropout)
    weights *= kept
    return kept


def zero_gradients(query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Gradients:
    """Return FP32 zeros in which to accumulate gradients."""
    return Gradients(
        query=torch.zeros(query.shape),
        key=torch.zeros(key.shape),
        value=torch.zeros(value.shape),
        bias=None if attention.bias is None else torch.zeros(attention.bias.shape),
        sink=None if attention.sink is None else torch.zeros(attention.sink.shape),
    )


# The place of a batch's sequences in memory, for each of TransformerEngine's layouts of queries, keys and values.
#
# Layouts are named as in ``common/include/transformer_engine/fused_attn.h`` (TE 2.20.2): b is batch, s sequence, t the
# tokens of all sequences one after the other, h heads, d features; a 3 or 2 means that QKV or KV share a tensor.


@dataclass(frozen=True)
class Span:
    """Locate a sequence, or all sequences of a batch, in a tensor.

    Attributes:
        format: ``bshd``, ``sbhd``, ``bhsd``, ``thd``, or ``bhs`` and ``th`` for tensors with one number per query and
            head.
        batch: the entries of the batch; None in ``thd``.
        start: the first token in ``thd``, otherwise 0.
        length: the number of tokens, of each sequence if there are several.
        pages: the pages of the sequence, ``[pages]``, if ``format`` describes pages; else None.
    """

    format: str
    batch: slice | None
    start: int
    length: int
    pages: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return ``[batch, heads, length, features]``: a view, or a copy if the sequence lies on pages."""
        tokens = slice(self.start, self.start + self.length)
        if self.pages is not None:
            by_page = tensor if self.format == "bshd" else tensor.transpose(0, 1)
            return by_page[self.pages].flatten(0, 1)[tokens].transpose(0, 1).unsqueeze(0)
        match self.format:
            case "bshd":
                return tensor[self.batch, tokens].transpose(1, 2)
            case "sbhd":
                return tensor[tokens, self.batch].permute(1, 2, 0, 3)
            case "bhs" | "bhsd":
                return tensor[self.batch, :, tokens]
            case _:
                return tensor[tokens].transpose(0, 1).unsqueeze(0)

    def in_format(self, name: str) -> Span:
        """Return the same sequence in a tensor of another format."""
        return self if name == self.format else replace(self, format=name)


@dataclass(frozen=True)
class Layout:
    """Describe how queries, keys and values lie in memory.

    Attributes:
        query: ``bshd``, ``sbhd``, ``thd`` or ``bhsd``.
        key: one of the same formats, for keys and values; that of a page if ``paged``.
        shared: ``3hd`` or ``h3d`` if Q, K and V share a tensor, ``2hd`` or ``h2d`` if K and V do, otherwise empty.
        paged: whether keys and values lie on pages.
    """

    query: str
    key: str
    shared: str
    paged: bool


@dataclass(frozen=True)
class Sequences:
    """Sequences of equal length that are computed together: one of a batch, or a whole batch without padding."""

    query: Span
    key: Span
    per_query: Span


def parse_layout(layout: int) -> Layout:
    """Return the layout of ``NVTE_QKV_Layout``.

    Raises:
        ValueError: for a layout that is not set.
    """
    name = NVTE_QKV_Layout(layout).name.removeprefix("NVTE_")
    if name == "QKV_Layout_NOT_SET":
        raise ValueError("attention needs a layout of queries, keys and values, but none is set")
    parts = name.removeprefix("Paged_KV_").lower().split("_")
    shared = re.search(r"[23]hd|h[23]d", parts[-1])
    formats = [re.sub(r"\d", "", part) for part in parts]
    return Layout(formats[0], formats[-1], shared.group() if shared else "", name.startswith("Paged_KV_"))


def format_name(qkv_format: int, default: str) -> str:
    """Return the name of an ``NVTE_QKV_Format``, such as ``bshd``; ``default`` if it is not set."""
    if qkv_format == NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET:
        return default
    return NVTE_QKV_Format(qkv_format).name.removeprefix("NVTE_").lower()


def reshaped(shape: Sequence[int], old: str, new: str) -> list[int]:
    """Return the shape in format ``new`` of a tensor whose shape in format ``old`` is ``shape``.

    Raises:
        ValueError: if exactly one of the formats is ``thd``, whose shape does not contain the batch size.
    """
    if old == new:
        return list(shape)
    if set(old) != set(new):
        raise ValueError(f"attention cannot put a tensor of format {old} into format {new}")
    sizes = dict(zip(old, shape, strict=True))
    return [sizes[axis] for axis in new]


def gradient_buffers(layout: Layout, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Return zeros for the gradients of Q, K and V, in their shapes, and in one tensor if the layout shares one."""
    apart = 0 if "3" in layout.shared else 1 if "2" in layout.shared else 3
    buffers = [torch.zeros(shape, dtype=dtype) for shape in shapes[:apart]]
    if apart < 3:
        axis = -3 if layout.shared.endswith("hd") else -2
        whole = [*shapes[apart]]
        whole.insert(len(whole) + axis + 1, 3 - apart)
        buffers.extend(torch.zeros(whole, dtype=dtype).unbind(axis))
    return buffers


@dataclass(frozen=True)
class Lengths:
    """Hold the lengths and starts of a batch's sequences, in tokens, with one entry for each sequence.

    Attributes:
        length: number of tokens.
        start: index of the first token, used in ``thd`` only.
    """

    length: list[int]
    start: list[int]


def lengths(cumulative: Tensor, padded: Tensor | None) -> Lengths:
    """Convert cumulative lengths ``[batch + 1]``; ``padded`` also counts the padding between sequences."""
    start = (cumulative if padded is None else padded)[:-1].tolist()
    return Lengths(cumulative.diff().tolist(), start)


def whole_batch(layout: Layout, query: Tensor, key: Tensor) -> Iterator[Sequences]:
    """Yield all sequences of a batch without padding as one item."""
    everything = slice(None)
    queries, keys = query.shape[layout.query.index("s")], key.shape[layout.key.index("s")]
    yield Sequences(
        Span(layout.query, everything, 0, queries),
        Span(layout.key, everything, 0, keys),
        Span("bhs", everything, 0, queries),
    )


def each_sequence(layout: Layout, query: Lengths, key: Lengths, page_table: Tensor | None) -> Iterator[Sequences]:
    """Yield one sequence after the other, at its own length; those without queries are left out."""
    for entry, (queries, keys) in enumerate(zip(query.length, key.length, strict=True)):
        if queries == 0:
            continue
        batch = slice(entry, entry + 1)
        query_start = query.start[entry] if layout.query == "thd" else 0
        key_start = key.start[entry] if layout.key == "thd" else 0
        yield Sequences(
            Span(layout.query, batch, query_start, queries),
            Span(layout.key, batch, key_start, keys, None if page_table is None else page_table[entry].long()),
            Span("th", batch, query_start, queries) if is_packed(layout) else Span("bhs", batch, 0, queries),
        )


def is_packed(layout: Layout) -> bool:
    """Return whether the statistics of each query are packed as the queries are, which they are not on sm_120."""
    return layout.query == "thd" and cuda.get_device_capability() != (12, 0)


# A call of fused attention in any precision: its sequences and layouts, and buffers for its results.
#
# Follows ``csrc/extensions/attention.cpp`` of TransformerEngine 2.20.2.


@dataclass(frozen=True)
class Problem:
    """Hold the parameters that forward and backward share, in any precision.

    Attributes:
        attention: without bias and seed, which ``parts`` sets for each sequence.
        bias: the bias of the whole batch, or None.
        seed: the seed of the first dropout mask.
        cumulative: cumulative lengths of queries and of keys, ``[batch + 1]`` INT32 each.
        padded: the same, but including the padding between sequences, or None.
        output_format: the format of O: ``bshd``, ``sbhd`` or ``thd``.
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
    """Describe how gradients lie in memory: the incoming gradient of O, and the outgoing ones of Q, K and V."""

    output: str
    inputs: Layout


def parts(problem: Problem, query: Tensor, key: Tensor) -> Iterator[tuple[Sequences, Attention]]:
    """Yield the sequences to compute, each with its part of the bias and its own seed."""
    if problem.is_padded:
        query_lengths = lengths(problem.cumulative[0], problem.padded[0])
        key_lengths = lengths(problem.cumulative[1], problem.padded[1])
        found = each_sequence(problem.layout, query_lengths, key_lengths, problem.page_table)
    else:
        found = whole_batch(problem.layout, query, key)
    for number, sequences in enumerate(found):
        bias = None if problem.bias is None else part_of_bias(problem.bias, sequences)
        yield sequences, replace(problem.attention, bias=bias, seed=problem.seed + number)


def part_of_bias(bias: Tensor, sequences: Sequences) -> Tensor:
    """Return a view of the bias of these sequences, ``[batch or 1, heads or 1, queries or 1, keys]``."""
    if bias.shape[0] > 1:
        bias = bias[sequences.query.batch]
    return bias[:, :, : sequences.query.length, : sequences.key.length]


def new_output(problem: Problem, query: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised O, or zeros where padding will stay."""
    shape = reshaped((*query.shape[:-1], value.shape[-1]), problem.layout.query, problem.output_format)
    return torch.zeros(shape, dtype=dtype) if problem.is_padded else torch.empty(shape, dtype=dtype)


def new_statistics(problem: Problem, query: Tensor, max_seqlen_q: int) -> Tensor:
    """Return FP32 minus infinity, which padding keeps, in the shape that cuDNN 9.6 and later use.

    The shape is ``[batch, heads, max_seqlen_q, 1]``, or ``[tokens, heads, 1]`` in ``thd`` (but on sm_120).
    """
    layout = problem.layout.query
    if is_packed(problem.layout):
        shape = [*query.shape[:2], 1]
    else:
        batch = len(problem.cumulative[0]) - 1 if layout == "thd" else query.shape[layout.index("b")]
        shape = [batch, query.shape[layout.index("h")], max_seqlen_q, 1]
    return torch.full(shape, float("-inf"))


def new_gradients(
    problem: Problem, layout: Layout, qkv: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return zeros for the gradients of Q, K and V in ``layout``, in one tensor if it shares one."""
    old = (problem.layout.query, problem.layout.key, problem.layout.key)
    new = (layout.query, layout.key, layout.key)
    shapes = [reshaped(tensor.shape, *formats) for tensor, *formats in zip(qkv, old, new, strict=True)]
    return gradient_buffers(layout, shapes, dtype)


def in_gradients(gradients: list[Tensor], layout: Layout, sequences: Sequences) -> list[Tensor]:
    """Return the views of ``new_gradients`` that belong to these sequences, ``[batch, heads, seq, features]``."""
    places = (sequences.query.in_format(layout.query), *(2 * [sequences.key.in_format(layout.key)]))
    return [place.of(gradient) for place, gradient in zip(places, gradients, strict=True)]
