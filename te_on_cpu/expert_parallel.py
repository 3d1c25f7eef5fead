"""Expert parallelism: send tokens to the ranks that hold their experts, and the experts' results back.

TE's functions are NCCL EP's of its high-throughput mode, with the rows that a rank receives in the order of its
experts. Sources: ``csrc/extensions/ep.cpp`` of transformer-engine-torch 2.20.2, ``common/ep/ep_backend.cpp`` of TE, and
``nccl_ep/`` of NVIDIA/nccl-extensions (44d2de0): ``include/nccl_ep.h``, ``device/scan_kernel.cuh`` for the order of
rows, and ``local_reduce_kernel_impl`` of ``device/ht_ep.cuh`` for the sums.

NCCL EP sends each row where it is needed. Here every rank gathers what all have, by gloo, and takes its rows. The
routing that ``handle_mem`` holds is the gathered ``topk_idx``, and all else follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = [
    "ep_combine",
    "ep_combine_bwd",
    "ep_dispatch",
    "ep_dispatch_bwd",
    "ep_finalize",
    "ep_get_zero_copy",
    "ep_handle_mem_size",
    "ep_initialize",
    "ep_prepare",
    "ep_prepare_and_dispatch",
    "ep_zero_copy_supported",
]


@dataclass(frozen=True)
class _Group:
    """The process's one group of expert parallel ranks.

    Attributes:
        name: the process group's.
        experts: the number of experts on all ranks.
        most: the most tokens that one rank sends.
        capacity: the rows that a rank receives at most; 0 if the buffers follow what is received.
        drops: whether rows beyond that are dropped.
    """

    name: str
    experts: int
    most: int
    capacity: int
    drops: bool

    @property
    def process_group(self) -> Any:
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return resolve(self.name)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def own_experts(self) -> range:
        count = self.experts // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def gather(self, own: Tensor) -> Tensor:
        """Return every rank's tensor, ``[ranks, *shape]``; all have the same shape."""
        sent = own.contiguous().view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent, self.process_group)
        return torch.stack(parts).view(own.dtype)


_groups: list[_Group] = []  # empty, or the one group


def ep_initialize(
    comm_ptr: int,
    group_name: str,
    num_experts: int,
    max_tokens_per_rank: int,
    max_recv_tokens_per_rank: int,
    hidden_dim: int,
    max_num_sms: int = 0,
    max_token_dtype: torch.dtype = torch.bfloat16,
    zero_copy: bool = False,
    num_topk: int = 0,
    drop_on_overflow: bool = False,
) -> None:
    """Start expert parallelism over a process group, once in a process.

    Args:
        max_recv_tokens_per_rank: 0 if the buffers follow what is received.
        comm_ptr, hidden_dim, max_num_sms, max_token_dtype, num_topk: size NCCL's buffers, of which there are none here.

    Raises:
        RuntimeError: if it was started before, or the numbers do not fit.
    """
    if _groups:
        raise RuntimeError("ep_initialize called twice without ep_finalize")
    if zero_copy:
        raise RuntimeError("the CPU kernels have no symmetric memory for zero_copy")
    group = _Group(group_name, num_experts, max_tokens_per_rank, max_recv_tokens_per_rank, drop_on_overflow)
    if num_experts <= 0 or num_experts % group.size:
        raise RuntimeError(f"num_experts ({num_experts}) must be divisible by ep_size ({group.size})")
    if max_tokens_per_rank <= 0:
        raise RuntimeError(f"max_tokens_per_rank must be positive, got {max_tokens_per_rank}")
    if hidden_dim * max_token_dtype.itemsize < 16:
        raise RuntimeError(f"hidden_dim * sizeof(max_token_dtype) must be >= 16, got hidden_dim={hidden_dim}")
    _groups.append(group)


def ep_finalize() -> None:
    """End it; nothing happens if it was not started."""
    _groups.clear()


def ep_get_zero_copy() -> bool:
    return False


def ep_zero_copy_supported() -> bool:
    return False


def _find_group() -> _Group:
    if not _groups:
        raise RuntimeError("EPBackend not initialized. Call nvte_ep_initialize() first.")
    return _groups[0]


# The routing: which row of a rank's received tokens comes from which token.


@dataclass(frozen=True)
class _Routing:
    """Where this rank's rows come from.

    Attributes:
        group: the ranks.
        counts: int64 ``[ranks, experts of each]``, the rows of each expert with their padding; without limit.
        rows: int64 ``[received]``, the rows that are filled.
        tokens: int64 ``[received]``, the token of each: its rank times ``group.most``, plus its place there.
        choices: int64 ``[received]``, which of its token's ``top_k`` choices each is.
        own: the number of tokens that this rank has sent.
        top_k: the number of choices of each token.
    """

    group: _Group
    counts: Tensor
    rows: Tensor
    tokens: Tensor
    choices: Tensor
    own: int
    top_k: int

    @property
    def padded(self) -> slice:
        """Return the rows of all blocks."""
        total = int(self.counts[self.group.rank].sum())
        return slice(0, min(total, self.group.capacity) if self.group.capacity else total)


def ep_handle_mem_size(top_k: int, dispatch_output_per_expert_alignment: int = 0) -> int:
    """Return how many bytes hold a routing."""
    group = _find_group()
    return 8 * (2 + group.size + group.size * group.most * top_k)


def ep_prepare(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens_per_expert: Tensor,
    top_k: int,
    dispatch_output_per_expert_alignment: int,
    total_recv_tokens: Tensor,
) -> None:
    """Gather the routing of all ranks into ``handle_mem``.

    Args:
        handle_mem: uint8 of ``ep_handle_mem_size`` bytes.
        topk_idx: int32 or int64 ``[tokens, top_k]``, the experts of each token; -1 for none.
        tokens_per_expert: int64 ``[own experts]``, filled with the rows of each expert, padding included.
        dispatch_output_per_expert_alignment: each expert's rows are padded to a multiple; 0 or 1 for none.
        total_recv_tokens: int64 ``[1]``, filled with the sum of these, before any is dropped.

    Raises:
        RuntimeError: if a rank sends or receives more than ``ep_initialize`` allows, and rows are not to be dropped.
    """
    group = _find_group()
    indices = topk_idx.reshape(-1, topk_idx.shape[-1]).long()
    if len(indices) > group.most:
        raise RuntimeError(f"{len(indices)} tokens are more than max_tokens_per_rank={group.most}")
    sent = torch.full((1 + group.most * top_k,), -1)
    sent[0], sent[1 : 1 + indices.numel()] = len(indices), indices.flatten()
    every = group.gather(sent)
    held = torch.cat([torch.tensor([top_k, dispatch_output_per_expert_alignment]), every[:, 0], every[:, 1:].flatten()])
    handle_mem.view(torch.int64)[: len(held)] = held
    counts = _read_routing(handle_mem).counts
    totals = counts.sum(1)
    if group.capacity and int(totals.max()) > group.capacity and not group.drops:
        raise RuntimeError(
            f"rank {int(totals.argmax())} receives {int(totals.max())} tokens, more than "
            f"recv_capacity_per_rank={group.capacity}, where NCCL EP traps; increase it, or pass drop_on_overflow=True"
        )
    total_recv_tokens.copy_(totals[group.rank : group.rank + 1])
    ends = counts[group.rank].cumsum(0)
    left = ends.clamp(max=group.capacity) if group.capacity else ends
    tokens_per_expert.copy_(left.diff(prepend=left.new_zeros(1)))


def _read_routing(handle_mem: Tensor) -> _Routing:
    group, held = _find_group(), handle_mem.view(torch.int64)
    (top_k, alignment), sent, start = held[:2].tolist(), held[2 : 2 + group.size], 2 + group.size
    indices = held[start : start + group.size * group.most * top_k].view(-1, top_k)
    step = max(alignment, 1)
    counts = -(-torch.bincount(indices[indices >= 0], minlength=group.experts) // step) * step
    counts = counts.view(group.size, -1)
    begins = (counts.cumsum(1) - counts)[group.rank].tolist()
    places = []
    for expert, begin in zip(group.own_experts, begins, strict=True):
        found = (indices == expert).nonzero()  # in the order of ranks, and of each rank's tokens
        places.append(torch.cat([found, begin + torch.arange(len(found))[:, None]], 1))
    tokens, choices, rows = torch.cat(places).unbind(1)
    kept = rows < group.capacity if group.capacity else torch.ones_like(rows, dtype=torch.bool)
    own = int(sent[group.rank])
    return _Routing(group, counts, rows[kept], tokens[kept], choices[kept], own, top_k)


# The tokens.


def ep_dispatch(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    recv_tokens: Tensor,
    recv_topk_weights: Tensor,
    tokens_scale_inv: Tensor | None = None,
    recv_scale_inv: Tensor | None = None,
) -> None:
    """Send tokens and their weights to the ranks of their experts, after ``ep_prepare``.

    Args:
        tokens: ``[tokens, hidden]`` in BF16, FP16 or FP32, or the numbers of MXFP8 with their scales.
        topk_weights: FP32 ``[tokens, top_k]``.
        recv_tokens: ``[rows, hidden]`` of the same dtype, filled expert by expert; padding becomes 0, and rows behind
            the last expert's stay as they are.
        recv_topk_weights: FP32 ``[rows]``, filled in the same way.
        tokens_scale_inv: uint8 ``[tokens, hidden / 32]``.
        recv_scale_inv: uint8 ``[rows, hidden / 32]``.

    Raises:
        RuntimeError: if the buffers do not fit.
    """
    routing = _read_routing(handle_mem)
    if tokens.dtype != recv_tokens.dtype:
        raise RuntimeError(f"recv_tokens dtype ({recv_tokens.dtype}) must match tokens dtype ({tokens.dtype})")
    _send_tokens(routing, tokens, recv_tokens)
    sent = _pad_tokens(routing, topk_weights)
    weights = routing.group.gather(sent).view(-1, routing.top_k)
    _check_rows(routing, recv_topk_weights)
    recv_topk_weights[routing.padded] = 0.0
    recv_topk_weights[routing.rows] = weights[routing.tokens, routing.choices]
    if tokens_scale_inv is not None:
        if recv_scale_inv is None:
            raise RuntimeError("recv_scale_inv must be provided together with tokens_scale_inv")
        _send_tokens(routing, tokens_scale_inv, recv_scale_inv)


def ep_prepare_and_dispatch(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    tokens_per_expert: Tensor,
    total_recv_tokens: Tensor,
    top_k: int,
    dispatch_output_per_expert_alignment: int,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
    recv_scale_inv: Tensor | None = None,
    tokens_scale_inv: Tensor | None = None,
) -> list[Tensor]:
    """Prepare and dispatch; without buffers, return new ones of as many rows as are received."""
    alignment = dispatch_output_per_expert_alignment
    ep_prepare(handle_mem, topk_idx, tokens_per_expert, top_k, alignment, total_recv_tokens)
    made: list[Tensor] = []
    if recv_tokens is None or recv_topk_weights is None:
        rows = int(total_recv_tokens)
        recv_tokens, recv_topk_weights = tokens.new_empty(rows, tokens.shape[-1]), topk_weights.new_empty(rows)
        made = [recv_tokens, recv_topk_weights]
        if tokens_scale_inv is not None:
            recv_scale_inv = tokens_scale_inv.new_empty(rows, tokens_scale_inv.shape[-1])
            made.append(recv_scale_inv)
    buffers = recv_tokens, recv_topk_weights, tokens_scale_inv, recv_scale_inv
    ep_dispatch(handle_mem, topk_idx, tokens, topk_weights, *buffers)
    return made


def ep_combine(handle_mem: Tensor, expert_out: Tensor, result: Tensor) -> None:
    """Add up the rows of each token, without weights.

    A rank first adds a token's rows on it, in FP32, and rounds the sum; the token's own rank adds these sums in FP32.

    Args:
        expert_out: ``[rows, hidden]``, in the order of ``recv_tokens``.
        result: ``[tokens, hidden]``, filled; rows behind this rank's last token stay as they are.
    """
    _return_sums(_read_routing(handle_mem), expert_out, result)


def ep_dispatch_bwd(
    handle_mem: Tensor, grad: Tensor, g_recv_topk_weights: Tensor, grad_tokens: Tensor, grad_topk_weights: Tensor
) -> None:
    """Fill the gradients of tokens, as ``ep_combine`` adds, and of weights, 0 where a choice is none.

    Args:
        grad: ``[rows, hidden]``.
        g_recv_topk_weights: FP32 ``[rows]``.
        grad_tokens: ``[tokens, hidden]``.
        grad_topk_weights: FP32 ``[tokens, top_k]``.
    """
    routing = _read_routing(handle_mem)
    _return_sums(routing, grad, grad_tokens)
    group = routing.group
    weights = torch.zeros(group.size * group.most, routing.top_k)
    weights[routing.tokens, routing.choices] = g_recv_topk_weights[routing.rows]
    found = group.gather(weights).sum(0)  # of numbers that only one rank has
    begin = group.rank * group.most
    grad_topk_weights.copy_(found[begin : begin + routing.own])


def ep_combine_bwd(
    handle_mem: Tensor,
    grad: Tensor,
    grad_expert_out: Tensor,
    grad_scale_inv: Tensor | None = None,
    grad_expert_out_scale_inv: Tensor | None = None,
) -> None:
    """Send each token's gradient to its rows; the arguments are as those of ``ep_dispatch``."""
    routing = _read_routing(handle_mem)
    _send_tokens(routing, grad, grad_expert_out)
    if grad_scale_inv is not None and grad_expert_out_scale_inv is not None:
        _send_tokens(routing, grad_scale_inv, grad_expert_out_scale_inv)


def _send_tokens(routing: _Routing, tokens: Tensor, received: Tensor) -> None:
    """Fill this rank's rows with the tokens that they belong to."""
    _check_rows(routing, received)
    sent = _pad_tokens(routing, _as_indexable(tokens))
    every = routing.group.gather(sent).flatten(0, 1)
    filled = _as_indexable(received).view(-1, received.shape[-1])
    filled[routing.padded] = 0
    filled[routing.rows] = every[routing.tokens]


def _return_sums(routing: _Routing, rows: Tensor, result: Tensor) -> None:
    _check_rows(routing, rows)
    group, hidden = routing.group, rows.shape[-1]
    received = rows.reshape(-1, hidden)[routing.rows].float()
    sums = torch.zeros(group.size * group.most, hidden).index_add_(0, routing.tokens, received)
    total = torch.zeros(routing.own, hidden)
    for part in group.gather(sums.to(rows.dtype)):
        total += part[group.rank * group.most :][: routing.own].float()
    if len(result) < routing.own:
        raise RuntimeError(f"the result has {len(result)} rows for {routing.own} tokens")
    result[: routing.own] = total.to(result.dtype)


def _pad_tokens(routing: _Routing, tokens: Tensor) -> Tensor:
    """Return as many rows as any rank may send.

    Raises:
        RuntimeError: if there are other tokens than were prepared for.
    """
    if len(tokens) != routing.own:
        raise RuntimeError(f"topk_idx token count ({routing.own}) must equal tokens token count ({len(tokens)})")
    return torch.cat([tokens.detach(), tokens.new_zeros(routing.group.most - len(tokens), *tokens.shape[1:])])


def _check_rows(routing: _Routing, rows: Tensor) -> None:
    needed = routing.padded.stop
    if len(rows) < needed:
        raise RuntimeError(f"{needed} rows are received, and the buffer has {len(rows)}")


def _as_indexable(x: Tensor) -> Tensor:
    """Return numbers in FP8 as bytes, since PyTorch does not index them on a CPU."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
