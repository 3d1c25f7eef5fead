"""Layers, or experts, whose weights TE holds in another order than the reference, and layers that compute twice.

A weight map names them by number: ``layers.3.norm.weight``, or ``fc1.weight3`` of ``GroupedLinear``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from parity.diagnosis.hypothesis import Hypothesis, ReadWeights
from parity.diagnosis.weight_maps.weight_readings import Shapes
from parity.weights.notation import WeightMap
from parity.weights.sides import names, pack, shape_of, unpack
from parity.weights.terms import Side

_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")  # the first one is the layer's, others are of what it is made of
_EXPERT = re.compile(r"(?<=weight)\d+$|(?<=bias)\d+$")
_NUMBER = re.compile(r"\d+")
_MOST_NAMED = 12  # numbers of an order that a message lists


@dataclass(frozen=True)
class _Stack:
    """Numbered parts of TE's module, all alike, and what the map fills each from.

    Attributes:
        title: of a finding on their order.
        what: TE's parts, before their number; of experts the grouped layer that has them, empty for all.
        numbers: TE's, in order.
        lefts: for each number, one side of the reference for every parameter of the part.
        rights: ditto, TE's names.
        order: for each of the reference's parts, in the reference's order, which number's sides it is (from 0).
    """

    title: str
    what: str
    numbers: tuple[int, ...]
    lefts: tuple[tuple[Side, ...], ...]
    rights: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]


def layer_order_hypotheses(
    weights: WeightMap, shapes: Shapes, module: nn.Module, unused: Container[str] = ()
) -> Iterator[Hypothesis]:
    """Every likely order of a stack other than the reference's, and parts that compute in the place of others.

    Args:
        weights: the pair's map.
        shapes: of the reference's parameters, by name.
        module: the reference.
        unused: TE's parameters without a gradient, which the reference gives one.
    """
    for stack in _stacks(weights, shapes):
        for order in _orders(stack):
            yield _permuted(stack, order, shapes, module)
        yield from _repeated(stack, shapes, module, unused)


def _stacks(weights: WeightMap, shapes: Shapes) -> Iterator[_Stack]:
    for pattern, title in ((_LAYER, "layers-permuted"), (_EXPERT, "experts-permuted")):
        parts: dict[str, dict[int, dict[str, tuple[Side, str]]]] = defaultdict(lambda: defaultdict(dict))
        for left, right in weights.items():
            found = pattern.search(next(iter(names(right)), ""))
            if found is not None and any(names(left)):
                name = found.string
                alike = f"{name[: found.start()]}#{name[found.end() :]}"
                for what in [name[: found.start()]] if pattern is _LAYER else _whose_experts(name):
                    parts[what][int(found.group())][alike] = (left, name)
        alone = len(parts) == 2 and pattern is _EXPERT  # all experts, and the same again
        for what, by_number in list(parts.items())[: 1 if alone else None]:
            stack = _stack(title, what, by_number, shapes)
            if stack is not None:
                yield stack


def _whose_experts(name: str) -> tuple[str, str]:
    """All, in all layers; and those of one of a mixture's grouped layers, which may be filled by another rule."""
    return "", _LAYER.sub("#", name).rpartition(".")[0]


def _stack(
    title: str, what: str, by_number: Mapping[int, Mapping[str, tuple[Side, str]]], shapes: Shapes
) -> _Stack | None:
    """None where there is one part, or they are not alike."""
    numbers = tuple(sorted(by_number))
    alike = list(by_number[numbers[0]])
    if len(numbers) < 2 or any(set(by_number[number]) != set(alike) for number in numbers):
        return None
    lefts = tuple(tuple(by_number[number][name][0] for name in alike) for number in numbers)
    if any(len({shape_of(left, shapes) for left in same}) > 1 for same in zip(*lefts, strict=True)):
        return None
    rights = tuple(tuple(by_number[number][name][1] for name in alike) for number in numbers)
    return _Stack(title, what, numbers, lefts, rights, _order_of([sides[0] for sides in lefts]))


def _order_of(lefts: Sequence[Side]) -> tuple[int, ...]:
    """By the number in which the reference's names differ; as they come where they differ in none."""
    numbers = [tuple(map(int, _NUMBER.findall(next(iter(names(left)))))) for left in lefts]
    if len({len(one) for one in numbers}) == 1:
        for column in zip(*numbers, strict=True):
            if len(set(column)) == len(lefts):
                return tuple(sorted(range(len(lefts)), key=column.__getitem__))
    return tuple(range(len(lefts)))


def _orders(stack: _Stack) -> Iterator[tuple[int, ...]]:
    """Which of the reference's parts TE may hold at each place: by the map's numbers, or as lists are often sorted."""
    count = len(stack.numbers)
    place = {source: number for number, source in enumerate(stack.order)}
    own = tuple(range(count))
    by_number = tuple(place[number] for number in own)  # not as they come, where the map itself is in another order
    as_text = tuple(sorted(own, key=str))
    told = {own}
    for order in (by_number, own[::-1], own[1:] + own[:1], own[-1:] + own[:-1], as_text, _inverse(as_text)):
        if order not in told:
            told.add(order)
            yield order


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _permuted(stack: _Stack, order: Sequence[int], shapes: Shapes, module: nn.Module) -> Hypothesis:
    """That the part at each place computes with the weights of the reference's part at ``order[place]``."""
    numbers = [stack.numbers[source] for source in order]
    held = ", ".join(map(str, numbers[:_MOST_NAMED])) + (", ..." if len(numbers) > _MOST_NAMED else "")
    of_one = f" of {stack.what}" if stack.what else ""
    parts = f"TE's {stack.what}0, 1, ..." if stack.title == "layers-permuted" else f"TE's experts{of_one}"
    theirs = "layers" if stack.title == "layers-permuted" else "experts"
    return Hypothesis(
        stack.title,
        f"{theirs} in the order {held}" + (of_one if theirs == "experts" else ""),
        f"fill {parts} in the reference's order; they hold its {theirs} {held}",
        module,
        read=_reading(stack, order, shapes),
    )


def _repeated(stack: _Stack, shapes: Shapes, module: nn.Module, unused: Container[str]) -> Iterator[Hypothesis]:
    """That parts which get no gradient are not called, and another computes in their place."""
    idle = [place for place, rights in enumerate(stack.rights) if all(name in unused for name in rights)]
    if stack.title != "layers-permuted" or not idle:
        return
    for instead in range(len(stack.numbers)):
        if instead not in idle:
            missing = ", ".join(f"{stack.what}{stack.numbers[place]}" for place in idle)
            yield Hypothesis(
                "layer-repeated",
                f"{stack.what}{stack.numbers[instead]} for {missing}",
                f"call TE's {missing}; {stack.what}{stack.numbers[instead]} computes again in the place",
                module,
                read=_reading(
                    stack, [instead if place in idle else place for place in range(len(stack.numbers))], shapes
                ),
            )


def _reading(stack: _Stack, order: Sequence[int], shapes: Shapes) -> ReadWeights:
    """The reference's parts would hold those at ``order``, both counted in the reference's order."""

    def read(reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
        like = next(iter(reference.values()))
        found: dict[str, Tensor] = {}
        for place, source in enumerate(order):
            if source != place:
                held, filled = stack.lefts[stack.order[source]], stack.lefts[stack.order[place]]
                for left, to in zip(held, filled, strict=True):
                    found |= unpack(to, pack(left, reference, like), shapes)
        return found

    return read
