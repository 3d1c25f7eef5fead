"""Parts of a tensor that a port takes in another order, or joins in one: chunks, splits, concatenations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from torch import Tensor

from parity.diagnosis.functions.again import again
from parity.diagnosis.functions.other_numbers import Alternative, Compute
from parity.watching.trace import Call, Trace

_MOST_ORDERED = 3  # parts of which every order is tried; of more, each two are exchanged
_MOST_PARTS = 8
_SPLITS = frozenset({"chunk", "split", "tensor_split", "unbind", "split_with_sizes"})
_JOINS = frozenset({"cat", "concat", "concatenate", "stack"})


def split_otherwise(trace: Trace, call: Call) -> Iterator[Alternative]:
    """Parts of a tensor in another order, or every so many elements for those that follow each other."""
    if call.name not in _SPLITS or not isinstance(call.result, (tuple, list)) or len(call.outputs) < 2:
        return
    shapes = [trace.tensor(x).shape for x in call.outputs]
    for order in (*_orders(len(shapes)), *_taken_twice(len(shapes))):
        if [shapes[i] for i in order] == shapes:
            yield Alternative(
                f"its parts are in the order {_counted(order)}",
                lambda was, x, order=order: tuple(was[i] for i in order),
            )
    x = trace.tensor(call.inputs[0])
    differing = [dim for dim, size in enumerate(x.shape) if len(shapes[0]) == x.dim() and shapes[0][dim] != size]
    if len(set(shapes)) > 1 and len(differing) == 1 and len(shapes) <= _MOST_ORDERED:
        for order in _orders(len(shapes)):
            yield Alternative(
                f"its parts lie in the order {_counted(order)}",
                lambda was, x, order=order: _lying_in(was, x, differing[0], order),
            )
    if len(set(shapes)) == 1 and len(differing) == 1:
        dim, count = differing[0], len(shapes)
        yield Alternative(
            "its parts lie in turns",
            lambda was, x: x.unflatten(dim, (-1, count)).unbind(dim + 1),
        )


def _lying_in(parts: Sequence[Tensor], x: Tensor, dim: int, order: Sequence[int]) -> tuple[Tensor, ...]:
    """Parts of the same sizes, where ``x`` holds them in another order: the one that is first there first."""
    sizes = [part.shape[dim] for part in parts]
    lying = x.split([sizes[i] for i in order], dim)
    return tuple(lying[list(order).index(i)] for i in range(len(parts)))


def joined_otherwise(call: Call) -> Iterator[Alternative]:
    """Parts that are joined in another order."""
    if call.name not in _JOINS or len(call.inputs) < 2:
        return

    def in_order(order: Sequence[int]) -> Compute:
        return again(call, lambda args, kwargs: call.function([args[0][i] for i in order], *args[1:], **kwargs))

    for order in _orders(len(call.inputs)):
        yield Alternative(f"its parts are in the order {_counted(order)}", in_order(order))


def _orders(count: int) -> list[tuple[int, ...]]:
    """Other orders than the one there is."""
    right = tuple(range(count))
    if count <= _MOST_ORDERED:
        return [order for order in permutations(right) if order != right]
    if count > _MOST_PARTS:
        return [right[::-1]]
    exchanged = []
    for one, other in combinations(right, 2):
        order = list(right)
        order[one], order[other] = other, one
        exchanged.append(tuple(order))
    return [
        *exchanged,
        *_halves_alike(count),
        *_in_columns(count),
        right[::-1],
        (*right[1:], 0),
        (right[-1], *right[:-1]),
    ]


def _halves_alike(count: int) -> list[tuple[int, ...]]:
    """Both halves in one other order, or exchanged: shift, scale and gate of attention and of the MLP, as in DiT."""
    half = count // 2
    if count % 2 or half > _MOST_ORDERED:
        return []
    ordered = [(*order, *(half + i for i in order)) for order in permutations(range(half)) if order != (*range(half),)]
    return [*ordered, (*range(half, count), *range(half))]


def _in_columns(count: int) -> list[tuple[int, ...]]:
    """What is read row by row and lies column by column: both shifts, both scales, both gates."""
    return [
        tuple(i for first in range(step) for i in range(first, count, step))
        for step in range(2, count)
        if count % step == 0
    ]


def _taken_twice(count: int) -> list[tuple[int, ...]]:
    """Parts of one half in the place of those of the other: the gate of attention for that of the MLP."""
    half = count // 2
    if count % 2 or not 1 < half <= _MOST_ORDERED:
        return []
    orders = []
    for some in range(1, 2**half):
        places = [i for i in range(half) if some >> i & 1]
        orders.append(tuple(i - half if i - half in places else i for i in range(count)))
        orders.append(tuple(i + half if i in places else i for i in range(count)))
    return orders


def _counted(order: Sequence[int]) -> str:
    return ", ".join(str(i + 1) for i in order)
