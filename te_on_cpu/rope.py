"""Rotary position embedding.

Follows TransformerEngine 2.20.2: ``csrc/extensions/apply_rope.cpp`` and ``common/fused_rope/fused_rope.cu``. Sines,
cosines and products are FP32, and each result is rounded once; TE's unfused path rounds sines and cosines to the
input's dtype first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["fused_qkv_rope_backward", "fused_qkv_rope_forward", "fused_rope_backward", "fused_rope_forward"]


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate each pair of features by the angle of its token's position.

    Args:
        input: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``, as ``qkv_format`` says.
        freqs: angles in radians, FP32, ``[positions, 1, 1, d2]``, ``d2 <= d``; features from ``d2`` on are copied.
        start_positions: the position of each sequence's first token, ``[b]`` or longer. Default: 0.
        qkv_format: ``NVTE_SBHD``, ``NVTE_BSHD`` or ``NVTE_THD``.
        interleaved: pairs are features ``(2i, 2i + 1)``; otherwise ``(i, i + d2 / 2)``.
        cu_seqlens: where sequences begin and end among the ``t`` tokens of all ranks, ``[b + 1]``; THD only.
        cp_size, cp_rank: context parallelism. A rank holds the chunks ``rank`` and ``2 size - 1 - rank`` of the
            ``2 size`` chunks of a sequence.

    Returns:
        A contiguous tensor in the shape and dtype of ``input``. THD tokens after the last sequence, which TE leaves
        unwritten, are 0.

    Raises:
        ValueError: for shapes that do not fit together, or positions without angles in ``freqs``.
    """
    angles = _token_angles(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _rotate_tokens(input, angles, interleaved, inverse=False)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Return the gradient of ``fused_rope_forward`` by the inverse rotation; arguments and errors are the same."""
    angles = _token_angles(output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _rotate_tokens(output_grads, angles, interleaved, inverse=True)


def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint QKV tensor and rotate its queries and keys.

    Args:
        qkv_input: ``[s, b, groups, q + k + v]`` or ``[b, s, groups, q + k + v]``.
        q_freqs, k_freqs: like ``freqs`` of ``fused_rope_forward``.
        qkv_split_arg_list: ``(q, k, v)``, the features of a group's queries, keys and values; v is the head dimension.

    Returns:
        Queries ``[.., .., groups * q / k, k]``, keys ``[.., .., groups, k]``, values ``[.., .., groups, v]``.

    Raises:
        ValueError: in the same cases as ``fused_rope_forward``.
    """
    q_size, k_size, v_size = qkv_split_arg_list
    query, key, value = qkv_input.split([q_size, k_size, v_size], dim=-1)
    rotated = []
    for heads, freqs in ((query, q_freqs), (key, k_freqs)):
        angles = _token_angles(qkv_input, freqs, start_positions, qkv_format, None, cp_size, cp_rank)
        heads = heads.unflatten(-1, (-1, v_size))
        rotated.append(_rotate(heads, angles.unsqueeze(-2), interleaved, inverse=False))
    outer = qkv_input.shape[:2]
    return rotated[0].view(*outer, -1, k_size), rotated[1].view(*outer, -1, k_size), value.contiguous()


def fused_qkv_rope_backward(
    q_grad_out: Tensor,
    k_grad_out: Tensor,
    v_grad_out: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Return the gradient of ``fused_qkv_rope_forward``, ``[.., .., groups, q + k + v]``.

    Arguments are the same, but TE's kernel takes no start positions, so its gradient is only right if they are 0.
    """
    q_size, k_size, v_size = qkv_split_arg_list
    outer = q_grad_out.shape[:2]
    parts = []
    for grad, freqs, size in ((q_grad_out, q_freqs, q_size), (k_grad_out, k_freqs, k_size)):
        angles = _token_angles(grad, freqs, None, qkv_format, None, cp_size, cp_rank)
        heads = grad.reshape(*outer, -1, size // v_size, v_size)
        parts.append(_rotate(heads, angles.unsqueeze(-2), interleaved, inverse=True).flatten(-2))
    return torch.cat([*parts, v_grad_out.reshape(*outer, -1, v_size)], dim=-1)


def _token_angles(
    tokens: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Return the angles of each token, FP32, to be broadcast over heads.

    They are ``[s, b or 1, 1, d2]`` in the order of ``tokens``, or, for THD, ``[tokens of all sequences, 1, d2]``.
    """
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or freqs.dtype != torch.float32:
        raise ValueError(
            f"freqs must be FP32 of shape [positions, 1, 1, features], but are {freqs.dtype} {list(freqs.shape)}"
        )
    if qkv_format.name == "NVTE_THD":
        positions = _packed_positions(tokens, start_positions, cu_seqlens, cp_size, cp_rank)
    else:
        length, batch = tokens.shape[:2] if qkv_format.name == "NVTE_SBHD" else reversed(tokens.shape[:2])
        positions = _chunked(torch.arange(length), length, cp_size, cp_rank).unsqueeze(-1)
        if start_positions is not None:  # a cache may hold more sequences than this batch
            positions = positions + start_positions[:batch]
        positions = positions if qkv_format.name == "NVTE_SBHD" else positions.transpose(0, 1)
    if positions.numel() and int(positions.max()) >= len(freqs):
        raise ValueError(f"freqs hold angles for {len(freqs)} positions, but a token is at {int(positions.max())}")
    return freqs.squeeze((1, 2))[positions].unsqueeze(-2)


def _packed_positions(
    tokens: Tensor, start_positions: Tensor | None, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int
) -> Tensor:
    """Return the position of each THD token in its sequence, ``[tokens of all sequences]``."""
    if cu_seqlens is None or tokens.dim() != 3:
        raise ValueError(f"THD needs cu_seqlens and tokens [t, h, d], got {cu_seqlens} and {list(tokens.shape)}")
    borders = cu_seqlens.long() // cp_size
    if int(borders[-1]) > len(tokens):
        raise ValueError(f"cu_seqlens end at token {int(borders[-1])}, but there are {len(tokens)} tokens")
    token = torch.arange(int(borders[-1]))
    sequence = torch.bucketize(token, borders[1:], right=True)
    positions = _chunked(token - borders[sequence], borders.diff()[sequence], cp_size, cp_rank)
    return positions if start_positions is None else positions + start_positions[sequence]


def _chunked(index: Tensor, length: int | Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions in whole sequences of this rank's tokens, given by ``index`` out of ``length`` here."""
    if cp_size == 1:
        return index
    near = cp_rank * length // 2
    far = length * cp_size - (cp_rank + 1) * length // 2 - length // 2
    return torch.where(index < length // 2, index + near, index + far)


def _rotate_tokens(tokens: Tensor, angles: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate the leading tokens, which have angles, and set the others to 0."""
    if tokens.dim() == 4 or len(angles) == len(tokens):
        return _rotate(tokens, angles, interleaved, inverse)
    output = tokens.new_zeros(tokens.shape)
    output[: len(angles)] = _rotate(tokens[: len(angles)], angles, interleaved, inverse)
    return output


def _rotate(heads: Tensor, angles: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Map ``(a, b)`` to ``(a cos - b sin, b cos + a sin)``, each with its own angle, or apply the transpose.

    Args:
        heads: ``[..., d]``.
        angles: FP32, ``[..., d2]``, broadcast against ``heads``.
    """
    rotary = angles.shape[-1]
    if rotary > heads.shape[-1]:
        raise ValueError(f"freqs have {rotary} features, more than the {heads.shape[-1]} of a head")
    half = rotary // 2
    first, second = (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else (slice(half), slice(half, rotary))
    cos, sin = angles.cos(), angles.sin()
    sin_first, sin_second = (-sin[..., second], -sin[..., first]) if inverse else (sin[..., first], sin[..., second])
    a, b = heads[..., first].float(), heads[..., second].float()
    output = torch.empty(heads.shape, dtype=heads.dtype)
    output[..., first] = (a * cos[..., first]).sub_(b * sin_first)
    output[..., second] = (b * cos[..., second]).add_(a * sin_second)
    output[..., rotary:] = heads[..., rotary:]
    return output
