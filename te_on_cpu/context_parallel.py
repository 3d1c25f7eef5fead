"""Divide packed sequences (``thd``) for context parallelism, in which each rank has two chunks of each sequence.

Replaces the ``thd`` functions of ``csrc/extensions/attention.cpp`` and
``common/fused_attn/context_parallel.cu`` of TransformerEngine 2.20.2. ``cu_seqlens`` are the starts of the sequences
and the end of the last one, which are all divisible by the number that a function divides them by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
]


def _sequences(starts: Tensor) -> Tensor:
    """Return the sequence to which each token belongs."""
    tokens = torch.arange(int(starts[-1]), dtype=starts.dtype)
    return torch.searchsorted(starts[1:].contiguous(), tokens, right=True)


def _second_half(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of all tokens in second halves, and the sequence of each."""
    halves = starts // 2
    sequence = _sequences(halves)
    return torch.arange(len(sequence)) + halves[sequence + 1], sequence


def _tokens_dim(tensor: Tensor) -> int:
    """Return the dimension of tokens in ``[t, h, d]``, or in keys and values ``[2, t, h, d]``."""
    if tensor.dim() not in (3, 4):
        raise ValueError(f"expected packed tokens as [t, h, d] or [2, t, h, d], and got {list(tensor.shape)}")
    return tensor.dim() - 3


def _check_tokens(tensor: Tensor, first: int) -> None:
    """Check that tokens can be moved 16 bytes at a time, as TE's kernels do.

    Raises:
        ValueError: if the bytes of a token are not a multiple of 16.
    """
    size = tensor.shape[first:].numel() * tensor.element_size()
    if size % 16:
        raise ValueError(
            f"a token has {size} bytes, but TE's kernels need a multiple of 16; change the number or size of heads"
        )


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Return the first half of each sequence (``half_idx`` 0), or the second (1)."""
    dim = _tokens_dim(tensor)
    _check_tokens(tensor, dim + 1)
    halves = cu_seqlens // 2
    sequence = _sequences(halves)
    tokens = torch.arange(len(sequence)) + halves[sequence + half_idx]
    shape = list(tensor.shape)
    shape[dim] //= 2
    half = tensor.new_zeros(shape)
    half.narrow(dim, 0, len(tokens)).copy_(tensor.index_select(dim, tokens))
    return half


# The log-sum-exps of the softmax: ``[h, t]`` if they are packed, otherwise ``[b, h, s]``.


def _of_second_half(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the indices of the second halves in ``lse``, and those in a tensor of second halves only."""
    heads = torch.arange(lse.shape[-2])[:, None]
    tokens, sequence = _second_half(cu_seqlens)
    if lse_packed:
        return (heads, tokens), (heads, torch.arange(len(tokens)))
    starts = (cu_seqlens // 2)[sequence]
    column = torch.arange(len(tokens)) - starts
    length = (cu_seqlens // 2)[sequence + 1] - starts
    return (sequence, heads, column + length), (sequence, heads, column)


def thd_second_half_lse_correction(lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Merge a step's log-sum-exps, which are of second halves only, into ``lse``."""
    whole, half = _of_second_half(lse, cu_seqlens, lse_packed)
    lse[whole] = torch.logaddexp(lse[whole], lse_per_step[half])


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    """Return the log-sum-exps of second halves, padded with zeros to ``second_half_lse_seqlen``."""
    whole, half = _of_second_half(lse, cu_seqlens, lse_packed)
    result = lse.new_zeros([*lse.shape[:-1], second_half_lse_seqlen])
    result[half] = lse[whole]
    return result


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Merge a step's output into ``out`` in FP32, each weighted by its share of the softmax.

    ``old_lse`` are the log-sum-exps of ``out`` so far, and ``lse`` those of both. TE's Python says that the kernel
    computes in higher precision. No public source contains the kernel; rounding only once is assumed, as TE does for
    other formats.
    """
    tokens, whole, part = _to_merge(lse, cu_seqlens, only_second_half, lse_packed)
    before = _shared(out[tokens], old_lse[whole], lse[whole])
    step = _shared(out_per_step[: len(tokens)], lse_per_step[part], lse[whole])
    out[tokens] = (before + step).to(out.dtype)


def thd_out_correction_by_final_sums(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add a step's output, weighted by its share of the whole softmax, as before TE 2.20, which rounds twice."""
    tokens, whole, part = _to_merge(lse, cu_seqlens, only_second_half, lse_packed)
    step = _shared(out_per_step[: len(tokens)], lse_per_step[part], lse[whole])
    out[tokens] = out[tokens] + step.to(out.dtype)


def _to_merge(lse: Tensor, cu_seqlens: Tensor, only_second_half: bool, lse_packed: bool) -> Any:
    """Return the tokens of a step's output, and the indices of their log-sum-exps among all steps' and this step's."""
    if only_second_half:
        return _second_half(cu_seqlens)[0], *_of_second_half(lse, cu_seqlens, lse_packed)
    sequence = _sequences(cu_seqlens)
    tokens, heads = torch.arange(len(sequence)), torch.arange(lse.shape[-2])[:, None]
    place = (heads, tokens) if lse_packed else (sequence, heads, tokens - cu_seqlens[sequence])
    return tokens, place, place


def _shared(output: Tensor, lse: Tensor, of_lse: Tensor) -> Tensor:
    """Return an output times its share; a token that saw no key has output 0 and no finite log-sum-exp."""
    share = torch.exp(lse - of_lse).T[..., None]
    return torch.where(output == 0, torch.zeros((), dtype=torch.float32), output.float() * share)


# Gradients.


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Apply an operation to each half of the sequences: ``add`` or ``copy`` a step's gradient, ``zero``, or ``none``.

    A step's gradient covers only one half if the other half takes nothing from it.

    Raises:
        ValueError: for combinations that TE's kernels do not have either.
    """
    done = {first_half, second_half}
    if done not in ({"add", "none"}, {"copy", "none"}, {"copy", "zero"}, {"add", "copy"}):
        raise ValueError(f"Unsupported Functor of first half and second_half: {first_half!r} and {second_half!r}")
    dim = _tokens_dim(grad)
    _check_tokens(grad, dim + 1)
    halves = cu_seqlens // 2
    sequence = _sequences(halves)
    for half, what in enumerate((first_half, second_half)):
        if what == "none":
            continue
        tokens = torch.arange(len(sequence)) + halves[sequence + half]
        if what == "zero":
            grad.index_fill_(dim, tokens, 0)
            continue
        of_step = tokens if done == {"add", "copy"} else torch.arange(len(sequence))
        step = grad_per_step.index_select(dim, of_step)
        values = step if what == "copy" else grad.index_select(dim, tokens) + step
        grad.index_copy_(dim, tokens, values)


# The tokens of each rank, which has chunks ``rank`` and ``2 * world_size - 1 - rank`` of each sequence.


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Return the indices of a rank's tokens."""
    if total_tokens <= 0 or total_tokens % (2 * world_size):
        raise ValueError(f"{total_tokens} tokens cannot be divided into 2 chunks for each of {world_size} ranks")
    starts = cu_seqlens // world_size
    sequence = _sequences(starts)
    within = torch.arange(len(sequence)) - starts[sequence]
    chunk = (starts[sequence + 1] - starts[sequence]) // 2
    place = torch.where(within < chunk, rank, 2 * (world_size - 1) - rank)
    tokens = within + starts[sequence] * world_size + chunk * place
    result = torch.zeros(total_tokens // world_size, dtype=torch.int32)
    result[: len(tokens)] = tokens.to(torch.int32)
    return result


def _in_rank_order(cu_seqlens: Tensor, total_tokens: int, cp_size: int) -> Tensor:
    return torch.cat([thd_get_partitioned_indices(cu_seqlens, total_tokens, cp_size, rank) for rank in range(cp_size)])


def thd_sequence_order_to_cp_rank_order(inp: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int) -> Tensor:
    """Reorder tokens so that they stand rank by rank."""
    _check_tokens(inp, 1)
    return inp.index_select(0, _in_rank_order(cu_seqlens, total_tokens, cp_size))


def thd_cp_rank_order_to_sequence_order(inp: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int) -> Tensor:
    """Put tokens that stand rank by rank back into the order of the sequences."""
    _check_tokens(inp, 1)
    order = _in_rank_order(cu_seqlens, total_tokens, cp_size).long()
    return torch.empty_like(inp, memory_format=torch.contiguous_format).index_copy_(0, order, inp)


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    """Copy the tokens of each sequence that are not padding.

    Args:
        out: written only at these tokens.
        inp: has the same shape.
        cu_seqlens_padded: where sequences start, padding included; the first may start after token 0.
        cu_seqlens: gives the lengths of the sequences.
    """
    tokens = torch.arange(len(inp), dtype=cu_seqlens_padded.dtype)
    count = len(cu_seqlens) - 1
    sequence = torch.searchsorted(cu_seqlens_padded[1:].contiguous(), tokens, right=True).clamp(max=count - 1)
    within = tokens - cu_seqlens_padded[sequence]
    is_valid = (within >= 0) & (within < (cu_seqlens[1:] - cu_seqlens[:-1])[sequence])
    out[is_valid] = inp[is_valid]
