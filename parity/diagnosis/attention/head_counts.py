"""Attention with another number of heads: the weights have the same shapes, and nothing else says that it is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor

from parity.diagnosis.attention.attention import Attention, Rearrange, distinct_heads
from parity.diagnosis.mistake import Mistake
from parity.watching.trace import Edit

_MOST = 8  # other numbers
_SMALLEST, _LARGEST = 4, 512  # channels of a head


def head_count_mistakes(query: Tensor, key: Tensor, value: Tensor) -> Iterator[Mistake[Attention]]:
    """The likeliest other numbers of heads of the same width together, and as many groups in proportion.

    TE scales by the root of the head's own channels then. Rotations are left as they are, so that what a port computes
    with rotary embeddings, which have the reference's channels, is not among these.

    Args:
        query, key, value: ``[batch, heads, seq, head_dim]``, keys and values repeated for all heads or not.
    """
    heads, head_dim = query.shape[1], query.shape[-1]
    groups = distinct_heads(key)
    if value.shape[-1] != head_dim or heads % groups or key.shape[1] not in (groups, heads):
        return
    width = heads * head_dim
    others = [n for n in range(1, width + 1) if n != heads and width % n == 0 and groups * n % heads == 0]
    fitting = [n for n in others if _SMALLEST <= width // n <= _LARGEST]
    for count in sorted(fitting, key=lambda n: abs(math.log(n / heads)))[:_MOST]:
        yield Mistake(
            "head-count",
            f"{count} heads",
            f"give TE num_attention_heads={heads}, as the reference has; it has {count}, of {width // count} channels",
            _with_heads(count, heads, groups, width),
        )


def _with_heads(count: int, heads: int, groups: int, width: int) -> Callable[[Attention], tuple[Edit, ...]]:
    def edits(attention: Attention) -> tuple[Edit, ...]:
        keys = _split(count * groups // heads, distinct=groups)
        arrange = (_split(count), keys, keys, _split(heads))
        return attention.edits(arrange=arrange, scale=math.sqrt(count / width) / attention.earlier_scale)

    return edits


def _split(count: int, distinct: int = 0) -> Rearrange:
    """From ``[batch, heads, seq, head_dim]`` to other heads of the same channels.

    Args:
        count: of the other heads.
        distinct: heads that differ, where each may be repeated for consecutive heads; 0 for all.
    """

    def split(x: Tensor) -> Tensor:
        x = x[:, :: x.shape[1] // distinct] if distinct else x
        return x.transpose(1, 2).flatten(2).unflatten(2, (count, -1)).transpose(1, 2)

    return split
