"""A call of a trace computed again, as a function of its operands or of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from parity.diagnosis.functions.other_numbers import Compute
from parity.diagnosis.walk import binary
from parity.watching.trace import Call, Value


def of_operands(call: Call, compute: Compute) -> Compute:
    """From a function of the result, or what is in its place, and both operands to one of it and the call's tensors.

    Args:
        call: a function of two operands, as ``binary`` knows it.
        compute: called with numbers where operands are numbers.
    """
    _, left, right = binary(call) or ("", None, None)

    def computed(was: Tensor, *inputs: Tensor) -> Tensor:
        given = dict(zip((value.number for value in call.inputs), inputs, strict=True))
        x, y = (given[one.number] if isinstance(one, Value) else one for one in (left, right))
        result: Tensor = compute(was, x, y)
        return result

    return computed


def again(call: Call, compute: Callable[[Any, Any], Any]) -> Compute:
    """From a function of the call's arguments to one of the result and the call's tensors."""

    def computed(was: Any, *inputs: Tensor) -> Any:
        given = dict(zip((value.number for value in call.inputs), inputs, strict=True))
        args, kwargs = tree_map(
            lambda one: given[one.number] if isinstance(one, Value) else one, (call.args, call.kwargs)
        )
        return compute(args, kwargs)

    return computed
