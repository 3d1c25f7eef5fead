"""Name a part of a place as a reader would: ``every second head from 1 on``, ``positions 16 to 31 of 32``.

What an estimate tells of a part is not exact: some indices do so little that nothing tells whether they are in it. So
of the parts that have a short name, the plainest is taken that fits about as well as the best choice of indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.mistakes.attention import Attention
from parity.mistakes.hypothesis import ordinal
from parity.mistakes.rotation import Rotation
from parity.search.failure import Failure
from parity.trace.trace import Edit

_LISTED = 3  # more indices than these are told only if they form a pattern
_LARGEST_STEP = 8  # of indices at regular distances
_AS_GOOD = 0.9  # a part with a name may gain so much of what the best choice of indices does


def nameable(gains: Tensor) -> list[int]:
    """Return the indices of the plainest part that fits; empty if none does, or if all indices are in it.

    Args:
        gains: by how much it fits better that an index is in the part than that it is not.
    """
    best = gains.clamp(min=0.0).sum().item()
    fitting = (part for part in _plain_parts(gains) if gains[part].sum().item() >= _AS_GOOD * best)
    found = next(fitting, []) if best > 0.0 else []
    return found if len(found) < len(gains) else []


def _plain_parts(gains: Tensor) -> Iterator[list[int]]:
    """Yield the parts that have a name, those that gain most of their sort, the plainest sorts first."""
    count = len(gains)
    order = gains.argsort(descending=True).tolist()
    yield order[:1]
    yield _largest_range(gains)
    yield sorted(order[: count - 1])
    for step in range(2, min(_LARGEST_STEP, count // 2) + 1):
        yield max((list(range(first, count, step)) for first in range(step)), key=lambda part: gains[part].sum().item())
    outside = set(_largest_range(-gains))
    yield [index for index in range(count) if index not in outside]
    yield from (sorted(order[:listed]) for listed in range(2, _LISTED + 1))


def _largest_range(gains: Tensor) -> list[int]:
    """Return the range that gains most; of those that gain as much, the longest."""
    sums = torch.cat((gains.new_zeros(1), gains.cumsum(0)))
    least, at = sums.cummin(0)
    end = int((sums - least)[1:].argmax()) + 1
    begin = int(at[end])
    noise = 1e-3 * gains.abs().max()
    while begin > 0 and gains[begin - 1] > -noise:
        begin -= 1
    while end < len(gains) and gains[end] > -noise:
        end += 1
    return list(range(begin, end))


def told(indices: Sequence[int], count: int, axis: str) -> str:
    """Name indices of so many as people would."""
    inside, first = set(indices), indices[0]
    missing = [index for index in range(count) if index not in inside]
    if len(indices) == 1:
        return f"{axis} {first}"
    if len(missing) == 1:
        return f"all {axis}s but {missing[0]}"
    if list(indices) == list(range(first, indices[-1] + 1)):
        return f"{axis}s {first} to {indices[-1]} of {count}"
    step = indices[1] - first
    if list(indices) == list(range(first, count, step)):
        return f"every {'second' if step == 2 else ordinal(step)} {axis} from {first} on"
    if missing == list(range(missing[0], missing[-1] + 1)):
        return f"all {axis}s but {missing[0]} to {missing[-1]}"
    return f"{axis}s {', '.join(map(str, indices))}"


def axis_of(failure: Failure, edit: Edit, shape: torch.Size, dim: int) -> str:
    """Return what a dimension of what a call returns counts, in the singular."""
    sizes = [x.shape for x in tree_leaves(failure.prepared.inputs) if isinstance(x, Tensor) and x.dim()]
    batch = sizes[0][0] if sizes else 0
    if dim == len(shape) - 1:
        return "channel"
    operation = edit.of.operation if edit.of is not None else None
    if isinstance(operation, Rotation) and dim == len(shape) + operation.axis:
        return "position"
    if isinstance(operation, Attention):
        return _axis_of_context(operation, shape, dim)
    if dim == 0 and shape[0] == batch:
        return "sequence"
    if len(shape) == 4 and isinstance(operation, Rotation):
        return "head"
    return "position" if len(shape) == 3 and dim == 1 else f"index of dimension {dim}"


def axis_of_parameter(shape: torch.Size, dim: int) -> str:
    """Return what a dimension of a parameter counts, in the singular."""
    return "channel" if len(shape) == 1 else "row" if dim == len(shape) - 2 else "column"


def _axis_of_context(attention: Attention, shape: torch.Size, dim: int) -> str:
    """Return what a dimension of an attention's result counts: see where its layout by heads puts each of its own."""
    names = ("sequence", "head", "position", "channel")
    for permutation in ((0, 1, 2, 3), (0, 2, 1, 3)):
        by_heads = tuple(shape[axis] for axis in permutation) if len(shape) == 4 else ()
        if by_heads and attention.from_heads(torch.empty(by_heads, device="meta")).shape == shape:
            marked = torch.zeros(by_heads)
            marked.narrow(permutation.index(dim), 0, 1).fill_(1.0)
            back = attention.from_heads(marked)
            if bool((back.select(dim, 0) == 1.0).all()):
                return names[permutation.index(dim)]
    return f"index of dimension {dim}"
