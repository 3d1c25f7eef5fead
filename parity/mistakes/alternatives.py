"""Alternatives to what a reference has: other numbers, and other results of a single call."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from parity.mistakes.hypothesis import Mistake
from parity.trace.trace import CASTS, JOINS, RESHAPES, Call, Trace, Value, argument, back, binary, edit, ordinal, users

# Factors for the reference's own number, so close to 1 that the error falls whichever side the port's number is on.
_NEAR = (0.9, 1.1)

Numbered = TypeVar("Numbered")
"""A mistake about a number: a dataclass with the fields ``value`` and ``tuned``."""


def numbers(
    made: Callable[[float], Numbered], own: Iterable[float] = (), usual: Iterable[float] = (), subtle: bool = False
) -> Iterator[Numbered]:
    """Yield a mistake for each number from which the search for a port's number starts.

    Args:
        made: makes the mistake with a positive number; it changes nothing if the number is the reference's.
        own: the reference's own number, or numbers if its places differ; those that are not positive and finite are
            skipped.
        usual: numbers that people use, the likeliest first.
        subtle: whether a matched filter looks for the mistake. It gets one direction, that of a number next to the
            reference's own or else of the likeliest, because other numbers near it change the result along that line.
    """
    near = [factor * number for number in own for factor in _NEAR]
    known = [number for number in dict.fromkeys((*usual, *near)) if 0.0 < number < math.inf]
    nearest = near[-1] if near and near[-1] in known else next(iter(known), None)
    for mistake in map(tunable(made), known):
        is_nearest = subtle and mistake.value == nearest  # type: ignore[attr-defined]
        yield replace(mistake, subtle=True) if is_nearest else mistake  # type: ignore[type-var]


def tunable(made: Callable[[float], Numbered]) -> Callable[[float], Numbered]:
    """Return ``made`` with ``value`` and ``tuned`` set in its mistakes, so that another number can be tried."""

    def with_number(number: float) -> Numbered:
        mistake: Numbered = replace(made(number), value=number, tuned=with_number)  # type: ignore[type-var]
        return mistake

    return with_number


# Numbers that people write: one digit below 0.01 and two above, powers of two, simple fractions, small whole numbers,
# and the square roots of head widths, by which scores are scaled; or the reciprocal of any of these. A search that fits
# the wrong mistake may end at any number: of numbers spread evenly in their logarithm, 2 % below 0.01 and 20 % above
# look like these.
SMALL = 0.01
"""People write numbers below this with one digit."""

_LARGEST_WHOLE = 64
_FRACTIONS = tuple(part / 16 for part in range(1, 33))
_ROOTS = tuple(math.sqrt(width) for width in range(8, 257, 8))
_ROUNDED = 1e-5  # as of a number that is held in FP32, and printed
_SAME = 0.002  # a search cannot tell apart two numbers whose ratio is this close to 1


def written_near(number: float, unsure: float = 0.0) -> float:
    """Return the number that people write nearest to a fitted one; NaN if there is none near enough to be meant.

    Args:
        number: positive.
        unsure: the share of the number by which rounding may have moved it.
    """
    rounded = float(f"{number:.0e}" if number < SMALL else f"{number:.1e}")
    whole = (float(one) for one in range(1, _LARGEST_WHOLE + 1))
    power = 2.0 ** round(math.log2(number))
    known = (rounded, power, *_FRACTIONS, *whole, *_ROOTS)
    nearest = min((x for one in known for x in (one, 1.0 / one)), key=lambda x: abs(x / number - 1.0))
    return nearest if abs(nearest / number - 1.0) < max(_SAME, unsure) else math.nan


def is_written(number: float) -> bool:
    """Return whether people write such a number. If so, a search that ends at it has found the port's number."""
    return math.isclose(number, written_near(number), rel_tol=_ROUNDED)


def unusual(number: float) -> str:
    """Return the end of a message about a fitted number that people hardly ever write."""
    return f"; {number:.4g} is an unusual value, so something else may have this effect"


# Calls that take a number, with another number.


Compute = Callable[..., Any]

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
}
_PARAMETERS = {"leaky_relu": ("negative_slope", 0.01), "elu": ("alpha", 1.0), "celu": ("alpha", 1.0)}
"""Activations that take a number: its name, and its default."""


def alternative(described: str, compute: Compute) -> Mistake[Call]:
    """Return the mistake of computing something else in place of a call.

    Args:
        described: what is wrong, as the end of a sentence that begins with the call.
        compute: is given what the call returned and every tensor that the call was given, in order.
    """
    return Mistake("operation", described, described, lambda call: (edit(call, call.inputs, compute),))


def other_numbers(call: Call) -> Iterator[Mistake[Call]]:
    """Yield the call with another number, whose value a search can then fit."""
    yield from _numbers(call)
    yield from _parameters(call)


_FEW = 4  # a larger whole number may be a count that is off by one, such as frequencies over n - 1 steps


def _numbers(call: Call) -> Iterator[Mistake[Call]]:
    """Yield the call with its number, on either side, replaced by another of the same sign."""
    match binary(call):
        case (("add" | "sub" | "mul" | "div" | "pow") as name, Value(), int() | float() as number):
            is_left = False
        case (("add" | "sub" | "mul" | "div" | "pow") as name, int() | float() as number, Value()):
            is_left = True
        case _:
            return
    function = _OPERATORS[name]

    def with_another(value: float) -> Mistake[Call]:
        other = math.copysign(value, number)
        compute = lambda was, x: function(other, x) if is_left else function(x, other)  # noqa: E731
        return alternative(f"its number is {other:.4g} instead of {number:.4g}", compute)

    off_by_one = (abs(number) - 1, abs(number) + 1) if float(number).is_integer() and abs(number) > _FEW else ()
    yield from numbers(with_another, [abs(number)], off_by_one)


def _parameters(call: Call) -> Iterator[Mistake[Call]]:
    """Yield an activation such as leaky ReLU with another parameter, and as a plain ReLU."""
    if call.name not in _PARAMETERS:
        return
    name, default = _PARAMETERS[call.name]
    number = float(argument(call, 1, name, default))

    def with_another(value: float) -> Mistake[Call]:
        compute = lambda was, x: getattr(functional, call.name)(x, value)  # noqa: E731
        return alternative(f"its {name} is {value:.4g} instead of {number:.4g}", compute)

    yield alternative("it is relu", lambda was, x: x.relu())
    if number > 0.0:
        yield from numbers(with_another, [number])


# Computing a call of a trace again from its operands or its arguments.


def of_operands(call: Call, compute: Compute) -> Compute:
    """Turn a function of the result and both operands into a function of the result and the call's tensors.

    Args:
        call: a function of two operands, as ``binary`` recognises it.
        compute: called with the result, or what replaces it, and both operands, one of which may be a number.
    """
    _, left, right = binary(call) or ("", None, None)

    def computed(was: Tensor, *inputs: Tensor) -> Tensor:
        given = dict(zip((value.number for value in call.inputs), inputs, strict=True))
        x, y = (given[one.number] if isinstance(one, Value) else one for one in (left, right))
        result: Tensor = compute(was, x, y)
        return result

    return computed


def again(call: Call, compute: Callable[[Any, Any], Any]) -> Compute:
    """Turn a function of the call's arguments into a function of its result and its tensors."""

    def computed(was: Any, *inputs: Tensor) -> Any:
        given = dict(zip((value.number for value in call.inputs), inputs, strict=True))
        args, kwargs = tree_map(
            lambda one: given[one.number] if isinstance(one, Value) else one, (call.args, call.kwargs)
        )
        return compute(args, kwargs)

    return computed


# Parts of a tensor (chunks, splits, concatenations) that a port takes, or joins, in another order.


_MOST_ORDERED = 3  # up to this many parts are tried in every order, more parts only in the likeliest orders
_MOST_PARTS = 8
_SPLITS = frozenset({"chunk", "split", "tensor_split", "unbind", "split_with_sizes"})


def split_otherwise(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a split whose parts are in another order, or hold interleaved instead of consecutive elements."""
    if call.name not in _SPLITS or not isinstance(call.result, (tuple, list)) or len(call.outputs) < 2:
        return
    shapes = [trace.tensor(x).shape for x in call.outputs]
    for order in (*_orders(len(shapes)), *_taken_twice(len(shapes))):
        if [shapes[i] for i in order] == shapes:
            yield alternative(
                f"its parts are in the order {_counted(order)}",
                lambda was, x, order=order: tuple(was[i] for i in order),
            )
    x = trace.tensor(call.inputs[0])
    differing = [dim for dim, size in enumerate(x.shape) if len(shapes[0]) == x.dim() and shapes[0][dim] != size]
    if len(set(shapes)) > 1 and len(differing) == 1 and len(shapes) <= _MOST_ORDERED:
        for order in _orders(len(shapes)):
            yield alternative(
                f"its parts are stored in the order {_counted(order)}",
                lambda was, x, order=order: _lying_in(was, x, differing[0], order),
            )
    if len(set(shapes)) == 1 and len(differing) == 1:
        dim, count = differing[0], len(shapes)
        yield alternative("its parts are interleaved", lambda was, x: x.unflatten(dim, (-1, count)).unbind(dim + 1))
    if differing == [x.dim() - 1]:
        for heads in (-3, -2) if x.dim() > 3 else ():
            yield alternative(
                f"it splits all of dimension {x.dim() + heads} at once, not each entry by itself",
                lambda was, x, heads=heads: _split_before_heads(was, x, heads),
            )


def _split_before_heads(parts: Sequence[Tensor], x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Return parts of the same sizes, cut from the last dimension before it was divided into heads."""
    count = x.shape[heads]
    whole = x.movedim(heads, -2).flatten(-2)
    lying = whole.split([count * part.shape[-1] for part in parts], -1)
    return tuple(part.unflatten(-1, (count, -1)).movedim(-2, heads) for part in lying)


def _lying_in(parts: Sequence[Tensor], x: Tensor, dim: int, order: Sequence[int]) -> tuple[Tensor, ...]:
    """Return parts of the same sizes, cut from ``x`` as if they lay there in the order ``order``."""
    lying = x.split([parts[i].shape[dim] for i in order], dim)
    return tuple(lying[list(order).index(i)] for i in range(len(parts)))


def joined_otherwise(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a concatenation whose parts are in another order, or interleaved element by element."""
    if call.name not in JOINS | {"stack"} or len(call.inputs) < 2:
        return

    def in_order(order: Sequence[int]) -> Compute:
        return again(call, lambda args, kwargs: call.function([args[0][i] for i in order], *args[1:], **kwargs))

    for order in _orders(len(call.inputs)):
        yield alternative(f"its parts are in the order {_counted(order)}", in_order(order))
    sizes = {trace.tensor(x).shape for x in call.inputs}
    dim = argument(call, 1, "dim", call.kwargs.get("axis", 0))
    if call.name in JOINS and len(sizes) == 1 and isinstance(dim, int):
        dim %= len(sizes.pop())
        in_turns = again(call, lambda args, kwargs: torch.stack(args[0], dim + 1).flatten(dim, dim + 1))
        yield alternative("its parts are interleaved", in_turns)


def _orders(count: int) -> list[tuple[int, ...]]:
    """Return the likeliest wrong orders of ``count`` parts."""
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
    """Return orders that reorder both halves alike or exchange them, such as DiT's halves for attention and MLP."""
    half = count // 2
    if count % 2 or half > _MOST_ORDERED:
        return []
    ordered = [(*order, *(half + i for i in order)) for order in permutations(range(half)) if order != (*range(half),)]
    return [*ordered, (*range(half, count), *range(half))]


def _in_columns(count: int) -> list[tuple[int, ...]]:
    """Return orders by columns instead of rows, such as both shifts, then both scales, then both gates."""
    return [
        tuple(i for first in range(step) for i in range(first, count, step))
        for step in range(2, count)
        if count % step == 0
    ]


def _taken_twice(count: int) -> list[tuple[int, ...]]:
    """Return orders that take parts of one half twice, such as attention's gate also in place of the MLP's."""
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


# Tables by query and key that are added to, or multiplied with, the scores of several heads or windows.


_Move = Callable[[Tensor], Tensor]


def other_tables(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a table that is transposed, in reverse order, or another head's or window's."""
    match binary(call):
        case (("add" | "mul") as name, left, right) if call.outputs:
            function = getattr(torch, name)
            size = trace.tensor(call.outputs[0]).numel()
        case _:
            return
    for side, operand in (("left", left), ("right", right)):
        if not isinstance(operand, Value) or not 1 < trace.tensor(operand).numel() < size:
            continue
        shape, is_left = trace.tensor(operand).shape, side == "left"
        for described, move in _moves(shape).items() if _is_square(shape) else ():
            moved = lambda was, x, y, move=move, is_left=is_left: (  # noqa: E731
                function(move(x), y) if is_left else function(x, move(y))
            )
            yield alternative(f"its {side} operand is {described}", of_operands(call, moved))


def _moves(shape: Sequence[int]) -> dict[str, _Move]:
    moves: dict[str, _Move] = {
        "transposed": lambda x: x.mT,
        "that of keys in reverse order": lambda x: x.flip(-1),
        "that of queries and keys in reverse order": lambda x: x.flip(-2, -1),
    }
    for dim in (dim for dim in range(len(shape) - 2) if shape[dim] > 1):
        moves[f"in reverse order along dimension {dim}"] = lambda x, dim=dim: x.flip(dim)  # type: ignore[misc]
        moves[f"that of the first along dimension {dim}"] = lambda x, dim=dim: x.narrow(dim, 0, 1).expand_as(x)  # type: ignore[misc]
        for by in (1, -1):
            moves[f"rolled by {by} along dimension {dim}"] = lambda x, dim=dim, by=by: x.roll(by, dim)  # type: ignore[misc]
    return moves


# What a single call could have computed instead: common mistakes with each function, whatever the call is for.
#
# For example, a term of a sum is left out, the parts of a tensor change places, a sine becomes a cosine, the last token
# replaces the first, or a dimension is split the other way round.


LEFT_OUT = "it is left out"
"""Description of the alternative to a call that changes a tensor and keeps its shape."""

OTHER_WAY = "it moves the other way"
"""Description of the alternative to a call that moves elements along a dimension."""

_FUNCTIONS = {
    "sin": ("cos",),
    "cos": ("sin",),
    "tanh": ("sigmoid", "relu"),
    "sigmoid": ("tanh", "relu"),
    "exp": ("abs", "softplus"),
    "softplus": ("exp",),
    "log": ("log1p", "log2"),
    "log1p": ("log",),
    "sqrt": ("rsqrt",),
    "rsqrt": ("sqrt", "reciprocal"),
    "tril": ("triu",),
    "triu": ("tril",),
}
_OF_SIGN = frozenset({"exp", "log_sigmoid", "relu", "silu", "softplus"})
"""Functions of one tensor whose argument people negate by mistake, such as the log of a decay or a gate."""

_REDUCTIONS = {"mean": ("sum", "amax"), "sum": ("mean", "amax"), "amax": ("mean", "amin"), "amin": ("amax",)}


def alternatives(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield every known way to get a call wrong."""
    yield from _operands(call)
    yield from other_tables(trace, call)
    yield from _selections(trace, call)
    yield from other_numbers(call)
    yield from _left_out(trace, call)
    yield from _other_functions(call)
    yield from _dimensions(trace, call)
    yield from _of_other_rows(trace, call)
    yield from _products_otherwise(trace, call)
    yield from _deviations(trace, call)
    yield from split_otherwise(trace, call)
    yield from joined_otherwise(trace, call)
    yield from _other_elements(trace, call)
    yield from _picked_elsewhere(trace, call)
    yield from _gathered_elsewhere(trace, call)
    yield from _pooled_elsewhere(trace, call)
    yield from _mean_of_all(trace, call)
    yield from _moved(trace, call)
    yield from _padded(trace, call)
    yield from _reshaped(trace, call)


def _operands(call: Call) -> Iterator[Mistake[Call]]:
    """Yield the call with an operand left out, exchanged with the other one, or with the wrong sign."""
    match binary(call):
        case (("add" | "sub" | "mul" | "div") as name, left, right) if Value in (type(left), type(right)):
            of_two = functools.partial(of_operands, call)
        case _:
            return
    are_both = isinstance(left, Value) and isinstance(right, Value)
    if are_both:
        yield alternative("its left operand is left out", of_two(lambda was, x, y: y.expand_as(was).clone()))
        yield alternative("its right operand is left out", of_two(lambda was, x, y: x.expand_as(was).clone()))
    if name == "add":
        yield alternative("its right operand is subtracted", of_two(lambda was, x, y: x - y))
        yield alternative("its left operand is subtracted", of_two(lambda was, x, y: y - x))
    if name == "sub":
        yield alternative("its operands are exchanged", of_two(lambda was, x, y: y - x))
        yield alternative("its operands are added", of_two(lambda was, x, y: x + y))
    if name == "mul":
        yield alternative("its result is negated", of_two(lambda was, x, y: -was))
        if are_both:  # 1 + gate, where the reference has the gate alone
            yield alternative("1 is added to its left operand", of_two(lambda was, x, y: (1 + x) * y))
            yield alternative("1 is added to its right operand", of_two(lambda was, x, y: x * (1 + y)))
    if name == "div":
        yield alternative("its operands are exchanged", of_two(lambda was, x, y: y / x))
        yield alternative("its operands are multiplied", of_two(lambda was, x, y: x * y))


def _selections(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a selection whose branches are exchanged, or whose mask is inverted or off by one place."""
    if call.name == "where" and len(call.args) == 3:
        exchanged = again(call, lambda args, kwargs: torch.where(args[0], args[2], args[1]))
        yield alternative("its branches are exchanged", exchanged)
    if call.name == "masked_fill":
        inverted = again(call, lambda args, kwargs: args[0].masked_fill(~args[1], *args[2:]))
        yield alternative("its mask is inverted", inverted)
    mask = call.args[1] if call.name == "masked_fill" and len(call.args) > 1 else None
    for described, by in (("earlier", -1), ("later", 1)):
        if isinstance(mask, Value) and _is_square(trace.tensor(mask).shape):
            filled = lambda args, kwargs, by=by: args[0].masked_fill(_moved_by(args[1], by), *args[2:])  # noqa: E731
            yield alternative(f"its mask begins one place {described}", again(call, filled))
    if call.name in ("tril", "triu"):
        diagonal = argument(call, 1, "diagonal", 0)
        for other in (diagonal - 1, diagonal + 1):
            moved = lambda args, kwargs, other=other: getattr(torch, call.name)(args[0], other)  # noqa: E731
            yield alternative(f"its diagonal is {other} instead of {diagonal}", again(call, moved))


def _is_square(shape: Sequence[int]) -> bool:
    """Return whether a mask or a table has as many queries as keys."""
    return len(shape) > 1 and shape[-1] == shape[-2] > 1


def _moved_by(mask: Tensor, by: int) -> Tensor:
    """Return a mask ``[..., places, places]`` moved by one column; the new column repeats the corner on that side."""
    corner = (mask[..., :1, -1:] if by < 0 else mask[..., -1:, :1]).expand_as(mask[..., :1])
    return torch.cat((mask[..., 1:], corner) if by < 0 else (corner, mask[..., :-1]), -1)


def _left_out(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield the mistake of leaving out a call that changes a tensor and keeps its shape."""
    if len(call.outputs) != 1 or call.name in CASTS | RESHAPES:
        return
    given = [i for i, x in enumerate(call.inputs) if trace.tensor(x).is_floating_point()]
    if len(given) == 1 and trace.tensor(call.inputs[given[0]]).shape == trace.tensor(call.outputs[0]).shape:
        yield alternative(LEFT_OUT, lambda was, *inputs: inputs[given[0]])


def _other_functions(call: Call) -> Iterator[Mistake[Call]]:
    """Yield another function of the same arguments, and the same function of the negated argument."""
    for name in (*_FUNCTIONS.get(call.name, ()), *_REDUCTIONS.get(call.name, ())):
        other = getattr(torch, name, None) or getattr(functional, name)
        with_other = lambda args, kwargs, other=other: other(*args, **kwargs)  # noqa: E731
        yield alternative(f"it is {name}", again(call, with_other))
    if call.name in _OF_SIGN and len(call.inputs) == 1:
        negated = again(call, lambda args, kwargs: call.function(-args[0], *args[1:], **kwargs))
        yield alternative("its argument is negated", negated)


def _dimensions(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a function along another dimension, and a reduction that takes the first or last element instead."""
    if call.name not in ("softmax", "log_softmax", "cumsum", "flip", *_REDUCTIONS) or len(call.inputs) != 1:
        return
    x, result = trace.tensor(call.inputs[0]), trace.tensor(call.outputs[0])
    function = getattr(torch, call.name)
    for dim in range(x.dim()):
        arguments: dict[str, Any] = {"dims" if call.name == "flip" else "dim": dim}
        if call.name in _REDUCTIONS:
            arguments["keepdim"] = result.dim() == x.dim()
            for described, place in (("first", 0), ("last", -1)):
                taken = lambda was, x, dim=dim, place=place: x.select(dim, place).view_as(was)  # noqa: E731
                yield alternative(f"it takes the {described} of dimension {dim}", taken)
        if call.name == "mean" and dim < x.dim() - 1 and x.shape[dim] > 2:
            yield from _mean_without_an_end(dim, result.dim() == x.dim())
        along = lambda was, x, arguments=arguments: function(x, **arguments).to(was.dtype)  # noqa: E731
        yield alternative(f"it is along dimension {dim}", along)


def _of_other_rows(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a norm along another dimension."""
    own = call.kwargs.get("dim")
    if call.name not in ("normalize", "norm", "vector_norm") or not isinstance(own, int) or len(call.inputs) != 1:
        return
    rank = trace.tensor(call.inputs[0]).dim()
    for dim in (dim for dim in range(rank) if dim != own % rank):
        along = lambda args, kwargs, dim=dim: call.function(*args, **(kwargs | {"dim": dim}))  # noqa: E731
        yield alternative(f"it is along dimension {dim}", again(call, along))


def _products_otherwise(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield ``einsum`` with two dimensions of one operand or of all exchanged, such as for triangles in or out."""
    if call.name != "einsum" or len(call.inputs) < 2:
        return
    shapes = [trace.tensor(x).shape for x in call.inputs]
    for i, j in combinations(range(min(map(len, shapes))), 2):
        square = [n for n, shape in enumerate(shapes) if shape[i] == shape[j] > 1]
        choices = [("every operand", square)] if len(square) == len(shapes) else []
        for which, some in (*choices, *((f"operand {n + 1}", [n]) for n in square)):
            yield alternative(f"dimensions {i} and {j} of {which} are exchanged", again(call, _transposed(some, i, j)))


def _transposed(some: Sequence[int], i: int, j: int) -> Callable[[Any, Any], Tensor]:
    """Return ``einsum`` with two dimensions of some operands exchanged."""

    def computed(args: Any, kwargs: Any) -> Tensor:
        operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        return torch.einsum(args[0], *(x.transpose(i, j) if n in some else x for n, x in enumerate(operands)))

    return computed


def _mean_without_an_end(dim: int, is_kept: bool) -> Iterator[Mistake[Call]]:
    """Yield the mean without the first or the last element, for example without a class token."""
    for described, place in (("first", 0), ("last", -1)):
        name = f"it leaves out the {described} of dimension {dim}"
        yield alternative(name, lambda was, x, place=place: _mean_of_others(x, dim, place, is_kept))


def _deviations(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a variance or standard deviation that is divided by n instead of n - 1, or the reverse."""
    if call.name not in ("var", "std") or len(call.outputs) != 1 or len(call.inputs) != 1:
        return
    count = trace.tensor(call.inputs[0]).numel() // max(trace.tensor(call.outputs[0]).numel(), 1)
    less_one = ((count - 1) / count) ** (1.0 if call.name == "var" else 0.5) if count > 2 else 1.0
    given = argument(call, 2, "unbiased", call.kwargs.get("correction"))
    unbiased = given is None or bool(given)
    if less_one < 1.0:
        other = less_one if unbiased else 1.0 / less_one
        divisor = f"{count} elements, not {count - 1}" if unbiased else f"{count - 1}, not {count} elements"
        yield alternative(f"it divides by {divisor}", lambda was, x: other * was)


def _other_elements(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield elements other than the indexed ones: the other end, a neighbour, the mean of all."""
    if call.name != "getitem" or len(call.inputs) != 1:
        return
    x, index = trace.tensor(call.inputs[0]), call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    dim = 0
    for position, part in enumerate(index):
        if part is Ellipsis:
            dim = x.dim() - sum(one is not None for one in index[position + 1 :])
        elif part is not None:
            for described, instead in _other_places(part, x.shape[dim], dim):
                changed = (*index[:position], instead, *index[position + 1 :])
                yield alternative(described, lambda was, x, changed=changed: x[changed])
            if isinstance(part, int):
                one = (*index[:position], 0, *index[position + 1 :])
                mean = lambda was, x, one=one, dim=dim: x.mean(dim, keepdim=True)[one]  # noqa: E731
                yield alternative(f"it is the mean over dimension {dim}", mean)
                if part in (0, -1) and x.shape[dim] > 2:
                    rest = lambda was, x, one=one, dim=dim, own=part: _mean_of_others(x, dim, own)[one]  # noqa: E731
                    yield alternative(f"it is the mean over the others of dimension {dim}", rest)
            dim += 1


def _picked_elsewhere(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield elements other than those that index tensors pick, as in ``x[rows, last]`` for the last tokens."""
    index = call.args[1] if call.name == "getitem" and isinstance(call.args[1], tuple) else ()
    by_tensors = [dim for dim, part in enumerate(index) if isinstance(part, Value)]
    if len(by_tensors) < 2 or by_tensors != [*range(len(by_tensors))]:
        return
    sizes = trace.tensor(call.inputs[0]).shape
    for dim in by_tensors:
        places, size = trace.tensor(index[dim]), sizes[dim]
        if places.is_floating_point() or places.dtype is torch.bool or torch.unique(places).numel() == size:
            continue
        for described, times, plus in _steps_aside(size):
            picked = again(call, _picking(dim, times, plus, size - 1))
            yield alternative(f"it takes the {described} of dimension {dim}", picked)
        mean = lambda args, kwargs, dim=dim: _picking(dim, 0, 0, 0)((args[0].mean(dim, True), args[1]), kwargs)  # noqa: E731
        yield alternative(f"it is the mean over dimension {dim}", again(call, mean))


def _gathered_elsewhere(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield elements other than the one that ``x.gather(dim, last)`` picks."""
    if call.name != "gather" or len(call.inputs) != 2:
        return
    dim, index, x = argument(call, 1, "dim"), argument(call, 2, "index"), trace.tensor(call.inputs[0])
    if index != call.inputs[1] or trace.tensor(index).shape[dim] > 1:
        return
    last = x.shape[dim] - 1
    for described, times, plus in _steps_aside(last + 1):
        moved = lambda index, times=times, plus=plus: (times * index + plus).clamp(0, last)  # noqa: E731
        picked = lambda was, x, index, moved=moved: x.gather(dim, moved(index))  # noqa: E731
        yield alternative(f"it takes the {described} of dimension {dim % x.dim()}", picked)
    mean = lambda was, x, index: x.mean(dim, keepdim=True).expand_as(was)  # noqa: E731
    yield alternative(f"it is the mean over dimension {dim % x.dim()}", mean)


def _steps_aside(size: int) -> tuple[tuple[str, int, int], ...]:
    """Return the other places of a dimension: a name, and the factor and summand that turn the right index into it."""
    return ("first", 0, 0), ("last", 0, size - 1), ("next", 1, 1), ("previous", 1, -1)


def _picking(dim: int, times: int, plus: int, last: int) -> Callable[[Any, Any], Tensor]:
    """Return indexing by tensors with the index of ``dim`` replaced by ``times * index + plus``, at most ``last``."""

    def computed(args: Any, kwargs: Any) -> Tensor:
        x, index = args
        changed = list(index)
        changed[dim] = (times * index[dim] + plus).clamp(0, last)
        picked: Tensor = x[tuple(changed)]
        return picked

    return computed


def _pooled_elsewhere(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a range that is only reduced with one element more or less, and with all elements but the first."""
    if call.name != "getitem" or len(call.inputs) != 1:
        return
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    readers = [user for user, _ in users(trace, call.outputs[0], CASTS)]
    is_plain = all(isinstance(part, (int, slice)) for part in index)
    if not is_plain or not readers or any(user.name not in _REDUCTIONS for user in readers):
        return
    sizes = trace.tensor(call.inputs[0]).shape
    for dim, part in enumerate(index):
        if isinstance(part, slice):
            for described, other in _other_ranges(part, sizes[dim]):
                changed = (*index[:dim], other, *index[dim + 1 :])
                taken = lambda was, x, changed=changed: x[changed]  # noqa: E731
                yield alternative(f"it takes {described} of dimension {dim}", taken)


def _other_ranges(part: slice, size: int) -> Iterator[tuple[str, slice]]:
    start, stop, step = part.indices(size)
    if step == 1 and 0 < start < stop == size:
        for first in sorted({1, start - 1, start + 1} - {0, start, size}):
            yield f"all from the {ordinal(first + 1)} on", slice(first, None)
    if step == 1 and 0 == start < stop < size:
        for count in sorted({stop - 1, stop + 1} - {0, size}):
            yield f"the first {count}", slice(count)


def _mean_of_all(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield the mean of all elements where the reference takes a masked mean: a masked sum divided by a count."""
    match binary(call):
        case ("div", Value() as total, Value() as count):
            of_two = (total, count)
        case _:
            return
    summed, counted = (trace.producer(back(trace, x, CASTS | {"clamp", "clamp_min"})) for x in of_two)
    if summed is None or counted is None or not summed.name == counted.name == "sum" or len(summed.inputs) != 1:
        return
    chosen = trace.producer(back(trace, summed.inputs[0], CASTS))
    if chosen is None or chosen.name not in ("mul", "masked_fill", "where"):
        return
    shape = trace.tensor(summed.inputs[0]).shape
    whole = [x for x in chosen.inputs if trace.tensor(x).shape == shape and trace.tensor(x).is_floating_point()]
    if len(whole) == 1:
        mean = lambda was, x: torch.mean(x, *summed.args[1:], **summed.kwargs).view_as(was)  # noqa: E731
        described = "it is the mean of all elements, including those that do not count"
        yield Mistake("operation", described, described, lambda call: (edit(call, whole, mean),))


def _mean_of_others(x: Tensor, dim: int, place: int, is_kept: bool = True) -> Tensor:
    """Return the mean over a dimension without its first element (``place`` 0) or its last (-1)."""
    return x.narrow(dim, 1 if place == 0 else 0, x.shape[dim] - 1).mean(dim, is_kept)


def _other_places(part: Any, size: int, dim: int) -> Iterator[tuple[str, Any]]:
    if isinstance(part, int):
        own = part % size
        places = {"first": 0, "last": size - 1, "next": own + 1, "previous": own - 1}
        taken = {own}
        for name, place in places.items():
            if 0 <= place < size and place not in taken:
                taken.add(place)
                yield f"it takes the {name} of dimension {dim}", place
    elif isinstance(part, slice):
        start, stop, step = part.indices(size)
        count = stop - start
        if step == 1 and 0 < count < size:
            yield f"it takes all of dimension {dim}", slice(None)
            if count == size - 1:
                left_out = 0 if start else size - 1
                end = "last" if left_out else "first"
                yield f"it repeats the {end} of dimension {dim}, {count} times", [left_out] * count
            at_end = start != size - count
            ends = slice(size - count, size) if at_end else slice(0, count)
            yield f"it takes the {'last' if at_end else 'first'} {count} of dimension {dim}", ends
            taken = {start, size - count if at_end else 0}
            for other in (1, start - 1, start + 1):
                if 0 <= other <= size - count and other not in taken:
                    taken.add(other)
                    since = f"it takes {count} of dimension {dim} from the {ordinal(other + 1)} on"
                    yield since, slice(other, other + count)
            if size % count == 0:
                yield f"it takes every {size // count}th of dimension {dim}", slice(start // count, None, size // count)
        elif step > 1:
            each = len(range(start, stop, step))
            yield f"it takes {each} consecutive elements of dimension {dim}", slice(start * each, (start + 1) * each)


_TRANSPOSES = ("transpose", "T", "mT", "swapaxes")
_MOVES = (*_TRANSPOSES, "permute")


def _moved(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a transposition, permutation, roll or repetition that is left out or done the other way."""
    if call.name in _TRANSPOSES and len(call.inputs) == 1:
        yield alternative("it is left out", lambda was, x: x)
    if call.name in _MOVES and len(call.inputs) == 1:
        yield alternative("it is a view, which moves no element", lambda was, x: x.reshape(was.shape))
    if call.name == "permute":
        rank = trace.tensor(call.outputs[0]).dim()
        for one, other in combinations(range(rank), 2):
            exchanged = lambda was, x, one=one, other=other: was.transpose(one, other)  # noqa: E731
            yield alternative(f"its dimensions {one} and {other} are exchanged", exchanged)
        for first in range(1, rank - 2):
            for described, three in (("last", (2, 0, 1)), ("first", (1, 2, 0))):
                dims = (*range(first), *(first + one for one in three), *range(first + 3, rank))
                yield alternative(
                    f"the {described} of its dimensions {first} to {first + 2} is moved to the other end",
                    lambda was, x, dims=dims: was.permute(dims),
                )
    if call.name == "roll":
        yield alternative(OTHER_WAY, lambda was, x: _rolled_back(call, x))
    if call.name in ("repeat_interleave", "repeat"):
        yield from _repeated_otherwise(trace, call)


def _padded(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield padding at the other end, or a convolution padded at one end only, as a causal one is."""
    if call.name == "pad" and len(call.args) > 1 and len(call.inputs) == 1:
        amounts, rest = tuple(call.args[1]), call.args[2:]
        other = tuple(amounts[i ^ 1] for i in range(len(amounts)))
        if other != amounts:
            padded = again(call, lambda args, kwargs: F.pad(args[0], other, *rest, **kwargs))
            yield alternative("it pads the other end", padded)
    if call.name == "conv1d" and len(call.args) == 7 and isinstance(call.args[4], tuple):
        around = 2 * call.args[4][0]
        for described, before in (("at its beginning alone", around), ("at its end alone", 0)) if around else ():
            yield alternative(f"its input is padded {described}", again(call, _convolved(before, around - before)))


def _convolved(before: int, after: int) -> Callable[[Any, Any], Tensor]:
    """Return a one-dimensional convolution of an input padded with ``before`` and ``after`` zeros at its ends."""

    def computed(args: Any, kwargs: Any) -> Tensor:
        x, weight, bias, stride, _, dilation, groups = args
        return F.conv1d(F.pad(x, (before, after)), weight, bias, stride, 0, dilation, groups)

    return computed


def _rolled_back(call: Call, x: Tensor) -> Tensor:
    shifts, dims = argument(call, 1, "shifts", 0), argument(call, 2, "dims", ())
    back = tuple(-shift for shift in shifts) if isinstance(shifts, (tuple, list)) else -shifts
    return x.roll(back, dims)


def _repeated_otherwise(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a repetition of the whole dimension instead of each element, or the reverse."""
    before, after = trace.tensor(call.inputs[0]).shape, trace.tensor(call.outputs[0]).shape
    grown = [dim for dim in range(len(after)) if len(before) == len(after) and before[dim] != after[dim]]
    if len(grown) != 1:
        return
    dim, times = grown[0], after[grown[0]] // max(before[grown[0]], 1)
    if call.name == "repeat":
        yield alternative("it repeats each element (repeat_interleave)", lambda was, x: x.repeat_interleave(times, dim))
    else:
        counts = [times if i == dim else 1 for i in range(len(after))]
        yield alternative("it repeats as a whole", lambda was, x: x.repeat(*counts))


def _reshaped(trace: Trace, call: Call) -> Iterator[Mistake[Call]]:
    """Yield a dimension split into parts in another order, or dimensions merged in another order."""
    if call.name not in ("view", "reshape", "flatten", "unflatten") or len(call.inputs) != 1:
        return
    before, after = (tuple(trace.tensor(x).shape) for x in (call.inputs[0], call.outputs[0]))
    dim = next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), None)
    if dim is None:
        return
    parts = abs(len(after) - len(before)) + 1
    whole, apart = (before, after) if len(after) > len(before) else (after, before)
    sizes = apart[dim : dim + parts]
    if parts < 2 or whole[:dim] + whole[dim + 1 :] != apart[:dim] + apart[dim + parts :]:
        return
    is_moved_next = any(user.name in _MOVES for user in trace.users(call.outputs[0]))
    for order in _orders(parts):
        if [i for i in order if sizes[i] > 1] == [i for i in range(parts) if sizes[i] > 1]:
            continue
        lying = tuple(sizes[i] for i in order)
        in_order = f"with its parts in the order {_counted(order)}"
        told = f"as {_sized(lying)}, not {_sized(sizes)}" if lying != sizes else in_order
        if lying == sizes and is_moved_next:  # an alternative to that move computes the same
            continue
        if whole is before:
            back = tuple(order.index(i) for i in range(parts))
            yield alternative(
                f"it splits dimension {dim} {told}",
                lambda was, x, lying=lying, back=back: _reordered(x.unflatten(dim, lying), dim, back),
            )
        else:
            yield alternative(
                f"it merges dimensions {dim} to {dim + parts - 1} {told}",
                lambda was, x, order=order: _reordered(x, dim, order).flatten(dim, dim + parts - 1),
            )


def _reordered(x: Tensor, first: int, order: Sequence[int]) -> Tensor:
    """Permute the dimensions from ``first`` on, as many as ``order`` has."""
    after = range(first + len(order), x.dim())
    return x.permute(*range(first), *(first + i for i in order), *after)


def _sized(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
