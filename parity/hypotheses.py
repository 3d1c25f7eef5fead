"""Known mistakes of ports, each as a change that the reference would need to agree with the candidate.

A mistake in a weight map is another weight map: if the candidate's tensors, read by the other map, make the reference
compute what the candidate computes, then the other map is the right one. A mistake in a function is a reference that
calls another function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity.weight_terms import InterleavedQKV, MisfitError, Shape, Shift, Stack, Transpose, describe, names, shape_of
from parity.weights import Side, WeightMap

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)


@dataclass(frozen=True)
class Hypothesis:
    """What might be wrong with a port.

    Attributes:
        code: of the finding, see ``docs/findings.md``.
        title: of the finding.
        repair: what to change in the user's code, as the end of a sentence that says how the error falls.
        weights: how the candidate's tensors are to be read; None as the pair's own map says.
        context: in which the reference computes what the candidate would.
    """

    code: str
    title: str
    repair: str
    weights: WeightMap | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def hypotheses(weights: WeightMap, shapes: Mapping[str, Shape]) -> Iterator[Hypothesis]:
    """Every known mistake that could have been made with this weight map.

    Args:
        weights: the pair's map.
        shapes: of the reference's parameters, by name.
    """
    for left, right in weights.items():
        for code, title, other in _other_sides(left, shapes):
            yield Hypothesis(
                code,
                title,
                f"map {describe(other)} to {describe(right)}, in place of {describe(left)}",
                {other if side is left else side: target for side, target in weights.items()},
            )
    yield from _exchanges(weights, shapes)
    yield from _functions()


def _other_sides(side: Side, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str, Side]]:
    """Other terms of the same packed shape that people take for this one."""
    match side:
        case Stack(parts=parts, dim=dim):
            for order in permutations(parts):
                if order != parts:
                    title = "gate-up-swapped" if len(parts) == 2 else "stacked-in-another-order"
                    yield from _if_same_shape("PAR101", title, side, Stack(order, dim), shapes)
            if len(parts) == 3:
                for other in _interleaved(parts, shapes):
                    yield from _if_same_shape("PAR102", "qkv-layout", side, other, shapes)
        case InterleavedQKV(parts=(query, key, value)):
            yield from _if_same_shape("PAR102", "qkv-layout", side, Stack((query, key, value)), shapes)
            swapped = InterleavedQKV((query, value, key), side.groups, side.head_dim)
            yield from _if_same_shape("PAR102", "key-value-swapped", side, swapped, shapes)
        case Shift(parts=(part,)):
            yield "PAR104", "gamma-shift", part
        case str() if len(shapes[side]) == 1:
            yield "PAR104", "gamma-shift", Shift((side,), -1.0)
            yield "PAR104", "gamma-shift", Shift((side,), 1.0)
        case Transpose(parts=(part,)):
            yield from _if_same_shape("PAR103", "weight-transposed", side, part, shapes)
        case str():
            yield from _if_same_shape("PAR103", "weight-transposed", side, Transpose((side,)), shapes)


def _if_same_shape(
    code: str, title: str, side: Side, other: Side, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, str, Side]]:
    try:
        if shape_of(other, shapes) == shape_of(side, shapes):
            yield code, title, other
    except MisfitError:
        return


def _interleaved(parts: tuple[Side, ...], shapes: Mapping[str, Shape]) -> Iterator[InterleavedQKV]:
    """Query, key and value interleaved by group, for every usual head dimension that divides them."""
    query_rows, key_rows = shape_of(parts[0], shapes)[0], shape_of(parts[1], shapes)[0]
    for head_dim in HEAD_DIMS:
        if query_rows % head_dim == key_rows % head_dim == 0 and query_rows % key_rows == 0:
            yield InterleavedQKV(tuple(parts), key_rows // head_dim, head_dim)


def _exchanges(weights: WeightMap, shapes: Mapping[str, Shape]) -> Iterator[Hypothesis]:
    """Two entries of one shape, each with the other's TE parameter."""
    for (left, right), (other_left, other_right) in combinations(weights.items(), 2):
        if not any(names(left)) or not any(names(other_left)):
            continue
        if shape_of(left, shapes) == shape_of(other_left, shapes):
            exchange = {left: other_right, other_left: right}
            yield Hypothesis(
                "PAR105",
                "parameters-exchanged",
                f"map {describe(left)} to {describe(other_right)}, and {describe(other_left)} to {describe(right)}",
                {side: exchange.get(side, target) for side, target in weights.items()},
            )


def _functions() -> Iterator[Hypothesis]:
    for eps in EPSILONS:
        yield Hypothesis(
            "PAR201",
            "norm-eps",
            f"give TE's norm the reference's eps; it computes with eps={eps:g}",
            context=partial(_Instead, partial(_norm_with, eps)),
        )
    for called, computed in permutations(_ACTIVATIONS, 2):
        yield Hypothesis(
            "PAR202",
            "activation",
            f"give TE the reference's activation, {called}; it computes {computed}",
            context=partial(_Instead, partial(_activation_as, called, _ACTIVATIONS[computed])),
        )


def _gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu (erf)": _gelu_erf,
    "gelu (tanh)": _gelu_tanh,
    "quick gelu": _quick_gelu,
    "silu": F.silu,
    "relu": F.relu,
}

Call = Callable[[], Any]
Replacement = Callable[[Any, tuple[Any, ...], dict[str, Any]], Call | None]


def _norm_with(eps: float, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    if function not in (F.rms_norm, F.layer_norm):
        return None
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.arguments["eps"] = eps
    return partial(function, *bound.args, **bound.kwargs)


def _activation_as(
    called: str, other: Callable[[Tensor], Tensor], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    if function is F.gelu:
        name = "gelu (tanh)" if kwargs.get("approximate") == "tanh" else "gelu (erf)"
    else:
        name = {F.silu: "silu", F.relu: "relu"}.get(function, "")
    return partial(other, args[0]) if name == called else None


class _Instead(TorchFunctionMode):
    """Calls something else in the place of some functions."""

    def __init__(self, replacement: Replacement) -> None:
        super().__init__()
        self._replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        instead = self._replacement(func, args, kwargs)
        return func(*args, **kwargs) if instead is None else instead()
