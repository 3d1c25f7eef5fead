"""Masks: causal masks, windows, prefixes, packed sequences and joined streams, and what ports make of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.corpus.small import Host, normal, twins
from parity.case.case import Rng

HEADS, SEQ, HEAD_DIM, QUERIES = 2, 32, 16, 8
LENGTHS = (7, 12, 3, 10)
CAUSAL = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
DISTANCE = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
SEGMENT = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
CHUNK = torch.arange(SEQ) // 8
BAND = DISTANCE.abs() <= 4
LAST = DISTANCE[-QUERIES:]  # of the last queries, which are fewer than the keys


class Reference(nn.Module):
    """Attention that hides what ``visible`` leaves out, before or after it scales the scores."""

    def __init__(self, visible: Tensor, masks_first: bool = False) -> None:
        super().__init__()
        self.visible, self.masks_first = visible, masks_first

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = query @ key.transpose(-2, -1)
        least = torch.finfo(scores.dtype).min
        if self.masks_first:
            scores = torch.where(self.visible, scores, least) / math.sqrt(HEAD_DIM)
        else:
            scores = (scores / math.sqrt(HEAD_DIM)).masked_fill(~self.visible, least)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


THREE = normal(*[(2, SEQ, HEADS, HEAD_DIM)] * 3)


def against_te(
    name: str, module: Callable[..., nn.Module], *args: Any, inputs: Callable[[Rng], Any] = THREE, **port: Any
) -> Host:
    """Return the host of ``module(*args)``, ported to TE's attention with these options and this ``call``."""
    usual = dict(qkv_format="bshd", attention_dropout=0.0, attn_mask_type="causal")
    return Host(
        name,
        lambda **_: module(*args),
        lambda te, call=None, **options: te.DotProductAttention(HEADS, HEAD_DIM, **usual | options),
        inputs,
        port,
        options=lambda call=None, **_: dict(call_candidate=call),
    )


UNMASKED: Mapping[str, Any] = dict(attn_mask_type="no_mask")
ONE = against_te("causal", Reference, CAUSAL)
MASKS_FIRST = against_te("mask_before_scale", Reference, CAUSAL, True)
BOTH_SIDES = against_te("window_to_both_sides", Reference, BAND, window_size=(4, 4), **UNMASKED)
PREFIX = against_te("prefix", Reference, CAUSAL | (torch.arange(SEQ) < 9))


def view_as_sequence_first(core: nn.Module, *heads: Tensor) -> Tensor:
    """Call TE's attention with batch and sequence mistaken for each other by a view."""
    return core(*(x.reshape(SEQ, 2, HEADS, HEAD_DIM) for x in heads)).reshape(2, SEQ, -1)


class MaskOfEachRow(nn.Module):
    """Attention as in transformers, which makes the mask of one row by other calls than that of several rows."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        visible = (CAUSAL & (DISTANCE > -5))[None, None]
        if len(query) > 1:
            visible = visible.expand(len(query), 1, SEQ, SEQ)
        return F.scaled_dot_product_attention(query, key, value, visible).transpose(1, 2).flatten(2)


OF_EACH_ROW = against_te("mask_of_each_row", MaskOfEachRow, window_size=(4, 0))


class TwoAttentions(nn.Module):
    """Two attentions, a causal one and one without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Reference(CAUSAL), Reference(torch.ones_like(CAUSAL))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.second(self.first(query, key, value).unflatten(-1, (HEADS, -1)), key, value)


def twice(second: str) -> Any:
    """Return a function that calls TE's attention twice, the second time with this mask."""

    def call(core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return core(core(query, key, value).unflatten(-1, (HEADS, -1)), key, value, attn_mask_type=second)

    return call


TWO = against_te("two_attentions", TwoAttentions, call=twice("no_mask"))


class Biased(nn.Module):
    """Attention without a scale, which adds a bias to its scores in place, as T5 does."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = query @ key.transpose(-2, -1)
        scores += -0.1 * DISTANCE.abs()
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def call_with_bias(core: nn.Module, *heads: Tensor) -> Tensor:
    bias = -0.1 * DISTANCE.abs()[None, None].expand(1, HEADS, -1, -1).to(heads[0].dtype)
    return core(*heads, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)


BIASED = against_te("bias_added_in_place", Biased, call=call_with_bias, softmax_scale=1.0, **UNMASKED)

# Queries that are the last of more keys, as after a prompt; windows are counted from each query's own key.


def of_last_queries(name: str, visible: Tensor, **port: Any) -> Host:
    keys = (2, SEQ, HEADS, HEAD_DIM)
    inputs = normal((2, QUERIES, HEADS, HEAD_DIM), keys, keys)
    return against_te(name, Reference, visible, inputs=inputs, attn_mask_type="causal_bottom_right", **port)


LAST_QUERIES = of_last_queries("last_queries", LAST <= 0)
LAST_IN_WINDOW = of_last_queries("last_queries_in_a_window", (LAST <= 0) & (LAST >= -9), window_size=(9, 0))
LAST_UNMASKED = of_last_queries("last_queries_unmasked", LAST < SEQ)

# Packed sequences of each row of a batch.


def sequences(lengths: tuple[int, ...], mask: str) -> dict[str, Any]:
    """Return the arguments that tell TE's attention of sequences of these lengths in one row."""
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    return dict(
        qkv_format="thd",
        attn_mask_type=mask,
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def packed(*lengths: int, mask: str = "padding_causal") -> Any:
    """Return a function that calls TE's attention with each row of the batch packed as sequences of these lengths."""

    def call(core: nn.Module, *heads: Tensor) -> Tensor:
        rows = [core(*(x[i].clone() for x in heads), **sequences(lengths, mask)) for i in range(len(heads[0]))]
        return torch.stack(rows).flatten(2)

    return call


PACKED = against_te(
    "packed_rows", Reference, (SEGMENT[:, None] == SEGMENT) & CAUSAL, call=packed(*LENGTHS), qkv_format="bshd"
)
CHUNKS = against_te("chunks", Reference, (CHUNK[:, None] == CHUNK) & CAUSAL, call=packed(8, 8, 8, 8))

# Rows of a batch, padded or not, which a port packs as sequences of one row.


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Return ``[..., tokens, heads, head_dim]`` rotated by these positions."""
    angles = positions[:, None, None] * 100.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


WHOLE, SHORTER = (torch.arange(SEQ) < torch.tensor([length, SEQ])[:, None] for length in (SEQ, 19))


class TokensOf(nn.Module):
    """Attention to a batch, without what it computes for padding; rotary positions, if any, begin again in each row."""

    def __init__(self, tokens: Tensor, visible: Tensor, rotates: bool = False) -> None:
        super().__init__()
        self.attention, self.tokens, self.rotates = Reference(tokens[:, None, None] & visible), tokens, rotates

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.rotates:
            query, key = (turned(x, torch.arange(SEQ)) for x in (query, key))
        return self.attention(query, key, value)[self.tokens]


def in_one_row(
    *lengths: int, tokens: Tensor = SHORTER, causal: bool = True, positions: Tensor | None = None, **options: Any
) -> Any:
    """Return a function that calls TE's attention with these tokens of a batch, as sequences of these lengths."""

    def call(core: nn.Module, *heads: Tensor) -> Tensor:
        query, key, value = (x[tokens] for x in heads)
        if positions is not None:
            query, key = turned(query, positions), turned(key, positions)
        return core(query, key, value, **sequences(lengths, "padding_causal" if causal else "padding"), **options)

    return call


RUN_ON, BEGIN_AGAIN = torch.arange(int(SHORTER.sum())), torch.arange(SEQ).expand(2, SEQ)[SHORTER]
ROWS_FULL = against_te("rows_in_one", TokensOf, SHORTER, torch.ones_like(CAUSAL), call=in_one_row(19, 32, causal=False))
ROWS_CAUSAL = against_te("causal_rows_in_one", TokensOf, SHORTER, CAUSAL, call=in_one_row(19, 32))
ROWS_WHOLE = against_te("whole_rows_in_one", TokensOf, WHOLE, CAUSAL, call=in_one_row(32, 32, tokens=WHOLE))
ROWS_IN_WINDOW = against_te(
    "rows_in_one_in_a_window", TokensOf, SHORTER, CAUSAL & BAND, call=in_one_row(19, 32, window_size=(4, 0))
)
ROWS_TURNED = against_te(
    "turned_rows_in_one", TokensOf, SHORTER, CAUSAL, True, call=in_one_row(19, 32, positions=BEGIN_AGAIN)
)
OF_ROWS = "cu_seqlens=[0, 19, 51] in format thd, or its mask as an arbitrary one; the port has"

# Packed sequences without a batch.


class OneByOne(nn.Module):
    """Causal attention in each sequence, computed in a loop, perhaps with a batch of one for each."""

    def __init__(self, *lengths: int, batched: bool = False) -> None:
        super().__init__()
        self.borders, self.batched = [0, *itertools.accumulate(lengths)], batched

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for start, end in zip(self.borders, self.borders[1:], strict=False):
            own: Any = (None, slice(start, end)) if self.batched else slice(start, end)
            query, key, value = (x[own].transpose(-3, -2) for x in (q, k, v))
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            contexts.append(context.transpose(-3, -2).flatten(-2))
        return torch.cat(contexts, -2).flatten(0, -2)


class InBatchesOfOne(OneByOne):
    def __init__(self, *lengths: int) -> None:
        super().__init__(*lengths, batched=True)


class AtOnce(nn.Module):
    """The same attention, computed at once behind a mask."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.mask = (number[:, None] == number).tril()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask).transpose(0, 1).flatten(1)


def in_sequences(*lengths: int, mask: str = "padding_causal") -> Any:
    """Return a function that calls TE's attention with sequences of these lengths."""
    return lambda core, *heads: core(*heads, **sequences(lengths, mask))


def of_sequences(name: str, module: Callable[..., nn.Module], *lengths: int) -> Host:
    inputs = normal(*[(sum(lengths), HEADS, HEAD_DIM)] * 3)
    return against_te(name, module, *lengths, inputs=inputs, call=in_sequences(*lengths), qkv_format="thd")


ONE_BY_ONE, IN_BATCHES, AT_ONCE = (
    of_sequences(f"sequences_{name}", module, 7, 12, 5, 16)
    for name, module in (("one_by_one", OneByOne), ("in_batches_of_one", InBatchesOfOne), ("at_once", AtOnce))
)
A_SINGLE_ONE = of_sequences("single_sequence", OneByOne, 40)

# Documents of different lengths in each row of the batch, where the first row ends with padding or not.

DOCUMENTS = torch.stack((SEGMENT, torch.arange(SEQ) // 13))
SAME = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])[:, None]
PADDED = torch.stack((torch.arange(SEQ) >= SEQ - 4, torch.zeros(SEQ, dtype=torch.bool)))[:, None, None]


def show(visible: Tensor, padding: Tensor = PADDED) -> Any:
    """Return a function that gives TE's attention a mask that shows these keys."""
    return lambda core, *heads: core(*heads, attention_mask=~(visible & ~padding))


def of_documents(name: str, visible: Tensor, padding: Tensor = PADDED) -> Host:
    call = show(visible, padding)
    return against_te(name, Reference, visible & ~padding, attn_mask_type="arbitrary", call=call)


WITHIN, CAUSAL_WITHIN, NEAR_WITHIN = (
    of_documents(f"documents_{name}", visible)
    for name, visible in (("alone", SAME), ("causal", SAME & CAUSAL), ("in_a_window", SAME & BAND))
)
WITHOUT_PADDING = of_documents("documents_without_padding", SAME & BAND, torch.zeros_like(PADDED))


# TE's unfused attention gives hidden keys the score -10000, which hides nothing if all other scores are below it.


class Negated(nn.Module):
    """Attention whose queries are the negated keys times the scale, so that large scales give very negative scores."""

    def __init__(self, core: Callable[..., Tensor], scale: float) -> None:
        super().__init__()
        self.core, self.scale = core, scale

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        return self.core(-self.scale * x, x, value)


def attend_causally(*heads: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in heads)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


LOW, VERY_LOW = (
    Host(
        f"scores_{name}",
        lambda scale: Negated(attend_causally, scale),
        lambda te, scale: Negated(te.DotProductAttention(2, 32, qkv_format="bshd", attention_dropout=0.0), scale),
        normal(*[(2, 4, 2, 32)] * 2),
        dict(scale=scale),
        probe=None,
        precisions=("fp32",),
    )
    for name, scale in (("above_what_hides_keys", 10.0), ("below_what_hides_keys", 1e4))
)

# Two streams whose queries see the keys of both.

WIDTH, HEAD = 64, 32


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class TwoStreams(nn.Module):
    """MMDiT's attention, in which the queries of both streams see the keys of both."""

    def __init__(self, linear: Any, alone: tuple[str, ...] = (), sees_text: bool = True) -> None:
        super().__init__()
        self.alone, self.sees_text = alone, sees_text
        self.of_image, self.of_text = linear(WIDTH, 3 * WIDTH), linear(WIDTH, 3 * WIDTH)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        of_image, of_text = (
            layer(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
            for layer, x in ((self.of_image, image), (self.of_text, text))
        )
        q, k, v = (torch.cat(parts, 2) for parts in zip(of_image, of_text, strict=True))
        if not self.sees_text:
            k, v = of_image[1], of_image[2]
        new_image, new_text = attended(q, k, v).split((image.shape[1], text.shape[1]), 1)
        if "image" in self.alone:
            new_image = attended(*of_image)
        if "text" in self.alone:
            new_text = attended(*of_text)
        return image + new_image, text + new_text


STREAMS = twins(TwoStreams, normal((2, 16, WIDTH), (2, 8, WIDTH)))

ACROSS = "the port has one sequence, across all borders."

PORTS = (
    *(host.right() for host in (ONE, MASKS_FIRST, BOTH_SIDES, OF_EACH_ROW, TWO, BIASED, LAST_QUERIES, LAST_IN_WINDOW)),
    *(host.right() for host in (PACKED, ROWS_FULL, ROWS_WHOLE, ROWS_IN_WINDOW, ROWS_TURNED)),
    *(host.right() for host in (ONE_BY_ONE, IN_BATCHES, AT_ONCE, NEAR_WITHIN, WITHOUT_PADDING, LOW, STREAMS)),
    ONE.wrong("window", "it sees 27.", window_size=(27, 0)),
    ONE.wrong("sequence-first", name="batch and sequence exchanged", call=view_as_sequence_first, qkv_format="sbhd"),
    ONE.wrong(
        "key-value-swapped", name="keys for values", call=lambda core, query, key, value: core(query, value, key)
    ),
    ONE.wrong(
        "query-key-swapped", name="keys for queries", call=lambda core, query, key, value: core(key, query, value)
    ),
    ONE.wrong(
        "heads-permuted",
        name="channels before heads",
        call=lambda core, *heads: core(*heads).unflatten(-1, (HEAD_DIM, HEADS)).mT.flatten(-2),
    ),
    MASKS_FIRST.wrong("mask", name="not causal", **UNMASKED),
    BOTH_SIDES.wrong("window", "it sees 5 and 5", window_size=(5, 5)),
    BOTH_SIDES.wrong("window", "in the port, it sees none after its own", window_size=(4, 0)),
    OF_EACH_ROW.wrong("window", window_size=None),
    PREFIX.wrong("mask", "the port has the causal one alone", name="prefix hidden"),
    TWO.wrong("mask", "by default in second.", name="causal twice", call=twice("causal")),
    BIASED.wrong("softmax-scale", softmax_scale=None),
    # Queries that are the last of more keys.
    LAST_QUERIES.wrong("window", "window_size=(-1, 0), the number of keys", window_size=(11, 0)),
    LAST_IN_WINDOW.wrong("window", "it sees 10.", window_size=(10, 0)),
    LAST_IN_WINDOW.wrong("window", "it sees all.", window_size=(-1, 0)),
    LAST_UNMASKED.wrong("mask", 'the port has "causal_bottom_right"', name="causal"),
    # Packed sequences.
    PACKED.wrong(
        "mask",
        f"cu_seqlens=[0, 7, 19, 22, 32] in format thd, or its mask as an arbitrary one; {ACROSS}",
        name="no borders",
        call=None,
    ),
    PACKED.wrong("mask", "sequence 1 beginning at 8.", name="a border late", call=packed(8, 11, 3, 10)),
    PACKED.wrong("mask", "no border before sequence 1.", name="a border missing", call=packed(19, 3, 10)),
    PACKED.wrong("mask", "the sequences' lengths longest first.", name="sorted", call=packed(12, 10, 7, 3)),
    PACKED.wrong(
        "mask",
        'give TE attn_mask_type="causal" (or "padding_causal"); the port attends to later keys.',
        name="not causal",
        call=packed(*LENGTHS, mask="padding"),
    ),
    *(
        CHUNKS.wrong(
            "mask",
            f"the port has the sequences' lengths made those of chunks of {lengths[0]} tokens.",
            name=f"chunks of {lengths[0]}",
            call=packed(*lengths),
        )
        for lengths in ((7, 7, 7, 7, 4), (16, 16))
    ),
    ROWS_FULL.wrong(
        "mask",
        f"{OF_ROWS} the sequences' lengths with every border moved by -1.",
        name="borders early",
        call=in_one_row(18, 33, causal=False),
    ),
    ROWS_CAUSAL.wrong(
        "mask", f"{OF_ROWS} the sequences' lengths in reverse order.", name="reversed", call=in_one_row(32, 19)
    ),
    ROWS_WHOLE.wrong("mask", ACROSS, name="one sequence", call=in_one_row(64, tokens=WHOLE)),
    ROWS_IN_WINDOW.wrong("mask", ACROSS, name="one sequence", call=in_one_row(51, window_size=(4, 0))),
    ROWS_TURNED.right(name="positions run on", call=in_one_row(19, 32, positions=RUN_ON)),
    ROWS_TURNED.wrong("mask", ACROSS, name="one sequence", call=in_one_row(51, positions=BEGIN_AGAIN)),
    ROWS_TURNED.wrong(
        "mask",
        "the port has one sequence, across all borders, with positions that run on.",
        name="one sequence whose positions run on",
        call=in_one_row(51, positions=RUN_ON),
    ),
    ONE_BY_ONE.wrong("mask", "cu_seqlens=[0, 7, 19, 24, 40]", name="alike", call=in_sequences(10, 10, 10, 10)),
    ONE_BY_ONE.wrong("mask", "causal", name="not causal", call=in_sequences(7, 12, 5, 16, mask="padding")),
    IN_BATCHES.wrong("mask", "cu_seqlens=[0, 7, 19, 24, 40]", name="merged", call=in_sequences(7, 17, 16)),
    IN_BATCHES.wrong("mask", name="one sequence", call=in_sequences(40)),
    AT_ONCE.wrong("mask", "cu_seqlens=[0, 7, 19, 24, 40]", name="borders late", call=in_sequences(8, 12, 5, 15)),
    A_SINGLE_ONE.wrong(
        "mask",
        "the port has sequences with the borders [0, 7, 19, 24, 40]",
        name="borders",
        call=in_sequences(7, 12, 5, 16),
    ),
    NEAR_WITHIN.wrong(
        "window",
        "window_size=(4, 4), the number of keys that a query sees before and after its own; ",
        name="no window",
        call=show(SAME),
    ),
    NEAR_WITHIN.wrong("window", "in the port, it sees 6.", name="wider", call=show(SAME & (DISTANCE.abs() <= 6))),
    NEAR_WITHIN.wrong(
        "window", "in the port, it sees none after its own.", name="causal", call=show(SAME & BAND & CAUSAL)
    ),
    NEAR_WITHIN.wrong("mask", ACROSS, name="one document", call=show(BAND)),
    WITHOUT_PADDING.wrong("mask", ACROSS, name="one document", call=show(BAND, torch.zeros_like(PADDED))),
    CAUSAL_WITHIN.wrong("mask", name="one document", call=show(CAUSAL)),
    CAUSAL_WITHIN.wrong("mask", "the port attends to later keys.", name="not causal", call=show(SAME)),
    CAUSAL_WITHIN.wrong(
        "window", "in the port, it sees 5.", name="window", call=show(SAME & CAUSAL & (DISTANCE >= -5))
    ),
    WITHIN.wrong("mask", "its layers hide later keys by default.", name="causal", call=show(SAME & CAUSAL)),
    VERY_LOW.wrong("mask", "keep scores far above -10000", name="hidden keys seen"),
    STREAMS.wrong(
        "mask",
        "in the port, the queries of each stream see only its own keys.",
        name="each alone",
        alone=("image", "text"),
    ),
    STREAMS.wrong(
        "mask", "in the port, the queries of stream 1 see only its own keys.", name="image alone", alone=("image",)
    ),
    STREAMS.wrong("mask", "no query sees the keys of stream 2.", sees_text=False),
)
