"""A mixture of experts: the choice of experts for each token, and the rows of tokens that each expert gets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from te_on_cpu.enums import NVTERoutingMapFormat

__all__ = [
    "fused_moe_aux_loss_bwd",
    "fused_moe_aux_loss_fwd",
    "fused_moe_aux_loss_fwd_graph_safe",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "fused_score_for_moe_aux_loss_bwd",
    "fused_score_for_moe_aux_loss_fwd",
    "fused_topk_with_score_function_bwd",
    "fused_topk_with_score_function_fwd",
    "fused_topk_with_score_function_qb_fwd",
    "moe_permute_bwd",
    "moe_permute_fwd",
    "moe_unpermute_bwd",
    "moe_unpermute_fwd",
]

_EPSILON = 1e-20
_SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int = 0,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose ``topk`` experts for each token.

    Args:
        logits: ``[*tokens, experts]``, FP32, FP16 or BF16.
        use_pre_softmax: take the softmax before the choice.
        num_groups: number of groups of experts, all of the same size.
        group_topk: number of groups whose experts may be chosen: those with the largest sums of their
            ``topk / group_topk`` best scores.
        scaling_factor: factor of the probabilities.
        expert_bias: FP32 ``[experts]``, added to sigmoid and sqrtsoftplus scores only for the choice.
        routing_map_format: whether the map has a byte or a bit for each expert.
        topk_indices: int16, int32 or int64 ``[*tokens, topk]``, filled with the chosen experts in place of a map.

    Returns:
        The probabilities, in the shape and dtype of the logits, 0 for experts that were not chosen; the routing map
        (bool ``[*tokens, experts]`` or uint8 ``[*tokens, experts / 8 rounded up]``) or ``topk_indices``; and the FP32
        activations that the backward pass needs: logits for sqrtsoftplus, otherwise scores or probabilities.

    Raises:
        ValueError: for an unknown score function, a ``topk`` above the number of experts, or a bias with softmax.
    """
    _check(logits, topk, score_function)
    if expert_bias is not None and score_function == "softmax":
        raise ValueError("expert_bias goes with the score functions sigmoid and sqrtsoftplus, not with softmax")
    rows = logits.reshape(-1, logits.shape[-1]).float()
    scores = rows if score_function == "softmax" and not use_pre_softmax else _scores(rows, score_function)
    biased = scores if expert_bias is None else scores + expert_bias
    radix = uses_radix(topk, rows.shape[1])
    if group_topk is not None and num_groups is not None and group_topk > 0:
        candidates = _of_best_groups(biased, topk, num_groups, group_topk, radix)
    else:
        candidates = biased
    chosen = largest(candidates, topk, radix)
    return _routed(logits, scores, biased, chosen, use_pre_softmax, scaling_factor, score_function, expert_bias,
                   routing_map_format, topk_indices)  # fmt: skip


def fused_topk_with_score_function_qb_fwd(
    logits: Tensor,
    topk: int,
    scaling_factor: float | None,
    expert_bias: Tensor,
    routing_map_format: int,
    topk_indices: Tensor | None,
    histogram: Tensor,
    bin_bounds: Tensor,
    histogram_mode: int,
    bin_bounds_validated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose experts by sigmoid scores, and count in a histogram which bias each would have needed to be chosen.

    That bias is the best biased score that was not chosen, minus the expert's own score.

    Args:
        histogram: int32 ``[experts, bins]``, updated in place.
        bin_bounds: FP32 ``[2]``, the lowest and the highest bias; the outermost bins also count biases beyond.

    Returns:
        The results of ``fused_topk_with_score_function_fwd``; the best biased score that was not chosen, FP32
        ``[tokens]``; the histogram.

    Raises:
        ValueError: if ``topk`` is not below the number of experts, or the bounds are not finite and rising.
    """
    _check(logits, topk + 1, "sigmoid")
    low, high = bin_bounds.tolist()
    if not bin_bounds_validated and not -float("inf") < low < high < float("inf"):
        raise ValueError(f"bin_bounds must be finite and rising, got [{low}, {high}]")
    rows = logits.reshape(-1, logits.shape[-1]).float()
    scores = rows.sigmoid()
    biased = scores + expert_bias
    best = largest(biased, topk + 1, uses_radix(topk + 1, rows.shape[1]))
    cutoff = biased.gather(1, best[:, topk:])
    bins = histogram.shape[1]
    bin_of = ((cutoff - scores - low) * (bins / (bin_bounds[1] - bin_bounds[0]))).floor().clamp_(0, bins - 1).long()
    bin_of += torch.arange(rows.shape[1]) * bins
    histogram += torch.bincount(bin_of.view(-1), minlength=histogram.numel()).view(histogram.shape).int()
    routed = _routed(logits, scores, biased, best[:, :topk], False, scaling_factor, "sigmoid", expert_bias,
                     routing_map_format, topk_indices)  # fmt: skip
    return *routed, cutoff[:, 0], histogram


def fused_topk_with_score_function_bwd(
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = 0,
) -> None:
    """Write the gradient of the logits, in their dtype, from that of the probabilities.

    Args:
        routing_map: the map or, if ``use_dense_indices``, the indices of the forward pass.
        intermediate_output: the activations of the forward pass.
    """
    shape = grad_probs.shape
    routed = _unpacked(routing_map, shape[-1], use_dense_indices, routing_map_format).view(shape)
    grad = (grad_probs.float() * (1.0 if scaling_factor is None else scaling_factor)).masked_fill_(~routed, 0.0)
    activation = intermediate_output
    if score_function == "softmax":
        if use_pre_softmax:
            grad = _softmax_bwd(grad, activation)
        else:
            grad = _softmax_bwd(grad, activation.masked_fill(~routed, 0.0)).masked_fill_(~routed, 0.0)
    else:
        scores = _scores(activation, score_function) if score_function == "sqrtsoftplus" else activation
        if topk > 1:
            grad = _normalize_bwd(grad, scores.masked_fill(~routed, 0.0)).masked_fill_(~routed, 0.0)
        grad = _score_bwd(grad, activation, scores, score_function)
    grad_logits.copy_(grad)


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, score_function: str, routing_map_format: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores of all experts that sum to 1, FP32 in the shape of the logits, and the routing map of the best.

    Returns:
        The scores, the routing map of the ``topk`` best, and the FP32 activations that the backward pass needs.
    """
    _check(logits, topk, score_function)
    rows = logits.reshape(-1, logits.shape[-1]).float()
    scores = _scores(rows, score_function)
    activation = rows if score_function == "sqrtsoftplus" else scores
    if score_function != "softmax":
        scores = scores / (scores.sum(1, keepdim=True) + _EPSILON)
    chosen = largest(scores, topk, uses_radix(topk, rows.shape[1]))
    routing_map = _map(chosen, logits.shape, routing_map_format)
    return scores.view(logits.shape), routing_map, activation.reshape(logits.shape).clone()


def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: Tensor, grad_scores: Tensor, grad_logits: Tensor, topk: int, score_function: str
) -> None:
    """Write the gradient of the logits, in their dtype, from that of the scores."""
    activation, grad = intermediate_output, grad_scores.float()
    if score_function == "softmax":
        grad = _softmax_bwd(grad, activation)
    else:
        scores = _scores(activation, score_function) if score_function == "sqrtsoftplus" else activation
        grad = _score_bwd(_normalize_bwd(grad, scores), activation, scores, score_function)
    grad_logits.copy_(grad)


def _check(logits: Tensor, topk: int, score_function: str) -> None:
    if score_function not in _SCORE_FUNCTIONS:
        raise ValueError(f"score_function must be one of {', '.join(_SCORE_FUNCTIONS)}, got {score_function!r}")
    if logits.numel() == 0 or not 0 < topk <= logits.shape[-1]:
        raise ValueError(f"the router cannot choose {topk} experts from logits of shape {tuple(logits.shape)}")


def _scores(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if score_function == "sigmoid" else softplus(logits).sqrt()


def _of_best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int, radix: bool) -> Tensor:
    """Return the scores, with ``-inf`` for experts outside the best groups."""
    groups = scores.view(len(scores) * num_groups, -1)
    best = groups.gather(1, largest(groups, topk // group_topk, radix))
    group_scores = best.cumsum(1)[:, -1].view(len(scores), num_groups)
    outside = torch.ones(group_scores.shape, dtype=torch.bool)
    outside.scatter_(1, largest(group_scores, group_topk, radix), False)
    return groups.masked_fill(outside.view(-1, 1), -torch.inf).view(scores.shape)


def _routed(
    logits: Tensor,
    scores: Tensor,
    biased: Tensor,
    chosen: Tensor,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int,
    topk_indices: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the probabilities, routing map and activations for the chosen experts, ``[tokens, topk]``."""
    values = biased.gather(1, chosen)
    if expert_bias is not None:
        values = values - expert_bias[chosen]
    activation = scores
    if score_function == "softmax":
        if not use_pre_softmax:
            values = values.softmax(1)
            activation = torch.full_like(scores, -torch.inf).scatter_(1, chosen, values)
    else:
        if chosen.shape[1] > 1:
            values = values / (values.sum(1, keepdim=True) + _EPSILON)
        if score_function == "sqrtsoftplus":
            activation = logits.float()
    scaled = values * (1.0 if scaling_factor is None else scaling_factor)
    probs = torch.zeros_like(scores, dtype=logits.dtype).scatter_(1, chosen, scaled.to(logits.dtype))
    if topk_indices is None:
        routing_map = _map(chosen, logits.shape, routing_map_format)
    else:
        routing_map = topk_indices.copy_(chosen.view(topk_indices.shape))
    return probs.view(logits.shape), routing_map, activation.reshape(logits.shape)


def _map(chosen: Tensor, shape: torch.Size, routing_map_format: int) -> Tensor:
    """Return the routing map; packed into bits, the lowest expert is the lowest bit."""
    routed = torch.zeros(len(chosen), shape[-1], dtype=torch.bool).scatter_(1, chosen, True)
    if int(routing_map_format) == NVTERoutingMapFormat.BYTEMAP:
        return routed.view(shape)
    padded = torch.nn.functional.pad(routed, (0, -shape[-1] % 8)).view(*shape[:-1], -1, 8)
    return (padded.to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _unpacked(routing_map: Tensor, experts: int, use_dense_indices: bool, routing_map_format: int) -> Tensor:
    """Return the routing map as bool ``[tokens, experts]``."""
    rows = routing_map.reshape(-1, routing_map.shape[-1])
    if use_dense_indices:
        return torch.zeros(len(rows), experts, dtype=torch.bool).scatter_(1, rows.long(), True)
    if int(routing_map_format) == NVTERoutingMapFormat.BYTEMAP:
        return rows.bool()
    bits = (rows[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.view(len(rows), -1)[:, :experts].bool()


def _softmax_bwd(grad: Tensor, softmax: Tensor) -> Tensor:
    return softmax * (grad - (grad * softmax).sum(-1, keepdim=True))


def _normalize_bwd(grad: Tensor, scores: Tensor) -> Tensor:
    """Propagate a gradient back through the division of scores by their sum."""
    total = scores.sum(-1, keepdim=True) + _EPSILON
    return grad / total - (grad * scores).sum(-1, keepdim=True) / (total * total)


def _score_bwd(grad: Tensor, logits_or_scores: Tensor, scores: Tensor, score_function: str) -> Tensor:
    """Propagate a gradient back through sigmoid, from its output, or sqrtsoftplus, from its input and output."""
    if score_function == "sigmoid":
        return grad * scores * (1 - scores)
    slope = torch.where(logits_or_scores > 20, 1.0, logits_or_scores.sigmoid())
    return grad * (slope / (2 * scores + _EPSILON))


# The k largest scores of each row, in the order of the router's GPU kernels and with their choice among equal scores.
#
# Follows ``common/fused_router/utils.h`` of TransformerEngine 2.20.2. A few experts are found one by one, by a warp of
# 32 lanes that each look at every 32nd; many are found by radix selection.


_LANES = 32
_LARGEST_RADIX_ROW = 255 * _LANES


def uses_radix(k: int, columns: int) -> bool:
    """Return whether TE uses radix selection, which it does from k = ``NVTE_RADIX_TOPK_THRESHOLD`` (default 16) up."""
    return k >= int(os.environ.get("NVTE_RADIX_TOPK_THRESHOLD", "16")) and columns <= _LARGEST_RADIX_ROW


def largest(scores: Tensor, k: int, radix: bool) -> Tensor:
    """Return the columns of the k largest scores of each row.

    Args:
        scores: FP32 ``[rows, columns]``, no NaN.
        k: at most ``columns``.
        radix: whether TE uses radix selection. Then the lower column comes first, and wins among equal scores, but the
            smallest of the k scores come last. Otherwise scores are in descending order, and the one that the warp's
            reduction meets first wins among equals.

    Returns:
        Columns, int64 ``[rows, k]``.
    """
    if not radix:
        order = _warp_order(scores.shape[1])
        return order[scores[:, order].sort(dim=1, descending=True, stable=True).indices[:, :k]]
    bits = scores.contiguous().view(torch.int32)  # sorted below like the FP32 scores, with -0 below 0
    chosen = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).sort(dim=1, descending=True, stable=True)
    smallest, columns = chosen.values[:, k - 1 : k], chosen.indices[:, :k]
    is_smallest = (chosen.values[:, :k] == smallest) * scores.shape[1]
    return columns.gather(1, (columns + is_smallest).argsort(1))


def _warp_order(columns: int) -> Tensor:
    """Return the columns in the order of preference among equal scores.

    A lane keeps the first of equal scores that it meets, and its own score when it compares with another lane. Lanes
    that differ by 16 compare first, neighbours compare last, and lane 0 has the result, so the lanes are preferred in
    the order of their numbers with the bits reversed.
    """
    column = torch.arange(columns)
    lane = column % _LANES
    reversed_lane = sum(((lane >> bit) & 1) << (4 - bit) for bit in range(5))
    return (reversed_lane * columns + column).argsort()


# The loss that balances the load of a mixture's experts.
#
# Follows ``csrc/extensions/router.cpp`` of TransformerEngine 2.20.2 and ``common/fused_router/fused_moe_aux_loss.cu``:
# ``experts * coeff / (topk * tokens**2) * sum over experts of (tokens of the expert * sum of its probabilities)``, the
# auxiliary loss of Switch Transformers (arXiv 2101.03961, equation 4). All arithmetic is FP32.


def fused_moe_aux_loss_fwd(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """Return the loss, a scalar in the dtype of ``probs``, and the numbers that the backward pass needs.

    Args:
        probs: ``[num_rows, num_cols]``, one column per expert; sequences may lie side by side, so ``num_cols`` is a
            multiple of ``num_experts``.
        tokens_per_expert: ``[num_cols]``, any dtype.

    Returns:
        The loss; and, FP32 ``[2]``, the factor of the sum and the loss before it was rounded.

    Raises:
        ValueError: if ``topk`` is not positive or the columns do not fit the experts.
    """
    if topk <= 0 or num_experts <= 0 or num_cols % num_experts:
        raise ValueError(f"aux loss: {num_cols} columns, {num_experts} experts and topk {topk} do not fit each other")
    of_expert = probs.sum(0, dtype=torch.float32) * tokens_per_expert.float()
    # This divides in TE's order, because the order decides the last bit in FP32.
    factor = torch.tensor(coeff, dtype=torch.float32) * num_experts / topk / total_num_tokens / total_num_tokens
    loss = of_expert.sum() * factor
    return loss.to(probs.dtype), torch.stack([factor, loss])


def fused_moe_aux_loss_fwd_graph_safe(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """Return ``fused_moe_aux_loss_fwd`` with the number of tokens in an int64 tensor of one element."""
    return fused_moe_aux_loss_fwd(
        probs, tokens_per_expert, int(total_num_tokens), num_experts, num_rows, num_cols, topk, coeff
    )


def fused_moe_aux_loss_bwd(
    Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int, num_cols: int, grad_aux_loss: Tensor
) -> Tensor:
    """Return the gradient of ``probs``, ``[num_rows, num_cols]``, in the dtype of the loss's gradient."""
    of_expert = Const_buf[0] * tokens_per_expert.float() * grad_aux_loss.float()
    return of_expert.to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()


# Permutation of tokens to the rows of their experts and back, by a map of expert indices, and padding of these rows.
#
# Follows ``csrc/extensions/permutation.cpp`` and ``padding.cpp`` of TransformerEngine 2.20.2, and the kernels of
# ``common/permutation`` and ``common/util/padding.cu``. The permuted rows are sorted by expert; rows of one expert
# keep the order of their tokens. ``row_id_map`` is int32 ``[top_k * tokens]``. Its entry ``k * tokens + t`` is the
# row of token t for its k-th choice, or -1 if it was dropped. TE's Triton kernels use other maps, made from masks; see
# ``triton.py``.
#
# The kernels compute in the dtype of the rows (``TCompute`` in ``permutation.cu``): probabilities are rounded to it,
# and so are every product and every partial sum. Where a product is added to a sum, nvcc contracts the two into a
# fused multiply-add, which rounds once: CUDA's ``*`` and ``+`` of half precision allow that (CUDA Math API,
# ``__hmul_rn``), and the kernels of TransformerEngine's wheel do it on an H200.


def moe_permute_fwd(
    input: Tensor,
    dtype: int,
    indices: Tensor,
    num_out_tokens: int,
    workspace: list[Tensor],
    max_expanded_token_num: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Copy each token to one row for each of its experts.

    Args:
        input: ``[tokens, hidden]``, any dtype.
        indices: the experts of each token, int32 ``[tokens, top_k]``; negative ones come first.
        num_out_tokens: number of rows to keep; those of the last experts are dropped. 0 or less keeps all rows,
            ``tokens * top_k``.

    Returns:
        The rows ``[num_out_tokens, hidden]``, ``row_id_map``, and the workspace, which is only needed to sort on a GPU.
    """
    tokens, top_k = indices.shape
    rows = num_out_tokens if num_out_tokens > 0 else tokens * top_k
    choices = torch.argsort(indices.reshape(-1), stable=True)
    kept = choices[:rows]
    row_of_choice = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    row_of_choice[kept] = torch.arange(len(kept), dtype=torch.int32)
    permuted = input.new_zeros(rows, input.shape[1])
    permuted[: len(kept)] = input[kept // top_k]
    return permuted, row_of_choice.view(tokens, top_k).t().reshape(-1), workspace


def moe_unpermute_fwd(
    input: Tensor, dtype: int, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int
) -> Tensor:
    """Sum the rows of each token, times their probabilities, in the rows' dtype and in the order of its choices.

    Args:
        input: ``[rows, hidden]``.
        prob: ``[num_tokens, topK]``, or empty if all are 1.

    Returns:
        ``[num_tokens, hidden]``, in the dtype of ``input``; zeros for a token that was dropped.
    """
    total = input.new_zeros(num_tokens, input.shape[1])
    for k, rows in enumerate(row_id_map.view(topK, num_tokens)):
        choice = _rows(input, rows)
        total = _multiply_add(choice, prob[:, k, None].to(input.dtype), total) if prob.numel() else total + choice
    return total


def moe_permute_bwd(input: Tensor, dtype: int, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int) -> Tensor:
    """Return the gradient of the tokens from that of their rows, with the arguments of ``moe_unpermute_fwd``."""
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: int, row_id_map: Tensor, prob: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the probabilities.

    Args:
        input_bwd: gradient of the tokens, ``[tokens, hidden]``.
        input_fwd: the rows of the forward pass, ``[rows, hidden]``.
        prob: ``[tokens, top_k]``, or empty if there is one row per token.

    Returns:
        The gradient of the rows, in the dtype of ``input_bwd``; that of the probabilities, FP32 ``[tokens, top_k]``.
    """
    tokens, top_k = prob.shape if prob.numel() else (len(row_id_map), 1)
    rows_grad = torch.zeros(len(input_fwd), input_bwd.shape[1], dtype=input_bwd.dtype)
    prob_grad = torch.zeros(tokens, top_k)
    for k, rows in enumerate(row_id_map.view(top_k, tokens)):
        kept = rows >= 0
        weighted = input_bwd * prob[:, k, None].to(input_bwd.dtype) if prob.numel() else input_bwd
        rows_grad[rows[kept].long()] = weighted[kept]
        if prob.numel():
            prob_grad[:, k] = _inner_products(input_bwd, _rows(input_fwd, rows))
    return rows_grad, prob_grad


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the FP32 inner product of each pair of rows, in the order of a warp.

    A lane loads 16 bytes of each row at a time, and sums their products. Then the sums of lanes that differ by 16 are
    added, then by 8, and so on. Products are first rounded to the dtype of the rows; in FP32 they are not rounded.
    """
    of_a_load = 16 // left.element_size()
    lanes = torch.zeros(len(left), _LANES)
    for loads in zip(*(rows.split(_LANES * of_a_load, 1) for rows in (left, right)), strict=True):
        for a, b in zip(*(rows.unflatten(1, (-1, of_a_load)).unbind(2) for rows in loads), strict=True):
            total = lanes[:, : a.shape[1]]
            total.copy_(_multiply_add(a, b, total) if a.dtype is torch.float32 else total + a * b)
    while lanes.shape[1] > 1:
        lanes = lanes.unflatten(1, (2, -1)).sum(1)
    return lanes[:, 0]


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``a * b + c`` rounded once; FP64 holds the product, and its rounding of the sum is too fine to matter."""
    return torch.addcmul(c.double(), a.double(), b.double()).to(a.dtype)


def _rows(input: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of ``input`` with these indices, and zeros for -1."""
    return input[rows.clamp(min=0).long()].masked_fill_(rows[:, None] < 0, 0)


# Padding of each part to a number of rows that an FP8 product accepts.


def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copy each part of ``input`` to its place in ``output``, followed by rows of zeros.

    The place of a part without rows stays as it is, including its padding.

    Args:
        input: ``[sum of input_row_list, columns]``, any dtype.
        output: ``[sum of padded_input_row_list, columns]``, of the same dtype.
        input_row_list: the rows of each part.
        padded_input_row_list: the rows of each part in ``output``, at least as many.

    Raises:
        ValueError: if the lists differ in length or a tensor is not a matrix.
    """
    for source, padded in _parts(input, output, input_row_list, padded_input_row_list):
        padded[: len(source)] = source
        padded[len(source) :] = 0


def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Copy the leading rows of each part of ``input`` to ``output``: the inverse of ``fused_multi_row_padding``.

    Args:
        input: ``[sum of input_row_list, columns]``, any dtype.
        output: ``[sum of unpadded_input_row_list, columns]``, of the same dtype.
        input_row_list: the rows of each part, padding included.
        unpadded_input_row_list: the rows of each part without it.

    Raises:
        ValueError: if the lists differ in length or a tensor is not a matrix.
    """
    for source, unpadded in _parts(input, output, input_row_list, unpadded_input_row_list):
        unpadded.copy_(source[: len(unpadded)])


def _parts(
    input: Tensor, output: Tensor, input_rows: Sequence[int], output_rows: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return each part of the input that has rows, and its place in the output."""
    if len(input_rows) != len(output_rows):
        raise ValueError(f"padding got {len(input_rows)} parts of the input but {len(output_rows)} of the output")
    if input.dim() != 2 or output.dim() != 2:
        raise ValueError(f"padding works on matrices, got shapes {tuple(input.shape)} and {tuple(output.shape)}")
    sources = input[: sum(input_rows)].split(list(input_rows))
    places = output[: sum(output_rows)].split(list(output_rows))
    return ((source, place) for source, place in zip(sources, places, strict=True) if len(source))
