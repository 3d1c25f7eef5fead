"""Special tokens that a port puts at the other end, and reads there: a class token last, registers first.

What else is by position, a table or a rotation, stays as it is, and so meets other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parity.diagnosis.functions.operations import ordinal
from parity.diagnosis.hypothesis import Hypothesis
from parity.watching.trace import Call, Edit, Trace, edit

_JOINS = frozenset({"cat", "concat", "concatenate"})
_MOST = 16  # special tokens


@dataclass(frozen=True)
class _Join:
    """``call`` joins some tokens and more others, along dimension ``dim``."""

    call: Call
    dim: int
    first: int
    second: int


def joined_token_hypotheses(trace: Trace, module: nn.Module) -> Iterator[Hypothesis]:
    """Both parts in the other order, and all calls after it that read one of them read it where it is then."""
    for call in trace.calls:
        join = _join(trace, call)
        readers = [] if join is None else list(_readers(trace, join))
        for rank in sorted({rank for rank, _ in readers}):
            edits = [one for other, one in readers if other <= rank]
            what = f"the {ordinal(call.site[3] + 1)} {call.name!r} of {call.module}"
            yield Hypothesis(
                "operation",
                f"parts of {what} exchanged, and where they are read in {rank} dimensions",
                f"join the parts of {what} in the reference's order; they are in the other one, and are read there, "
                "while what goes by position (a table, a rotation) is as it was",
                module,
                (edit(call, call.inputs, _exchanged(call)), *edits),
                scope="call",
            )


def _join(trace: Trace, call: Call) -> _Join | None:
    if call.name not in _JOINS or len(call.inputs) != 2:
        return None
    whole, first, second = (trace.tensor(value).shape for value in (*call.outputs, *call.inputs))
    dims = [dim for dim in range(len(whole) - 1) if first[dim] + second[dim] == whole[dim]]
    if len(dims) != 1 or not 0 < min(first[dims[0]], second[dims[0]]) <= _MOST:
        return None
    sizes = first[dims[0]], second[dims[0]]
    return _Join(call, dims[0], *sizes) if sizes[0] != sizes[1] else None


def _exchanged(call: Call) -> Callable[..., Tensor]:
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return lambda was, first, second: torch.cat((second, first), dim)


def _readers(trace: Trace, join: _Join) -> Iterator[tuple[int, Edit]]:
    """Later calls that read one of the parts alone, with how many dimensions their tensor has."""
    total = join.first + join.second
    for call in trace.calls:
        is_later = call.outputs and call.outputs[0].number > join.call.outputs[0].number
        if call.name != "getitem" or not is_later or len(call.inputs) != 1:
            continue
        shape = trace.tensor(call.inputs[0]).shape
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        plain = all(isinstance(part, (int, slice)) for part in index)
        for dim, part in enumerate(index if plain else ()):
            moved = _moved(part, join) if shape[dim] == total else None
            if moved is not None:
                changed = (*index[:dim], moved, *index[dim + 1 :])
                yield len(shape), edit(call, call.inputs, lambda was, x, changed=changed: x[changed])
                break


def _moved(part: Any, join: _Join) -> int | slice | None:
    """Where what an index reads is after the exchange; None where it reads no part alone."""
    total = join.first + join.second
    if isinstance(part, int):
        place = part % total
        return place + join.second if place < join.first else place - join.first
    start, stop, step = part.indices(total)
    if step != 1 or (start, stop) not in ((0, join.first), (join.first, total)):
        return None
    return slice(join.second, total) if start == 0 else slice(0, join.second)
