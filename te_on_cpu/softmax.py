"""Softmax of scaled attention scores over keys, with four kinds of mask.

Follows TransformerEngine 2.20.2: ``csrc/extensions/softmax.cpp`` and ``common/fused_softmax/*.cu``. Only FP16
and BF16 are supported, because TE's Python uses PyTorch's softmax for FP32 scores. Intermediate results are FP32, and
each result is rounded once.

The forwards round the scale to the dtype of the scores, because the CUDA launchers take it in that type. The backwards
use it as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]

_MASKED_SCORE = -10000.0
_LONGEST_SEQUENCE = 16384
_DTYPES = (torch.float16, torch.bfloat16)


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the softmax of ``scale_factor * input`` over the last dimension.

    Args:
        input: scores, FP16 or BF16, ``[batch, heads, queries, keys]``.

    Returns:
        Probabilities in the shape and dtype of ``input``.

    Raises:
        ValueError: for other dtypes, and for shapes that TE's kernel refuses.
    """
    _check_attention_scores(input, least_queries=2)
    return torch.softmax(_scaled(input, scale_factor), -1).to(input.dtype)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """Apply ``scaled_softmax_forward`` with masked scores of -10000; a row whose maximum is -10000 becomes zeros.

    Args:
        mask: bool or uint8, ``[batch or 1, 1, queries, keys]``; true or 1 means masked out.
    """
    _check_attention_scores(input, least_queries=2)
    batch, _, queries, keys = input.shape
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, queries, keys):
        raise ValueError(
            f"the mask of scores {list(input.shape)} must be [{batch} or 1, 1, {queries}, {keys}], "
            f"but is {list(mask.shape)}"
        )
    scores = _scaled(input, scale_factor).masked_fill_(mask == 1, _MASKED_SCORE)
    nothing_to_attend = scores.amax(-1, keepdim=True) == _MASKED_SCORE
    return torch.softmax(scores, -1).masked_fill_(nothing_to_attend, 0).to(input.dtype)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the causal softmax of square scores ``[batch * heads, seq, seq]``: query i attends to keys up to i."""
    _check(input, dimensions=3)
    scores = _scaled(input, scale_factor).masked_fill_(_future(input), float("-inf"))
    return torch.softmax(scores, -1).to(input.dtype)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the causal softmax aligned bottom right: the last query attends to all keys.

    Shapes are those of ``scaled_softmax_forward``. If there are more queries than keys, the first rows attend to
    nothing and become zeros.
    """
    _check_attention_scores(input, least_queries=1)
    future = _future(input)
    scores = _scaled(input, scale_factor).masked_fill_(future, _MASKED_SCORE)
    return torch.softmax(scores, -1).masked_fill_(future, 0).to(input.dtype)


def scaled_softmax_backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """Return ``scale_factor * (g y - y sum(g y))`` for gradients g of probabilities y, summed over the last dimension.

    Returns:
        A new tensor in the shape and dtype of ``output_grads``.

    Raises:
        ValueError: if either is not a 4D tensor of FP16 or BF16.
    """
    return _backward(output_grads, softmax_results, scale_factor, dimensions=4)


def scaled_masked_softmax_backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """Apply ``scaled_softmax_backward``; masked probabilities are 0, and so are their gradients."""
    return _backward(output_grads, softmax_results, scale_factor, dimensions=4)


def scaled_upper_triang_masked_softmax_backward(
    output_grads: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """Apply ``scaled_softmax_backward`` to 3D tensors, with 0 where a key comes after the query."""
    return _backward(output_grads, softmax_results, scale_factor, dimensions=3, is_causal=True)


def scaled_aligned_causal_masked_softmax_backward(
    output_grads: Tensor, softmax_results: Tensor, scale_factor: float
) -> Tensor:
    """Apply ``scaled_softmax_backward``, with 0 where a key comes after the query."""
    return _backward(output_grads, softmax_results, scale_factor, dimensions=4, is_causal=True)


def _backward(
    output_grads: Tensor, softmax_results: Tensor, scale_factor: float, dimensions: int, is_causal: bool = False
) -> Tensor:
    _check(output_grads, dimensions)
    _check(softmax_results, dimensions)
    y = softmax_results.float()
    gradient = output_grads.float().mul_(y)
    if is_causal:  # The kernels read nothing there: the gradient is 0, and not -0 where the incoming one is negative.
        gradient.masked_fill_(_future(y), 0.0)
    row_sum = gradient.sum(-1, keepdim=True)
    return gradient.sub_(y.mul_(row_sum)).mul_(float(scale_factor)).to(output_grads.dtype)


def _scaled(scores: Tensor, scale_factor: float) -> Tensor:
    """Return a new FP32 tensor of scaled scores."""
    scale = torch.tensor(float(scale_factor), dtype=scores.dtype).item()
    return scores.float().mul_(scale)


def _future(scores: Tensor) -> Tensor:
    """Return which keys come after each query, ``[queries, keys]``, if the last query is aligned with the last key."""
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool).triu_(keys - queries + 1)


def _check(scores: Tensor, dimensions: int) -> None:
    if scores.dim() != dimensions or scores.dtype not in _DTYPES:
        raise ValueError(
            f"TransformerEngine's fused softmax takes {dimensions}D tensors of float16 or bfloat16, "
            f"got {scores.dtype} {list(scores.shape)}"
        )
    if scores.shape[-1] > _LONGEST_SEQUENCE:
        raise ValueError(f"at most {_LONGEST_SEQUENCE} keys, got {scores.shape[-1]}")


def _check_attention_scores(scores: Tensor, least_queries: int) -> None:
    _check(scores, dimensions=4)
    queries, keys = scores.shape[-2:]
    if keys % 8 or queries < least_queries:
        raise ValueError(
            f"TransformerEngine's fused softmax needs a multiple of 8 keys and at least {least_queries} queries, "
            f"got {keys} keys and {queries} queries"
        )
