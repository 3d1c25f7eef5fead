"""Parameters that one module ties and the other does not: what to say of them, and what to write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from parity.weights.notation import WeightMap
from parity.weights.other_names import Parameters, other_names
from parity.weights.sides import describe, names
from parity.weights.terms import SIDES, Copies, Shape, Side, WeightMapError

# Said of TE's, where the reference has two parameters.
UNTIED = "and the reference has two parameters: tie these, or build the TE module so that it has two"


def tied_in_entry(
    left: Side, right: Side, weights: WeightMap, reference: Parameters, candidate: Parameters
) -> Iterator[str]:
    """What is wrong with the names in an entry that are further names of tied parameters."""
    firsts = [_first(side, module) for side, module in ((left, reference), (right, candidate))]
    if None not in firsts and weights.get(str(firsts[0])) == firsts[1]:
        yield f'both modules tie this to "{firsts[0]}", which has an entry: leave this one out'
        return
    for name in names(left):
        if (first := reference.others.tied.get(name)) is not None:
            text = f'"{name}" is no reference parameter of its own: it is tied to "{first}"'
            if isinstance(right, str) and right in candidate.shapes and isinstance(weights.get(first), str):
                yield f"{text}, and TE has both apart: {fill_both(weights, first, right)} in place of both entries"
            else:
                yield f"{text}; map that"
    for name in names(right):
        if (first := candidate.others.tied.get(name)) is not None:
            mapped = any(first in names(other) for other in weights.values() if isinstance(other, SIDES))
            advice = UNTIED if mapped else "map that"
            yield f'"{name}" is no TE parameter of its own: it is tied to "{first}"{", " if mapped else "; "}{advice}'


def tied_elsewhere(name: str, shape: Shape, there: Parameters, here: Parameters) -> str | None:
    """The name under which the other module ties what is an unused parameter here: the same, or one of its shape."""
    tied = [other for other, first in there.others.tied.items() if there.shapes[first] == shape]
    if name in tied:
        return name
    alike = [other for other in tied if other not in here.shapes]
    return alike[0] if len(alike) == 1 and len(shape) > 1 else None


def fill_both(weights: WeightMap, first: str, name: str) -> str:
    """What to do where the reference ties a parameter to ``first``, and TE has its own, ``name``."""
    filled = weights.get(first)
    both = describe(Copies((filled, name))) if isinstance(filled, str) else f'copies(..., "{name}")'
    return f'tie TE\'s, or write "{first}": {both}'


def _first(side: Side, module: Parameters) -> str | None:
    return module.others.tied.get(side) if isinstance(side, str) else None


def untied(weights: WeightMap, reference: nn.Module, candidate: nn.Module) -> tuple[str, ...]:
    """Say which parameters the candidate holds apart, that are one in the reference; a sentence each.

    Two parameters are one as well where they share their memory, as after ``b.weight = nn.Parameter(a.weight.data)``:
    an optimizer that steps on one steps on the other.

    Args:
        weights: a map that ``check.check_map`` accepts.
        reference, candidate: as they train, before anything casts them.

    Raises:
        WeightMapError: if the candidate has two parameters in one memory, where the reference has two.
    """
    of_reference, of_candidate = _sharing(reference), _sharing(candidate)
    by_left = {name: sides for sides in weights.items() for name in names(sides[0])}
    by_right = {name: sides for sides in weights.items() for name in names(sides[1])}
    for name, first in of_candidate.items():
        here, there = by_right[name], by_right[first]
        copied = any({name, first} <= set(some) for some in _copies(here[1]))
        if any(names(here[0])) and not (copied or (here[0] != there[0] and _are_one(here[0], there[0], of_reference))):
            raise WeightMapError(f'TE\'s "{name}" shares the memory of its "{first}", {UNTIED}')
    told = []
    for name, first in of_reference.items():
        here, there = by_left[name], by_left[first]
        if here[0] == there[0] or not _are_one(here[1], there[1], of_candidate):
            apart = [*names(there[1]), *names(here[1])]
            told.append(_told(f'"{name}" shares the memory of "{first}"', apart))
    tied = other_names(reference).tied
    for left, right in weights.items():
        for apart in _copies(right):
            if len({of_candidate.get(name, name) for name in apart}) > 1:
                further = [other for other, first in tied.items() if first in names(left)]
                one = f'"{further[0]}" is tied to {describe(left)}' if further else f"{describe(left)} is one parameter"
                told.append(_told(one, apart))
    return tuple(told)


def _told(in_reference: str, apart: list[str]) -> str:
    """Return what becomes of parameters that are apart."""
    shown = ", ".join(f'"{name}"' for name in dict.fromkeys(apart))
    return (
        f"in the reference {in_reference}, and the candidate holds it apart, in {shown}: equal now, these drift apart "
        "in training, as each gets its own share of the gradient; tie them, or add up their gradients before each step"
    )


def _copies(side: Side) -> Iterator[list[str]]:
    """Yield the parameters of each ``copies`` in a side."""
    if isinstance(side, Copies):
        yield [name for part in side.parts for name in names(part)]
    elif not isinstance(side, str):
        for part in getattr(side, "parts", ()):
            yield from _copies(part)


def _sharing(module: nn.Module) -> dict[str, str]:
    """Return the parameters that are another one's memory, in the same shape, each with the first of that memory."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        place = _place(parameter)
        if place is not None and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found


def share_memory_alike(copied: nn.Module, original: nn.Module) -> None:
    """Let parameters of a copied module share their memory where the original's do; ``copy.deepcopy`` parts them."""
    parameters = dict(copied.named_parameters())
    for name, first in _sharing(original).items():
        parameters[name].data = parameters[first].data


def _place(tensor: Tensor) -> tuple[object, ...] | None:
    """Return where a tensor lies; None for one without memory of its own, as a quantized or an empty one."""
    if tensor.is_meta or not tensor.numel() or not tensor.data_ptr():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _are_one(one: Side, other: Side, sharing: Mapping[str, str]) -> bool:
    """Return whether two sides are the same parameters, or the same memory."""
    first, second = ([sharing.get(name, name) for name in names(side)] for side in (one, other))
    return first == second
