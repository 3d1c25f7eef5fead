"""Masks: causal masks, windows, prefixes, packed sequences and joined streams, and what ports make of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import compared, in_turn, normal, tells, tells_only, twins
from torch import Tensor, nn

import parity

# TE's attention against attention that is written out, whose mask says what is visible.

HEADS, SEQ, HEAD_DIM = 2, 32, 16
LENGTHS = (7, 12, 3, 10)
CAUSAL = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
DISTANCE = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
SEGMENT = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
PACKED = (SEGMENT[:, None] == SEGMENT) & CAUSAL
PREFIX = CAUSAL | (torch.arange(SEQ) < 9)


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


def masked(module: nn.Module, call: Any = None, precision: str = "bf16", **options: Any) -> parity.Result:
    """Compare a module of queries, keys and values with TE's attention of these options."""
    options = dict(qkv_format="bshd", attention_dropout=0.0, attn_mask_type="causal") | options
    return compared(
        lambda: module,
        lambda te: te.DotProductAttention(HEADS, HEAD_DIM, **options),
        normal(*[(2, SEQ, HEADS, HEAD_DIM)] * 3),
        precision,
        call_candidate=call,
    )


class MaskOfEachRow(nn.Module):
    """Attention as in transformers, which makes the mask of one row by other calls than that of several rows."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        visible = (CAUSAL & (DISTANCE > -5))[None, None]
        if len(query) > 1:
            visible = visible.expand(len(query), 1, SEQ, SEQ)
        return F.scaled_dot_product_attention(query, key, value, visible).transpose(1, 2).flatten(2)


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


def viewed(core: nn.Module, *heads: Tensor) -> Tensor:
    """Call TE's attention with batch and sequence mistaken for each other by a view."""
    return core(*(x.reshape(SEQ, 2, HEADS, HEAD_DIM) for x in heads)).reshape(2, SEQ, -1)


CAUSAL_ONE, BOTH_SIDES, UNMASKED = Reference(CAUSAL), Reference(DISTANCE.abs() <= 4), dict(attn_mask_type="no_mask")


@pytest.mark.parametrize(
    ("module", "port", "title", "phrase"),
    [
        (BOTH_SIDES, dict(window_size=(4, 4), **UNMASKED), "passed", ""),
        (BOTH_SIDES, dict(window_size=(5, 5), **UNMASKED), "window", "it sees 5 and 5"),
        (BOTH_SIDES, dict(window_size=(4, 0), **UNMASKED), "window", "in the port, it sees none after its own"),
        *((CAUSAL_ONE, dict(window_size=(size, 0)), "window", f"it sees {size}.") for size in (3, 27)),
        (MaskOfEachRow(), dict(window_size=(4, 0)), "passed", ""),
        (MaskOfEachRow(), {}, "window", ""),
        (CAUSAL_ONE, {}, "passed", ""),
        (CAUSAL_ONE, UNMASKED, "mask", ""),
        (Reference(CAUSAL, masks_first=True), {}, "passed", ""),
        (Reference(CAUSAL, masks_first=True), UNMASKED, "mask", ""),
        (Reference(PACKED), {}, "mask", "the port has one sequence, across all borders"),
        (Reference(PREFIX), {}, "mask", "the port has the causal one alone"),
        (CAUSAL_ONE, dict(call=viewed, qkv_format="sbhd"), "sequence-first", ""),
        (TwoAttentions(), dict(call=twice("no_mask")), "passed", ""),
        (TwoAttentions(), dict(call=twice("causal")), "mask", "by default in second."),
        (CAUSAL_ONE, dict(call=lambda core, query, key, value: core(query, value, key)), "key-value-swapped", ""),
        (CAUSAL_ONE, dict(call=lambda core, query, key, value: core(key, query, value)), "query-key-swapped", ""),
        (
            CAUSAL_ONE,
            dict(call=lambda core, *heads: core(*heads).unflatten(-1, (HEAD_DIM, HEADS)).mT.flatten(-2)),
            "heads-permuted",
            "",
        ),
    ],
)
def test_another_mask_than_the_references_is_told(module, port, title, phrase):
    tells_only(masked(module, **port), title, phrase)


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


def packed(lengths, mask="padding_causal"):
    """Return a function that calls TE's attention with each row of the batch packed as sequences of these lengths."""

    def call(core, *heads):
        rows = [core(*(x[i].clone() for x in heads), **sequences(lengths, mask)) for i in range(len(heads[0]))]
        return torch.stack(rows).flatten(2)

    return call


@pytest.mark.parametrize(
    ("call", "title", "phrase"),
    [
        (packed(LENGTHS), "passed", ""),
        (packed((8, 11, 3, 10)), "mask", "sequence 1 beginning at 8."),
        (packed((19, 3, 10)), "mask", "no border before sequence 1."),
        (packed((12, 10, 7, 3)), "mask", "the sequences' lengths longest first."),
    ],
)
def test_packed_sequences_of_other_lengths_are_told(call, title, phrase):
    result = masked(Reference(PACKED), call)
    tells_only(result, title, phrase)
    assert result.passed or "cu_seqlens=[0, 7, 19, 22, 32]" in result.findings[0].message


def test_packed_sequences_that_are_not_causal_are_told():
    result = masked(Reference(PACKED), packed(LENGTHS, "padding"))
    tells_only(result, "mask", 'give TE attn_mask_type="causal" (or "padding_causal"); the port attends to later keys.')


# Rows of a batch, padded or not, which a port packs as sequences of one row.


class TokensOf(nn.Module):
    """Attention to a batch whose first row has padding or not, without what it computes for padding."""

    def __init__(self, tokens: Tensor, visible: Tensor) -> None:
        super().__init__()
        self.attention, self.tokens = Reference(tokens[:, None, None] & visible), tokens

    def forward(self, *heads: Tensor) -> Tensor:
        return self.attention(*heads)[self.tokens]


WHOLE, SHORTER = (torch.arange(SEQ) < torch.tensor([length, SEQ])[:, None] for length in (SEQ, 19))
RIGHT_ROWS = "cu_seqlens=[0, 19, 51] in format thd, or its mask as an arbitrary one; the port has"


def in_one_row(tokens: Tensor, lengths: tuple[int, ...], mask: str, turn: Any = None, **options: Any) -> Any:
    """Return a function that calls TE's attention with these tokens of a batch, as sequences of these lengths."""

    def call(core: nn.Module, *heads: Tensor) -> Tensor:
        query, key, value = (x[tokens] for x in heads)
        query, key = (query, key) if turn is None else (turn(query), turn(key))
        return core(query, key, value, **sequences(lengths, mask), **options)

    return call


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@in_turn(
    ("tokens", "lengths", "title", "phrase"),
    [
        (SHORTER, (19, 32), "passed", ""),
        (WHOLE, (32, 32), "passed", ""),
        (SHORTER, (18, 33), "mask", f"{RIGHT_ROWS} the sequences' lengths with every border moved by -1."),
        (SHORTER, (32, 19), "mask", f"{RIGHT_ROWS} the sequences' lengths in reverse order."),
        (
            WHOLE,
            (64,),
            "mask",
            "cu_seqlens=[0, 32, 64] in format thd, or its mask as an arbitrary one; the port has one ",
        ),
    ],
)
def test_rows_that_are_packed_with_other_borders_are_told(tokens, lengths, title, phrase, precision, is_causal):
    call = in_one_row(tokens, lengths, "padding_causal" if is_causal else "padding")
    visible = CAUSAL if is_causal else torch.ones_like(CAUSAL)
    tells_only(masked(TokensOf(tokens, visible), call, precision), title, phrase)


@in_turn(
    ("tokens", "lengths", "title"), [(SHORTER, (19, 32), "passed"), (SHORTER, (51,), "mask"), (WHOLE, (64,), "mask")]
)
def test_packed_rows_may_have_a_window(tokens, lengths, title, precision):
    call = in_one_row(tokens, lengths, "padding_causal", window_size=(4, 0))
    result = masked(TokensOf(tokens, CAUSAL & (DISTANCE >= -4)), call, precision)
    tells_only(result, title, "" if title == "passed" else "the port has one sequence, across all borders.")


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Return ``[..., tokens, heads, head_dim]`` rotated by these positions."""
    angles = positions[:, None, None] * 100.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class TurnedTokensOf(TokensOf):
    """The same with rotary embeddings, whose positions begin again in each row."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        positions = torch.arange(SEQ)
        return super().forward(turned(query, positions), turned(key, positions), value)


@pytest.mark.parametrize("runs_on", [False, True], ids=["begin again", "run on"])
@in_turn(
    ("tokens", "lengths", "title"),
    [(SHORTER, (19, 32), "passed"), (SHORTER, (51,), "mask"), (WHOLE, (32, 32), "passed"), (WHOLE, (64,), "mask")],
)
def test_positions_that_run_on_matter_only_where_rows_see_each_other(tokens, lengths, title, precision, runs_on):
    own = torch.arange(SEQ).expand(2, SEQ)[tokens]
    positions = torch.arange(len(own)) if runs_on else own
    call = in_one_row(tokens, lengths, "padding_causal", lambda x: turned(x, positions))
    phrase = f"the port has one sequence, across all borders{', with positions that run on' if runs_on else ''}."
    tells_only(masked(TurnedTokensOf(tokens, CAUSAL), call, precision), title, "" if title == "passed" else phrase)


# Documents of different lengths in each row of the batch, where the first row ends with padding, under a band.


DOCUMENTS = torch.stack((SEGMENT, torch.arange(SEQ) // 13))
SAME = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])[:, None]
PADDED = torch.stack((torch.arange(SEQ) >= SEQ - 4, torch.zeros(SEQ, dtype=torch.bool)))[:, None, None]
LOCAL = SAME & (DISTANCE.abs() <= 4)


def arbitrary(visible: Tensor) -> dict[str, Any]:
    """Return the arguments that give TE's attention a mask that shows these keys."""
    return dict(attn_mask_type="arbitrary", call=lambda core, *heads: core(*heads, attention_mask=~visible))


@pytest.mark.parametrize("padding", [torch.zeros_like(PADDED), PADDED], ids=["whole", "padded"])
@in_turn(
    ("right", "port", "title", "phrase"),
    [
        (LOCAL, LOCAL, "passed", ""),
        (LOCAL, SAME, "window", "window_size=(4, 4), the number of keys that a query sees before and after its own; "),
        (LOCAL, SAME & (DISTANCE.abs() <= 6), "window", "in the port, it sees 6."),
        (LOCAL, LOCAL & CAUSAL, "window", "in the port, it sees none after its own."),
        (LOCAL, DISTANCE.abs() <= 4, "mask", "the port has one sequence, across all borders."),
        (SAME & CAUSAL, CAUSAL, "mask", ""),
        (SAME & CAUSAL, SAME, "mask", "the port attends to later keys."),
        (SAME & CAUSAL, SAME & CAUSAL & (DISTANCE >= -5), "window", "in the port, it sees 5."),
        (SAME, SAME & CAUSAL, "mask", "its layers hide later keys by default."),
    ],
)
def test_another_band_is_told_within_documents(right, port, title, phrase, precision, padding):
    result = masked(Reference(right & ~padding), precision=precision, **arbitrary(port & ~padding))
    tells_only(result, title, phrase)


@pytest.mark.parametrize("chunk", [4, 7, 9, 16])
def test_chunks_of_another_size_are_told(chunk):
    whole, rest = divmod(sum(LENGTHS), chunk)
    of_8 = torch.arange(SEQ) // 8
    chunks = Reference((of_8[:, None] == of_8) & CAUSAL)
    result = masked(chunks, packed((*[chunk] * whole, *[rest] * (rest > 0))))
    tells_only(result, "mask", f"the port has the sequences' lengths made those of chunks of {chunk} tokens.")


class Biased(nn.Module):
    """Attention without a scale, which adds a bias to its scores in place, as T5 does."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = query @ key.transpose(-2, -1)
        scores += -0.1 * DISTANCE.abs()
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("scale", "title"), [(dict(softmax_scale=1.0), "passed"), ({}, "softmax-scale")])
def test_a_bias_that_is_added_in_place_stays_where_the_scale_is_another(scale, title):
    bias = -0.1 * DISTANCE.abs()[None, None].expand(1, HEADS, -1, -1)

    def call(core: nn.Module, *heads: Tensor) -> Tensor:
        options = dict(core_attention_bias_type="post_scale_bias", core_attention_bias=bias.to(heads[0].dtype))
        return core(*heads, **options)

    tells_only(masked(Biased(), call, **UNMASKED, **scale), title)


# Queries that are the last of more keys, as after a prompt; windows are counted from each query's own key.

QUERIES, KEYS = 8, 24


class Last(nn.Module):
    """Attention of the last queries, which see ``before`` earlier keys, or all, and later keys only if ``later``."""

    def __init__(self, before: int | None, later: bool = False) -> None:
        super().__init__()
        own = torch.arange(QUERIES)[:, None] + KEYS - QUERIES
        distance = own - torch.arange(KEYS)
        visible = (distance >= 0) | later
        self.visible = visible if before is None else visible & (distance <= before)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        scores = (query @ key.transpose(-2, -1) / 32**0.5).masked_fill(~self.visible, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def of_last_queries(
    before: int | None, mask: str, window: tuple[int, int], precision: str, later: bool = False
) -> parity.Result:
    """Compare attention of the last queries with TE's under this mask and window."""
    options = dict(qkv_format="bshd", attn_mask_type=mask, window_size=window)
    return compared(
        lambda: Last(before, later),
        lambda te: te.DotProductAttention(4, 32, **options),
        normal((2, QUERIES, 4, 32), (2, KEYS, 4, 32), (2, KEYS, 4, 32)),
        precision,
    )


@in_turn(
    ("before", "window", "right", "seen"),
    [(None, 11, -1, "11"), (None, 3, -1, "3"), (9, 10, 9, "10"), (9, -1, 9, "all"), (9, 4, 9, "4")],
)
def test_another_window_of_the_last_queries_is_told(before, window, right, seen, precision):
    result = of_last_queries(before, "causal_bottom_right", (window, 0), precision)
    tells_only(result, "window", f"it sees {seen}.")
    assert f"window_size=({right}, 0)" in result.findings[0].message


@pytest.mark.parametrize(("before", "window"), [(None, -1), (9, 9)])
def test_the_same_window_of_the_last_queries_passes(before, window):
    assert of_last_queries(before, "causal_bottom_right", (window, 0), "bf16").passed


def test_a_causal_mask_that_begins_at_the_other_corner_is_told():
    tells(of_last_queries(None, "causal", (-1, 0), "bf16"), "mask-corner")


def test_a_causal_mask_at_the_bottom_right_is_told_where_the_reference_has_none():
    result = of_last_queries(None, "causal_bottom_right", (-1, 0), "fp32", later=True)
    tells_only(result, "mask", 'the port has "causal_bottom_right"')


# TE's unfused attention gives hidden keys the score -10000, which hides nothing if all other scores are below it.


class Core(nn.Module):
    """Attention whose queries are the negated keys times the scale, so that large scales give very negative scores."""

    def __init__(self, core, scale: float) -> None:
        super().__init__()
        self.core, self.scale = core, scale

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        return self.core(-self.scale * x, x, value)


def causal(*heads: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in heads)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("scale", "title", "phrase"),
    [
        (10.0, "passed", ""),
        (1e4, "mask", "keep scores far above -10000"),
        (1e5, "mask", "keep scores far above -10000"),
    ],
)
def test_scores_below_what_hides_keys_are_told(scale, title, phrase):
    options = dict(qkv_format="bshd", attention_dropout=0.0)
    result = compared(
        lambda: Core(causal, scale),
        lambda te: Core(te.DotProductAttention(2, 32, **options), scale),
        normal(*[(2, 4, 2, 32)] * 2),
        "fp32",
        probe=None,
    )
    tells(result, title, phrase)


# Two streams whose queries see the keys of both.

WIDTH, HEAD = 64, 32


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """MMDiT's attention, in which the queries of both streams see the keys of both."""

    def __init__(self, linear: Any, mistake: str = "") -> None:
        super().__init__()
        self.mistake, self.of_image, self.of_text = mistake, linear(WIDTH, 3 * WIDTH), linear(WIDTH, 3 * WIDTH)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        of_image, of_text = (
            layer(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
            for layer, x in ((self.of_image, image), (self.of_text, text))
        )
        q, k, v = (torch.cat(parts, 2) for parts in zip(of_image, of_text, strict=True))
        if self.mistake == "without text":
            k, v = of_image[1], of_image[2]
        new_image, new_text = attended(q, k, v).split((image.shape[1], text.shape[1]), 1)
        if self.mistake in ("image alone", "each alone"):
            new_image = attended(*of_image)
        if self.mistake == "each alone":
            new_text = attended(*of_text)
        return image + new_image, text + new_text


@in_turn(
    ("mistake", "title", "phrase"),
    [
        ("", "passed", ""),
        ("each alone", "mask", "in the port, the queries of each stream see only its own keys."),
        ("image alone", "mask", "in the port, the queries of stream 1 see only its own keys."),
        ("without text", "mask", "no query sees the keys of stream 2."),
    ],
)
def test_the_stream_whose_keys_are_not_seen_is_told(mistake, title, phrase, precision):
    inputs = normal((2, 16, WIDTH), (2, 8, WIDTH))
    tells(twins(Block, dict(mistake=mistake), inputs, precision), title, phrase)


# Packed sequences, against TE's attention with its cu_seqlens.

BORDERS = [0, 7, 19, 24, 40]


class OneByOne(nn.Module):
    """Causal attention in each sequence, computed in a loop."""

    def __init__(self, borders: list[int]) -> None:
        super().__init__()
        self.borders = borders

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for start, end in zip(self.borders, self.borders[1:], strict=False):
            query, key, value = (x[start:end].transpose(0, 1) for x in (q, k, v))
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            contexts.append(context.transpose(0, 1).flatten(1))
        return torch.cat(contexts)


class InBatchesOfOne(OneByOne):
    """The same attention, computed with a batch of one for each sequence."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for start, end in zip(self.borders, self.borders[1:], strict=False):
            query, key, value = (x[None, start:end].transpose(1, 2) for x in (q, k, v))
            context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            contexts.append(context.transpose(1, 2).flatten(2)[0])
        return torch.cat(contexts)


class Masked(OneByOne):
    """The same attention, computed at once behind a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number = torch.bucketize(torch.arange(self.borders[-1]), torch.tensor(self.borders[1:-1]), right=True)
        mask = (number[:, None] == number).tril()
        query, key, value = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(0, 1).flatten(1)


REFERENCES = [OneByOne(BORDERS), InBatchesOfOne(BORDERS), Masked(BORDERS)]
IN_THREE_WAYS = pytest.mark.parametrize("reference", REFERENCES, ids=["one by one", "in batches of one", "masked"])


def with_borders(
    reference: nn.Module, borders: list[int], precision: str, mask: str = "padding_causal"
) -> parity.Result:
    """Compare attention in packed sequences with TE's, which is given these borders."""

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
        given = torch.tensor(borders, dtype=torch.int32)
        longest = int(given.diff().max())
        lengths = dict(cu_seqlens_q=given, cu_seqlens_kv=given, max_seqlen_q=longest, max_seqlen_kv=longest)
        return module(q, k, v, attn_mask_type=mask, **lengths)

    return compared(
        lambda: reference,
        lambda te: te.DotProductAttention(4, 16, qkv_format="thd", attention_dropout=0.0),
        normal(*[(BORDERS[-1], 4, 16)] * 3),
        precision,
        call_candidate=call,
    )


OTHER_BORDERS = [
    [0, 7, 24, 40],  # merged with the neighbour
    [0, 8, 19, 24, 40],
    [0, 8, 20, 25, 40],  # every inner border is one too late
    [0, 10, 20, 30, 40],
    [0, 3, 11, 12, 33, 40],
]


@in_turn(("borders", "reference"), zip(OTHER_BORDERS, itertools.cycle(REFERENCES), strict=False))
def test_other_borders_are_told_beside_the_references(borders, reference, precision):
    tells_only(with_borders(reference, borders, precision), "mask", f"cu_seqlens={BORDERS}")


@IN_THREE_WAYS
@pytest.mark.parametrize(
    ("borders", "mask", "title", "phrase"),
    [
        (BORDERS, "padding_causal", "passed", ""),
        (BORDERS, "padding", "mask", "causal"),
        ([0, BORDERS[-1]], "padding_causal", "mask", ""),
    ],
    ids=["the same", "not causal", "one sequence"],
)
def test_sequences_that_are_not_causal_or_all_one_are_told(borders, mask, title, phrase, reference):
    tells_only(with_borders(reference, borders, "bf16", mask), title, phrase)


def test_borders_that_the_reference_does_not_have_are_found_from_the_outputs():
    result = with_borders(OneByOne([0, 40]), BORDERS, "bf16")
    tells_only(result, "mask", f"the port has sequences with the borders {BORDERS}")
