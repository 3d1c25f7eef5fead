"""Tables by query and key that are added to scores of several heads or windows, and what a port adds instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from parity.diagnosis.functions.again import of_operands
from parity.diagnosis.functions.other_numbers import Alternative, Compute
from parity.diagnosis.walk import binary
from parity.watching.trace import Call, Trace, Value

_Move = Callable[[Tensor], Tensor]


def other_tables(trace: Trace, call: Call) -> Iterator[Alternative]:
    """The table transposed, in reverse order, or that of another head or window."""
    match binary(call):
        case ("add", left, right) if call.outputs:
            size = trace.tensor(call.outputs[0]).numel()
        case _:
            return
    for name, operand in (("left", left), ("right", right)):
        if not isinstance(operand, Value) or not 1 < trace.tensor(operand).numel() < size:
            continue
        shape = trace.tensor(operand).shape
        if len(shape) > 1 and shape[-1] == shape[-2] > 1:
            for described, move in _moves(shape).items():
                yield Alternative(f"its {name} operand is {described}", of_operands(call, _added(move, name == "left")))


def _moves(shape: Sequence[int]) -> dict[str, _Move]:
    moves: dict[str, _Move] = {
        "transposed": lambda x: x.mT,
        "that of keys in reverse order": lambda x: x.flip(-1),
        "that of queries and keys in reverse order": lambda x: x.flip(-2, -1),
    }
    for dim in (dim for dim in range(len(shape) - 2) if shape[dim] > 1):
        moves[f"in reverse order along dimension {dim}"] = lambda x, dim=dim: x.flip(dim)  # type: ignore[misc]
        for by in (1, -1):
            moves[f"rolled by {by} along dimension {dim}"] = lambda x, dim=dim, by=by: x.roll(by, dim)  # type: ignore[misc]
    return moves


def _added(move: _Move, is_left: bool) -> Compute:
    return lambda was, x, y: move(x) + y if is_left else x + move(y)
