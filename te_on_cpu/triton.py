"""TransformerEngine's functions that launch Triton kernels: masks of experts, cross entropy, padding, bias gradients.

Replaces the wrappers of ``transformer_engine/pytorch/triton`` (2.14.1 to 2.20.2), whose Triton kernels are in
``common/triton``. ``replacements`` says which of TE's functions are replaced, and ``kernel`` which kernels themselves
have a counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from te_on_cpu import mhc, mla_projection, versions

# Elements of rows that are moved at once, so that intermediate results stay in a core's cache.
_AT_ONCE = 1 << 18


def replacements(module: str) -> Mapping[str, Callable[..., Any]]:
    """Return the replacements for functions of TE's ``module`` by name, which most modules do not have."""
    package, _, name = module.rpartition(".")
    if package != "transformer_engine.pytorch.triton":
        return {}
    version = versions.installed_version()
    if name == "cross_entropy" and versions.has_cross_entropy_gradient_in_forward(version):
        gradient_in_fp32 = versions.has_cross_entropy_gradient_in_fp32(version)
        return {
            "cross_entropy_forward": _forward_before_2_19(gradient_in_fp32),
            "cross_entropy_backward": _backward_before_2_19,
        }
    return {function.__name__: function for function in _REPLACEMENTS.get(name, ())}


def kernel(name: str) -> Callable[..., Any] | None:
    """Return the counterpart of the Triton kernel with this dotted name, or None if there is none."""
    module, _, function = name.rpartition(".")
    return _KERNELS.get(module, {}).get(function)


_KERNELS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "transformer_engine.common.triton.mhc": mhc.KERNELS,
    "transformer_engine.pytorch.attention.fused_mla_q_uproj": {"rotary_bwd_q_kernel": mla_projection.rotate_gradient},
}


# Permutation of tokens to the rows of their experts and back, by a mask, and reordering of chunks of rows.
#
# Replaces the wrappers of ``transformer_engine/pytorch/triton/permutation.py`` (2.14.1 to 2.20.2), whose Triton kernels
# are in ``common/triton/permutation.py``. ``row_id_map`` is int32 ``[tokens, 2 * experts + 1]``. It holds, for each
# token, the rows of its n experts, highest first, from column 0; these experts from column ``experts``; and n, last.


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return the ``row_id_map`` of a mask ``[num_tokens, num_experts]``; unused columns are -1.

    Rows are numbered expert by expert, and token by token within an expert.
    """
    mask = routing_map.t().bool()
    rows = (mask.reshape(-1).cumsum(0) - 1).view(num_experts, num_tokens)
    rows, experts = rows.masked_fill(~mask, -1).t().sort(1, descending=True)
    routed = mask.sum(0)
    experts = experts.masked_fill(rows < 0, -1)
    return torch.cat([rows, experts, routed[:, None]], 1).int()


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Copy each token, its scales and its probabilities to the rows of its experts.

    Args:
        inp: ``[num_tokens, hidden_size]``, any dtype.
        probs: ``[num_tokens, num_experts]``; where one is 0, the row becomes zeros.
        scale: ``[num_tokens, scale_hidden_dim]``.
        pad_offsets: int ``[num_experts]``, the number of rows of zeros before the rows of each expert.

    Returns:
        The rows ``[num_out_tokens, hidden_size]``, their scales, and their probabilities ``[num_out_tokens]``.
    """
    tokens, experts, rows = _routes(row_id_map, num_experts, pad_offsets)
    source = tokens.new_zeros(num_out_tokens).index_copy_(0, rows, tokens)
    is_empty = torch.ones(num_out_tokens, dtype=torch.bool).index_fill_(0, rows, False)
    permuted_scale = permuted_probs = None
    if scale is not None:
        permuted_scale = scale.new_zeros(num_out_tokens, scale.shape[1]).index_copy_(0, rows, scale[tokens])
    if probs is not None:
        chosen = probs[tokens, experts]
        permuted_probs = probs.new_zeros(num_out_tokens).index_copy_(0, rows, chosen)
        is_empty |= permuted_probs == 0
    permuted = inp.index_select(0, source)
    if is_empty.any():
        permuted.masked_fill_(is_empty[:, None], 0)
    return permuted, permuted_scale, permuted_probs


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Sum the rows of each token in FP32, times ``merging_probs`` if there are any.

    Args:
        inp: ``[rows, hidden_size]``.
        merging_probs: ``[num_tokens, num_experts]``.
        permuted_probs: ``[rows]``, which are also put back in the order of tokens.

    Returns:
        The tokens ``[num_tokens, hidden_size]`` in the dtype of ``inp``, and ``permuted_probs`` as
        ``[num_tokens, num_experts]``, 0 where a token has no row.
    """
    tokens, experts, rows = _routes(row_id_map, num_experts, pad_offsets)
    total = torch.zeros(num_tokens, hidden_size)
    for part in _parts(rows, hidden_size):
        values = inp.index_select(0, rows[part]).float()
        if merging_probs is not None:
            values *= merging_probs[tokens[part], experts[part], None].float()
        total.index_add_(0, tokens[part], values)
    probs = None
    if permuted_probs is not None:
        probs = permuted_probs.new_zeros(num_tokens, num_experts)
        probs[tokens, experts] = permuted_probs[rows]
    return total.to(inp.dtype), probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows ``[num_out_tokens, hidden_size]`` and of ``merging_probs``, computed in FP32.

    Args:
        fwd_output_grad: gradient of the tokens, ``[num_tokens, hidden_size]``.
        fwd_input: the rows of the forward pass.
    """
    tokens, experts, rows = _routes(row_id_map, num_experts, pad_offsets)
    rows_grad = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    probs_grad = torch.zeros_like(merging_probs)
    for part in _parts(rows, hidden_size):
        where, route = rows[part], (tokens[part], experts[part])
        grad = fwd_output_grad.index_select(0, route[0]).float()
        rows_grad.index_copy_(0, where, (grad * merging_probs[route][:, None].float()).to(fwd_output_grad.dtype))
        probs_grad[route] = grad.mul_(fwd_input.index_select(0, where)).sum(1).to(merging_probs.dtype)
    return rows_grad, probs_grad


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Return the new place of each row, int32 ``[num_tokens]``, if chunks are put in the order ``sorted_indices``.

    Args:
        split_sizes: rows of each chunk, int ``[num_splits]``. Rows beyond the last chunk stay where they are.
        sorted_indices: int ``[num_splits]``; chunk ``sorted_indices[i]`` comes i-th.
    """
    sizes, order = split_sizes.long(), sorted_indices.long()
    starts = torch.empty_like(sizes)
    starts[order] = sizes[order].cumsum(0) - sizes[order]
    shift = starts - (sizes.cumsum(0) - sizes)
    rows = torch.arange(num_tokens)
    in_chunks = rows[: int(sizes.sum())]
    in_chunks += shift.repeat_interleave(sizes)[: len(in_chunks)]
    return rows.int()


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Move rows ``[num_tokens, hidden_size]`` and their probabilities by a map of ``make_chunk_sort_map``, or back."""
    to = row_id_map.long()
    source = torch.empty_like(to).index_copy_(0, to, torch.arange(num_tokens)) if is_forward else to
    return inp.index_select(0, source), None if probs is None else probs[source]


def _routes(row_id_map: Tensor, num_experts: int, pad_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, expert and row of each route, int64; a token's routes follow each other, highest row first."""
    tokens, column = torch.nonzero(torch.arange(num_experts) < row_id_map[:, 2 * num_experts, None], as_tuple=True)
    rows, experts = row_id_map[tokens, column].long(), row_id_map[tokens, num_experts + column].long()
    return tokens, experts, rows if pad_offsets is None else rows + pad_offsets.long()[experts]


def _parts(rows: Tensor, hidden_size: int) -> Iterator[slice]:
    """Split routes into ranges whose values stay in a core's cache."""
    step = max(1, _AT_ONCE // max(1, hidden_size))
    return (slice(start, start + step) for start in range(0, len(rows), step))


# Zero padding for the scales of columnwise data.
#
# Replaces the wrapper of a Triton kernel in ``transformer_engine/pytorch/triton/pad.py`` (2.14.1 to 2.20.2).


def pad_columnwise_scale_inv(inp: Tensor) -> Tensor:
    """Return a matrix with zeros below and to the right, up to multiples of 128 rows and 4 columns; any dtype."""
    rows, columns = inp.shape
    return pad(inp, (0, -columns % 4, 0, -rows % 128))


# Bias gradients of several groups of rows in one call.
#
# Replaces the wrappers of a Triton kernel in ``transformer_engine/pytorch/triton/grouped_dbias_dscales.py`` (2.16.1 to
# 2.20.2). All sums are FP32.


def compute_grouped_dbias(dy: Tensor, offsets: Tensor, num_groups: int, dbias: Tensor | None = None) -> Tensor:
    """Add the sum of each group's rows to ``dbias``.

    Args:
        dy: ``[rows, hidden]``; rows after the last group are ignored.
        offsets: int64 ``[num_groups + 1]``, the starts of groups, from 0, and the end.
        dbias: FP32 ``[num_groups, hidden]``. Default: zeros.
    """
    if dbias is None:
        dbias = torch.zeros(num_groups, dy.shape[1])
    group = _groups(offsets)
    return dbias.index_add_(0, group, dy[: len(group)].float())


def compute_grouped_dbias_dscales(
    dy: Tensor,
    scales: Tensor,
    bias: Tensor,
    offsets: Tensor,
    dbias: Tensor | None = None,
    dscales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of a bias and of a scale, where each group's output is ``(product + bias) * scale``.

    Args:
        dy: ``[rows, hidden]``; rows after the last group are ignored.
        scales: FP32 ``[rows]``.
        bias: ``[groups, hidden]``.
        offsets: int64 ``[groups + 1]``, the starts of groups, from 0, and the end.
        dbias: FP32 ``[groups, hidden]``. Default: zeros.
        dscales: FP32 ``[rows]``, the product's part of the gradient. Default: zeros.
    """
    if dbias is None:
        dbias = torch.zeros(bias.shape)
    if dscales is None:
        dscales = torch.zeros(len(dy))
    group = _groups(offsets)
    rows = dy[: len(group)].float()
    dbias.index_add_(0, group, rows * scales[: len(group), None])
    dscales[: len(group)] += (rows * bias[group].float()).sum(1)
    return dbias, dscales


def _groups(offsets: Tensor) -> Tensor:
    """Return the group of each row, int64."""
    return torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())


# Cross entropy over a vocabulary that may be split over ranks (TE 2.19 to 2.20.2).
#
# Losses and gradients are FP32, whatever the dtype of the logits.


@dataclass(frozen=True)
class Statistics:
    """Hold the reductions of rows of logits over all ranks.

    Attributes:
        stats: FP32 ``[rows, 2]``: the largest logit, and the sum of the exponentials relative to it.
        of_target: FP32 ``[rows]``: the target's logit, or ``-inf`` if the target is not in the vocabulary.
        total: FP32 ``[rows]``: the sum of the logits.
    """

    stats: Tensor
    of_target: Tensor
    total: Tensor


def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
    overwrite_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int]:
    """Return the loss of each row, or the mean loss of the rows that are not ignored.

    Args:
        _input: this rank's part of the logits, ``[batch, sequence, vocabulary]``, FP32 or BF16.
        target: int64, a token for each row; ``ignore_idx`` makes a loss of 0.
        label_smoothing: the part of the target's weight that is spread evenly over all tokens.
        reduce_loss: average over the rows that are not ignored; otherwise the loss is ``[batch, sequence]``.
        overwrite_input: save the logits themselves for the backward pass, not a copy.

    Returns:
        The loss (FP32; ``[1]`` if reduced), and arguments of ``cross_entropy_backward``: the saved logits,
        ``Statistics.stats``, the target, the number of rows in the mean or None, this rank and the number of ranks.
    """
    rank, ranks = rank_and_size(dist_process_group)
    batch, sequence, vocabulary = _input.shape
    target = target.contiguous()
    tokens = target.view(-1)
    row = statistics(_input.reshape(-1, vocabulary), tokens, rank, ranks, dist_process_group)
    losses = row_losses(row, vocabulary * ranks, label_smoothing).masked_fill_(tokens == ignore_idx, 0.0)
    saved = _input if overwrite_input else _input.clone(memory_format=torch.contiguous_format)
    if not reduce_loss:
        return losses.view(batch, sequence), saved, row.stats, target, None, rank, ranks
    count = counted_rows(tokens, ignore_idx)
    return losses.sum() / count, saved, row.stats, target, count, rank, ranks


def cross_entropy_backward(
    saved_input: Tensor,
    stats: Tensor,
    target: Tensor,
    n_non_ignore: Tensor | None,
    grad_output: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    rank: int,
    world_size: int,
    ignore_idx: int,
) -> Tensor:
    """Compute the gradient of the logits in FP32, and write it, rounded once, over the saved logits."""
    rows = saved_input.view(-1, saved_input.shape[-1])
    factor = grad_output.reshape(-1, 1).float()
    if n_non_ignore is not None:
        factor = factor / n_non_ignore
    grad = gradient_without_target(rows, stats, label_smoothing, world_size)
    grad[targets_here(target.view(-1), rows.shape[1], rank)] -= 1 - label_smoothing
    ignored = target.view(-1, 1) == ignore_idx
    rows.copy_(grad.mul_(factor).masked_fill_(ignored, 0.0))
    return saved_input


def rank_and_size(group: Any) -> tuple[int, int]:
    """Return this rank and the number of ranks, ``(0, 1)`` without a process group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def counted_rows(tokens: Tensor, ignore_idx: int) -> Tensor:
    """Return the number of rows that are not ignored, at least 1, as int64 ``[1]``."""
    return (tokens != ignore_idx).sum().clamp_(min=1).view(1)


def statistics(rows: Tensor, tokens: Tensor, rank: int, ranks: int, group: Any) -> Statistics:
    """Return the ``Statistics`` of rows ``[rows, vocabulary]`` that are split over the ranks in order."""
    logits = rows.float()
    largest = logits.amax(1)
    column = (tokens - rank * logits.shape[1])[:, None]
    is_here = (column >= 0) & (column < logits.shape[1])
    of_target = logits.gather(1, column.masked_fill(~is_here, 0)).masked_fill(~is_here, -torch.inf)[:, 0]
    local = torch.stack([largest, (logits - largest[:, None]).exp_().sum(1), of_target, logits.sum(1)], 1)
    if ranks == 1:
        return Statistics(local[:, :2].contiguous(), local[:, 2], local[:, 3])
    parts = torch.empty(ranks, *local.shape)
    dist.all_gather_into_tensor(parts.view(-1, 4), local, group=group)
    largest = parts[:, :, 0].amax(0)
    denominator = (parts[:, :, 1] * (parts[:, :, 0] - largest).exp()).sum(0)
    return Statistics(torch.stack([largest, denominator], 1), parts[:, :, 2].amax(0), parts[:, :, 3].sum(0))


def row_losses(row: Statistics, vocabulary: int, label_smoothing: float) -> Tensor:
    """Return the losses, FP32 ``[rows]``: ``-log softmax`` of the target, smoothed over the whole vocabulary."""
    largest, log_sum = row.stats[:, 0], row.stats[:, 1].log()
    losses = -(row.of_target - largest - log_sum)
    if label_smoothing > 0:
        smooth = label_smoothing * (largest + log_sum) - label_smoothing / vocabulary * row.total
        losses = losses * (1 - label_smoothing) + smooth
    return losses


def gradient_without_target(rows: Tensor, stats: Tensor, label_smoothing: float, ranks: int) -> Tensor:
    """Return softmax minus the weight that label smoothing gives each token, FP32 in the shape of ``rows``."""
    return (rows.float() - stats[:, :1]).exp_().div_(stats[:, 1:]).sub_(label_smoothing / (rows.shape[1] * ranks))


def targets_here(tokens: Tensor, columns: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows whose target is in this rank's part of the vocabulary, and the target's columns there."""
    column = tokens - rank * columns
    (rows,) = ((column >= 0) & (column < columns)).nonzero(as_tuple=True)
    return rows, column[rows]


# Cross entropy up to 2.18, where the forward pass also computes the gradient.
#
# Up to 2.16, the gradient overwrites the logits in their dtype, so the backward pass rounds it again. 2.18 keeps it in
# FP32.


_Forward = Callable[[Tensor, Tensor, float, bool, Any, int], tuple[Tensor, Tensor]]


def _forward_before_2_19(gradient_in_fp32: bool) -> _Forward:
    """Return the ``cross_entropy_forward`` of these versions.

    It takes the logits ``[batch, sequence, vocabulary]``, the target, the label smoothing, whether to average over the
    rows that are not ignored, the process group, and the target to ignore. It returns the same loss as 2.19, and the
    gradient of the logits for a loss whose own gradient is 1.
    """

    def forward(
        _input: Tensor,
        target: Tensor,
        label_smoothing: float,
        reduce_loss: bool,
        dist_process_group: Any,
        ignore_idx: int,
    ) -> tuple[Tensor, Tensor]:
        logits = _input.contiguous()
        loss, _, stats, tokens, count, rank, ranks = cross_entropy_forward(
            logits, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx, True
        )
        grad = torch.empty_like(logits, dtype=torch.float32) if gradient_in_fp32 else logits
        rows, flat = grad.view(-1, grad.shape[-1]), tokens.view(-1)
        divisor = 1 if count is None else count
        rows.copy_(gradient_without_target(logits.view(rows.shape), stats, label_smoothing, ranks) / divisor)
        target_column = targets_here(flat, rows.shape[1], rank)
        rows[target_column] = (rows[target_column].float() - (1 - label_smoothing) / divisor).to(rows.dtype)
        rows.masked_fill_(flat[:, None] == ignore_idx, 0.0)
        return loss, grad

    return forward


def _backward_before_2_19(grad_input: Tensor, grad_output: Tensor, is_cg_capturable: bool = False) -> Tensor:
    """Scale the gradient of the forward pass by that of the loss, in place."""
    rows = grad_input.view(-1, grad_input.shape[-1])
    rows.copy_(rows.float() * grad_output.reshape(-1, 1).float())
    return grad_input


# The replacements, by the module of TE's package that defines the replaced functions.
_REPLACEMENTS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "cross_entropy": (cross_entropy_forward, cross_entropy_backward),
    "grouped_dbias_dscales": (compute_grouped_dbias, compute_grouped_dbias_dscales),
    "pad": (pad_columnwise_scale_inv,),
    "permutation": (
        make_chunk_sort_map,
        make_row_id_map,
        permute_with_mask_map,
        sort_chunks_by_map,
        unpermute_with_mask_map,
        unpermute_with_mask_map_bwd_with_merging_probs,
    ),
}
