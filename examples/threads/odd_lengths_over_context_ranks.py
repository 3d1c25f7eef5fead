"""NVIDIA/TransformerEngine#1930 (https://github.com/NVIDIA/TransformerEngine/issues/1930)

Packed sequences are padded to a length that divides over context parallel ranks. Told that nothing lies between
sequences, TE takes each rank to have its share of a sequence's real tokens, rounded down. So tokens at the ends are
left out.

parity says ``wrong-over-ranks`` (PAR709): attention is right in one process; not that ends of sequences are wrong.

Repair: hand over both ``cu_seqlens_q`` and ``cu_seqlens_q_padded``, and leave ``pad_between_seqs`` to TE.
"""

import itertools

import torch
from torch import distributed, nn

import parity

HEADS, DIM = 2, 16
REAL, PADDED = (13, 21), (16, 24)  # tokens of each sequence, and places in the pack
STARTS = (0, *itertools.accumulate(PADDED))
IS_REAL = torch.tensor([at < real for real, padded in zip(REAL, PADDED, strict=True) for at in range(padded)])


class Attention(nn.Module):
    """Attends causally in each sequence of a pack, ``[places, heads, dim]``."""

    def forward(self, q, k, v):
        parts = []
        for start, real, padded in zip(STARTS, REAL, PADDED, strict=False):
            own = (x[start : start + real].transpose(0, 1) for x in (q, k, v))
            y = nn.functional.scaled_dot_product_attention(*own, is_causal=True).transpose(0, 1)
            parts.append(nn.functional.pad(y, (0, 0, 0, 0, 0, padded - real)))
        return torch.cat(parts).flatten(1)


class Gather(torch.autograd.Function):
    """Puts the ranks' places of the pack together."""

    @staticmethod
    def forward(ctx, x, group, places):
        ctx.mine, ctx.count = places[distributed.get_rank(group)], len(places)
        parts = [torch.empty_like(x) for _ in places]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.empty(sum(map(len, places)), *x.shape[1:], dtype=x.dtype).index_copy(
            0, torch.cat(places), torch.cat(parts)
        )

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.mine], None, None


def places_of(rank, count):
    """Return which places of the pack a rank has: of each sequence one part from the front and one from the back."""
    parts = [torch.arange(start, start + n).chunk(2 * count) for start, n in zip(STARTS, PADDED, strict=False)]
    return torch.cat([torch.cat([part[rank], part[-1 - rank]]) for part in parts])


def attention(te, ranks, **more):
    module = te.DotProductAttention(
        HEADS, DIM, qkv_format="thd", attn_mask_type="padding_causal", attention_dropout=0.0
    )
    if ranks.cp.size > 1:
        module.set_context_parallel_group(ranks.cp.group, list(ranks.cp.ranks), ranks.stream(), "p2p")
    real = torch.tensor((0, *itertools.accumulate(REAL)), dtype=torch.int32)
    padded = torch.tensor(STARTS, dtype=torch.int32)
    lengths = dict(
        cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(PADDED), max_seqlen_kv=max(PADDED),
    )  # fmt: skip
    places = [places_of(rank, ranks.cp.size) for rank in range(ranks.cp.size)]

    def call(module, q, k, v):
        mine = places[ranks.cp.rank]
        y = module(q[mine], k[mine], v[mine], **lengths, **more).flatten(1)
        y = y if ranks.cp.size == 1 else Gather.apply(y, ranks.cp.group, places)
        y = y if ranks.cp.size > 1 else torch.empty_like(y).index_copy(0, mine, y)
        return torch.where(IS_REAL[:, None], y, 0.0)

    return parity.Pair(
        reference=Attention(),
        candidate=module,
        inputs=lambda rng: tuple(rng.normal(sum(PADDED), HEADS, DIM) for _ in range(3)),
        call_candidate=call,
        parallel=parity.Parallel(),
    )


@parity.pair("odd_lengths_over_context_ranks_wrong", ranks=[dict(cp=2)], precisions=["bf16"])
def wrong(te, ranks):
    return attention(te, ranks, pad_between_seqs=False)


@parity.pair("odd_lengths_over_context_ranks_right", ranks=[dict(cp=2)], precisions=["bf16"])
def right(te, ranks):
    return attention(te, ranks)
