"""The cache of keys and values for inference, and conversions between padded and packed sequences.

Follows ``csrc/extensions/attention.cpp`` of TransformerEngine 2.20.2 and ``common/fused_attn/kv_cache.cu``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity.cpu.enums import NVTE_QKV_Format

__all__ = ["convert_bshd_to_thd", "convert_thd_to_bshd", "copy_to_kv_cache"]


@torch.no_grad()
def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Packed sequences ``[tokens, heads, features]`` as ``[b, max_seq_len, heads, features]``, with 0 for padding.

    Args:
        cu_seqlens: cumulative lengths ``[at least b + 1]``; sequences follow each other without gaps.
    """
    result = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    result[_is_token(cu_seqlens, b, max_seq_len)] = tensor[: int(cu_seqlens[b])]
    return result


@torch.no_grad()
def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Padded sequences ``[batch, seq, heads, features]`` as ``[t, heads, features]``, 0 after the last sequence."""
    batch, max_seq_len = tensor.shape[:2]
    result = tensor.new_zeros(t, *tensor.shape[2:])
    result[: int(cu_seqlens[batch])] = tensor[_is_token(cu_seqlens, batch, max_seq_len)]
    return result


def _is_token(cu_seqlens: Tensor, batch: int, max_seq_len: int) -> Tensor:
    """``[batch, max_seq_len]``, False for padding."""
    return torch.arange(max_seq_len) < cu_seqlens[: batch + 1].diff()[:, None]


@torch.no_grad()
def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    qkv_format: int,
    b: int,
    max_ctx_len: int,
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Append the new tokens of each sequence to the cache, in place.

    Args:
        new_k: ``[b, max_ctx_len, heads, features]``, with the first two swapped in ``sbhd``, or packed in ``thd``.
        k_cache: ``[sequences, max_seq_len, heads, features]``, or ``[pages, page size, heads, features]`` if paged.
        page_table: the pages of each sequence, ``[at least b, max_pages_per_seq]``, or ``[at least b]`` if there is one
            page for each.
        cu_new_lens: cumulative numbers of new tokens, ``[at least b + 1]``.
        cu_cached_lens: of all tokens, the new ones included.
        is_non_paged: ``page_table`` says where in the cache each sequence lay so far: those that go on are first moved
            to the front, in their order.

    Raises:
        ValueError: if dtypes differ, or for another format.
    """
    if not new_k.dtype == new_v.dtype == k_cache.dtype == v_cache.dtype:
        dtypes = [str(tensor.dtype) for tensor in (new_k, new_v, k_cache, v_cache)]
        raise ValueError(f"copy_to_kv_cache needs new tokens and caches of one dtype, and got {', '.join(dtypes)}")
    new, cached = cu_new_lens[: b + 1].diff().long(), cu_cached_lens[: b + 1].diff().long()
    if is_non_paged:
        _move_to_front((k_cache, v_cache), page_table.flatten()[:b].long(), cached - new)
    entry = torch.arange(b).repeat_interleave(new)
    token = torch.arange(len(entry)) - cu_new_lens[:b].long()[entry]
    position = (cached - new)[entry] + token
    page_size = max_seq_len // max_pages_per_seq
    page = entry if is_non_paged else page_table.view(-1, max_pages_per_seq).long()[entry, position // page_size]
    where = (page, position % page_size)
    for cache, tokens in ((k_cache, new_k), (v_cache, new_v)):
        cache[where] = _tokens(tokens, qkv_format, entry, token)


def _tokens(tensor: Tensor, qkv_format: int, entry: Tensor, token: Tensor) -> Tensor:
    """``[tokens, heads, features]`` of all sequences, without padding."""
    if qkv_format == NVTE_QKV_Format.NVTE_BSHD:
        return tensor[entry, token]
    if qkv_format == NVTE_QKV_Format.NVTE_SBHD:
        return tensor[token, entry]
    if qkv_format == NVTE_QKV_Format.NVTE_THD:
        return tensor[: len(entry)]
    raise ValueError(f"copy_to_kv_cache takes bshd, sbhd and thd, and no {NVTE_QKV_Format(qkv_format).name}")


def _move_to_front(caches: tuple[Tensor, Tensor], sources: Tensor, lengths: Tensor) -> None:
    """Sequence j moves from ``sources[j]`` to j, up to the last j before which the sources decrease."""
    falls = (sources.diff() < 0).nonzero()
    count = int(falls[-1]) + 1 if len(falls) else len(sources)
    sources, lengths = sources[:count], lengths[:count]
    for cache in caches:
        moves = torch.arange(cache.shape[1]) < lengths[:, None]
        cache[:count][moves] = cache[sources][moves]
