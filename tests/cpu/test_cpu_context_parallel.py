"""TE's attention over a sequence that is spread over ranks equals the attention on one rank.

Causal load balancing gives each rank two chunks of every sequence; without it (packed sequences in TE 2.20), each rank
has one chunk of all tokens. The tests gather the results of all ranks, put them
back in order, and compare them with what one rank computes from whole sequences.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parity import te as parity_te
from parity.ranks.launch import launch
from te_on_cpu import cuda, versions

NAMES = ("output", "query.grad", "key.grad", "value.grad")
HEAD = 16


@dataclass(frozen=True)
class Attention:
    """A configuration of attention. Sequences have ``lengths`` tokens, of which ``valid`` are not padding.

    Attributes:
        balanced: whether TE's default divides tokens among ranks, or ``CPLoadBalancingStrategy.NO_LOAD_BALANCE``.
    """

    communication: str
    format: str = "bshd"
    mask: str = "causal"
    heads: int = 4
    groups: int = 4
    head: int = HEAD
    window: tuple[int, int] | None = None
    lengths: tuple[int, ...] = (64, 64)
    valid: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    recipe: str | None = None
    bias: str = "no_bias"
    softmax: str = "vanilla"
    balanced: bool = True

    @property
    def cut_at(self) -> tuple[int, ...]:
        """The lengths of what ranks divide, each by itself; nothing if ranks divide all tokens in order."""
        return () if not self.balanced else self.lengths if self.format == "thd" else self.lengths[:1]

    def __str__(self) -> str:
        others = (f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        return " ".join((self.communication, *others))


# Chunks of sequences.


def _of_rank(whole: Tensor, rank: int, ranks: int, dim: int, lengths: Sequence[int]) -> Tensor:
    if not lengths:
        return whole.chunk(ranks, dim)[rank].contiguous()
    sequences = whole.split(list(lengths), dim)
    chunks = [sequence.chunk(2 * ranks, dim) for sequence in sequences]
    return torch.cat([chunk for each in chunks for chunk in (each[rank], each[2 * ranks - 1 - rank])], dim)


def _whole(parts: Sequence[Tensor], dim: int, lengths: Sequence[int]) -> Tensor:
    ranks = len(parts)
    if not lengths:
        return torch.cat(list(parts), dim)
    of_ranks = [part.split([length // (2 * ranks) for length in lengths for _ in "ab"], dim) for part in parts]
    return torch.cat(
        [
            chunk
            for number in range(len(lengths))
            for chunk in [
                *(chunks[2 * number] for chunks in of_ranks),
                *(chunks[2 * number + 1] for chunks in reversed(of_ranks)),
            ]
        ],
        dim,
    )


# Computations on ranks.


def _compute(case: Attention, on_ranks: bool, tensors: Sequence[Tensor], output_gradient: Tensor) -> list[Tensor]:
    te = parity_te.kernels("cpu").te
    module = te.DotProductAttention(
        case.heads,
        case.head,
        num_gqa_groups=case.groups,
        qkv_format=case.format,
        attn_mask_type=case.mask,
        attention_dropout=0.0,
        softmax_type=case.softmax,
    )
    if on_ranks:
        ranks = list(range(dist.get_world_size()))
        plain = {} if case.balanced else {"load_balancing_strategy": te.CPLoadBalancingStrategy.NO_LOAD_BALANCE}
        module.set_context_parallel_group(_group(case.communication), ranks, cuda.Stream(), case.communication, **plain)
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    options: dict[str, Any] = {}
    if case.format == "thd":
        ends = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (case.valid or case.lengths, case.lengths)]
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        options = dict(zip(names, (ends[0], ends[0], ends[1], ends[1]), strict=True))
        options |= {"max_seqlen_q": max(case.lengths), "max_seqlen_kv": max(case.lengths)}
        options |= {"pad_between_seqs": case.valid is not None}
    if case.bias != "no_bias":
        generator = torch.Generator().manual_seed(1)
        seq = case.lengths[0]
        bias = torch.randn(1, case.heads, seq, seq, generator=generator).to(case.dtype)
        if on_ranks:
            bias = _of_rank(bias, dist.get_rank(), dist.get_world_size(), 2, case.lengths[:1])
        options |= {"core_attention_bias_type": case.bias, "core_attention_bias": bias}
    with _autocast(te, case.recipe):
        out = module(*inputs, window_size=case.window, **options)
    out.backward(output_gradient.flatten(-2))
    return [out.detach().view(output_gradient.shape), *(tensor.grad for tensor in inputs)]


def _autocast(te: Any, recipe: str | None) -> contextlib.AbstractContextManager[None]:
    if recipe is None:
        return contextlib.nullcontext()
    from transformer_engine.common import recipe as recipes

    chosen = getattr(recipes, recipe)(fp8_dpa=True)
    return te.autocast(enabled=True, recipe=chosen, amax_reduction_group=dist.group.WORLD)


@functools.cache
def _group(communication: str) -> Any:
    ranks = dist.get_world_size()
    if communication != "a2a+p2p":
        return dist.group.WORLD
    inner = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    outer = [dist.new_group(list(range(first, ranks, 2))) for first in range(2)]
    return [inner[dist.get_rank() // 2], outer[dist.get_rank() % 2]]


def _draw(case: Attention) -> list[Tensor]:
    """Return queries, keys, values and the output's gradient, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"b": len(case.lengths), "s": case.lengths[0], "t": sum(case.lengths), "d": case.head}
    shapes = [
        [{**sizes, "h": heads}[letter] for letter in case.format]
        for heads in (case.heads, case.groups, case.groups, case.heads)
    ]
    tensors = [torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes]
    if case.valid is not None:
        padding = torch.cat(
            [torch.arange(length) >= valid for length, valid in zip(case.lengths, case.valid, strict=True)]
        )
        for tensor in tensors:
            tensor[padding] = 0
    return tensors


def _errors(case: Attention) -> dict[str, float]:
    """Return the relative L2 distances between the results of all ranks together and those of one rank."""
    dim = case.format.index("t" if case.format == "thd" else "s")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = _draw(case)
    try:
        whole = _compute(case, False, tensors[:3], tensors[3])
    except ValueError as error:
        raise RuntimeError(f"one rank alone cannot compute {case}") from error
    *parts, gradient = (_of_rank(tensor, rank, ranks, dim, case.cut_at) for tensor in tensors)
    found = [_gathered(part, dim, case.cut_at) for part in _compute(case, True, parts, gradient)]
    return {name: _distance(a, b) for name, a, b in zip(NAMES, found, whole, strict=True)}


def _gathered(part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
    everyones = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, part.contiguous())
    return _whole(everyones, dim, lengths)


def _distance(found: Tensor, whole: Tensor) -> float:
    return float((found.double() - whole.double()).norm() / whole.double().norm())


def _answers(cases: Sequence[Attention], layers: Sequence[str]) -> list[dict[str, float] | str]:
    """Return each case's errors, or the message with which TE refuses it, and the errors of each layer."""
    answers: list[dict[str, float] | str] = []
    for case in cases:
        try:
            answers.append(_errors(case))
        except (AssertionError, ValueError) as error:
            answers.append(f"{type(error).__name__}: {error}")
    return [*answers, *map(_layer, layers)]


def _layer(communication: str) -> dict[str, float]:
    """Return the errors of a layer with RoPE, with its weights' gradients summed over ranks."""
    te = parity_te.kernels("cpu").te
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = te.MultiheadAttention(
        64, 4, num_gqa_groups=2, attention_dropout=0.0, attn_mask_type="causal", params_dtype=torch.bfloat16
    )
    positions = te.RotaryPositionEmbedding(16)(64)
    x, gradient = torch.randn(2, 64, 2, 64).bfloat16()

    def compute(x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        layer.zero_grad()
        x = x.clone().requires_grad_()
        out = layer(x, rotary_pos_emb=positions)
        out.backward(gradient)
        return {"output": out.detach(), "input.grad": x.grad} | {
            name: parameter.grad.float() for name, parameter in layer.named_parameters()
        }

    whole = compute(x, gradient)
    layer.set_context_parallel_group(_group(communication), list(range(ranks)), cuda.Stream(), communication)
    found = compute(*(_of_rank(each, rank, ranks, 0, [64]) for each in (x, gradient)))
    for name, part in found.items():
        if name in ("output", "input.grad"):
            found[name] = _gathered(part, 0, [64])
        else:
            dist.all_reduce(part)
    return {name: _distance(found[name], whole[name]) for name in whole}


# The results of TE.

PACKED = dict(format="thd", mask="padding_causal", lengths=(32, 64, 16))
FP8 = dict(heads=2, groups=2, head=128, recipe="DelayedScaling")  # Hopper's FP8 attention is for heads of 128
EVERYWHERE: list[dict[str, Any]] = [
    {},
    dict(mask="no_mask"),
    dict(format="sbhd"),
    dict(groups=2),
    dict(dtype=torch.float16),
    PACKED,
    {**PACKED, "mask": "padding"},
    {**PACKED, "valid": (27, 60, 11)},
]
TWO = [
    *(Attention(how, **options) for how in ("p2p", "all_gather", "a2a") for options in EVERYWHERE),
    *(Attention(how, window=(16, 0)) for how in ("all_gather", "a2a")),
    Attention("p2p", bias="post_scale_bias"),
    Attention("a2a", softmax="off-by-one"),
    Attention("a2a", **FP8),
    Attention("a2a", **FP8, mask="no_mask"),
]
FOUR = [
    *(Attention(how, **options) for how in ("p2p", "all_gather", "a2a", "a2a+p2p") for options in ({}, PACKED)),
    Attention("a2a+p2p", groups=2),
    Attention("a2a+p2p", format="sbhd"),
    Attention("a2a+p2p", mask="no_mask"),
]
# TE 2.20.2 finds no backend for these (``dot_product_attention/utils.py``), or an assertion fails
# (``context_parallel.py``).
REFUSED = [
    *(Attention(how, dtype=torch.float32) for how in ("p2p", "all_gather", "a2a")),
    *(Attention(how, mask="causal_bottom_right") for how in ("p2p", "all_gather", "a2a")),
    *(Attention(how, bias="post_scale_bias") for how in ("all_gather", "a2a")),
    *(Attention(how, softmax="off-by-one") for how in ("p2p", "all_gather")),
    Attention("p2p", window=(16, 0)),
    Attention("a2a", heads=6, groups=3),
]
# In packed order, sequences need not be multiples of anything, and one may lie on several ranks.
IN_ORDER = dict(format="thd", mask="padding_causal", lengths=(33, 58, 21), balanced=False)
IN_WHICH_WORDS = "No dot product attention backend|not support|divisible by|No-load-balance .* requires"
IS_NEWEST = versions.installed_version().release[:2] >= versions.NEWEST.release
LAYERS = ["p2p", "all_gather", "a2a"]
HAS_ORDER = "CPLoadBalancingStrategy" in dir(parity_te.kernels("cpu").te)
if HAS_ORDER:
    TWO += [Attention("all_gather", **IN_ORDER, **options) for options in ({}, dict(groups=2), dict(valid=(30, 58, 9)))]
    FOUR += [Attention("all_gather", **IN_ORDER), Attention("all_gather", **IN_ORDER, valid=(33, 1, 20))]
    REFUSED += [Attention(how, **IN_ORDER) for how in ("p2p", "a2a")]
    REFUSED += [Attention("all_gather", **{**IN_ORDER, "mask": "padding"}), Attention("all_gather", balanced=False)]
WRONG = [Attention("p2p", **FP8), Attention("p2p", **FP8, mask="no_mask")]


@functools.cache
def _computed(ranks: int) -> dict[Attention | str, Any]:
    """Return the answers for cases and, by their communication, for layers; processes are started once."""
    cases, layers = {2: ([*TWO, *REFUSED, *WRONG], LAYERS), 4: (FOUR, [])}[ranks]
    return dict(zip([*cases, *layers], launch(_answers, ranks, (cases, layers))[0], strict=True))


def _limit(case: Attention, ranks: int, name: str) -> float:
    """Return how far rounding may move a tensor from that of one rank.

    An all-to-all moves heads but changes no computation. An all-gather adds gradients of keys and values after ranks
    have rounded them. Ranks that pass keys on round each step's contribution, and the sum to which they add it.
    """
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}[case.dtype]
    steps = {"a2a": 0, "all_gather": ranks if name in NAMES[2:] else 0, "a2a+p2p": ranks // 2, "p2p": ranks}
    return 2 * unit * steps[case.communication]


@pytest.mark.parametrize(
    ("ranks", "case"), [*((2, case) for case in TWO), *((4, case) for case in FOUR)], ids=lambda value: str(value)
)
def test_attention_over_ranks_is_the_attention_of_one_rank(ranks: int, case: Attention) -> None:
    errors = _computed(ranks)[case]
    if not IS_NEWEST and isinstance(errors, str):
        pytest.skip(f"this version of TE refuses it: {errors}")
    assert isinstance(errors, dict), errors
    assert {name: error for name, error in errors.items() if not error <= _limit(case, ranks, name)} == {}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_te_does_not_spread_over_ranks_is_refused(case: Attention) -> None:
    answer = _computed(2)[case]
    assert isinstance(answer, str), answer
    assert re.search(IN_WHICH_WORDS, answer)


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_keys_and_values_get_wrong_gradients_of_te_in_fp8_where_ranks_pass_them_on(case: Attention) -> None:
    """Show the error described in docs/te-api.md: a rank adds what it computed for others, not what they did for it."""
    errors = _computed(2)[case]
    few_percent = 2.0**-4  # E4M3's unit roundoff; E5M2's is twice that
    assert errors["output"] < few_percent
    assert errors["query.grad"] < 2 * few_percent
    assert min(errors["key.grad"], errors["value.grad"]) > 0.5


@pytest.mark.parametrize("communication", LAYERS)
def test_a_layer_rotates_tokens_by_their_places_in_the_whole_sequence(communication: str) -> None:
    errors = _computed(2)[communication]
    # Both ways round the layer's input, projections and context; ranks add the products of half of the tokens each.
    assert {name: error for name, error in errors.items() if not error <= 8 * 2.0**-9} == {}
