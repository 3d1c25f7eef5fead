"""What is asked of a side of a weight map: its names, its shape, its packed tensor, how a user would write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from parity.weights.terms import Compound, Constant, Copies, MisfitError, Rearrange, Shape, Shift, Side

_MOST_SHOWN = 16  # numbers of an order


def names(side: Side) -> Iterator[str]:
    """The parameters that a side mentions, from left to right."""
    if isinstance(side, str):
        yield side
    elif not isinstance(side, Constant):
        for part in side.parts:
            yield from names(part)


def holds(side: Side, kind: type[Constant] | type[Copies]) -> bool:
    """Whether a term of this kind occurs in it."""
    if isinstance(side, (str, Constant)):
        return isinstance(side, kind)
    return isinstance(side, kind) or any(holds(part, kind) for part in side.parts)


def shape_of(side: Side, shapes: Mapping[str, Shape]) -> Shape:
    """The shape of the packed tensor.

    Raises:
        MisfitError: if the parts do not go together.
        KeyError: if a parameter is not in ``shapes``.
    """
    if isinstance(side, str):
        return tuple(shapes[side])
    if isinstance(side, Constant):
        return side.shape
    parts = [shape_of(part, shapes) for part in side.parts]
    try:
        return side.shape(parts)
    except MisfitError as misfit:
        raise MisfitError(f"{describe(side)}: {misfit}") from None


def pack(side: Side, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """One tensor from the parameters of a side; constants get the dtype and device of ``like``."""
    if isinstance(side, str):
        return tensors[side]
    if isinstance(side, Constant):
        return torch.full(side.shape, side.value, dtype=like.dtype, device=like.device)
    return side.pack([pack(part, tensors, like) for part in side.parts])


def unpack(side: Side, value: Tensor, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The inverse of ``pack``: the parameters of a side, whose shapes are given, from the packed tensor."""
    if isinstance(side, str):
        return {side: value}
    if isinstance(side, Constant):
        return {}
    parts = side.unpack(value, [shape_of(part, shapes) for part in side.parts])
    return {
        name: tensor
        for part, tensor_of_part in zip(side.parts, parts, strict=True)
        for name, tensor in unpack(part, tensor_of_part, shapes).items()
    }


def linear_part(side: Side) -> Side:
    """How gradients transform: the same layout, but nothing is added by shifts and constants, and copies add up."""
    if isinstance(side, str):
        return side
    if isinstance(side, Constant):
        return Constant(0.0, side.shape)
    if isinstance(side, Shift):
        return linear_part(side.parts[0])
    parts = tuple(map(linear_part, side.parts))
    return Copies(parts, are_gradients=True) if isinstance(side, Copies) else dataclasses.replace(side, parts=parts)


def renamed(side: Side, rename: Callable[[str], Side]) -> Side:
    """The same layout of parameters of other names, or of terms in their places."""
    if isinstance(side, str):
        return rename(side)
    if isinstance(side, Constant):
        return dataclasses.replace(side)
    return dataclasses.replace(side, parts=tuple(renamed(part, rename) for part in side.parts))


def describe(side: object, module: str = "") -> str:
    """The expression that builds a side, as a user would write it.

    Args:
        side: what stands on a side of a weight map.
        module: what stands before the name of each function, ``parity.`` say, of what is to be pasted; where it is
            empty, an order of many rows is shortened.
    """
    if isinstance(side, str):
        return f'"{side}"'
    if isinstance(side, Constant):
        return f"{module}constant({', '.join(map(repr, (side.value, *side.shape)))})"
    if not isinstance(side, Compound):
        return repr(side)
    parts = [*(describe(part, module) for part in side.parts), *_options(side, in_full=bool(module))]
    return f"{module}{side.function}({', '.join(parts)})"


def _short(value: object) -> str:
    """An option's value; of an order of hundreds of rows its ends."""
    if not isinstance(value, tuple) or len(value) <= _MOST_SHOWN:
        return repr(value)
    first, last = (", ".join(map(repr, some)) for some in (value[:3], value[-3:]))
    return f"({first}, ..., {last})"


def _options(side: Compound, in_full: bool) -> list[str]:
    shown = repr if in_full else _short
    if isinstance(side, Rearrange):
        return [f'"{side.pattern}"', *(f"{axis}={length}" for axis, length in side.sizes)]
    return [
        f"{option.name}={shown(getattr(side, option.name))}"
        for option in dataclasses.fields(side)
        if option.name != "parts" and getattr(side, option.name) != option.default
    ]
