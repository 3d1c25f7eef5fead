"""List the layouts in which units can map, and find those that a module's own names and attributes contradict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, Literal

from torch import nn

from parity.case.validate import of_te
from parity.case.weight_map import (
    Constant,
    Copies,
    InterleavedQKV,
    MisfitError,
    Rearrange,
    Reorder,
    SeparatedQKV,
    Shape,
    Shift,
    Side,
    Stack,
    Term,
    Transpose,
    constant,
    copies,
    describe,
    experts,
    interleaved_qkv,
    names,
    rearrange,
    reorder,
    rope_halves,
    separated_qkv,
    shape_of,
    shift,
    stack,
    transpose,
)
from parity.mistakes.usual_numbers import USUAL
from parity.weights.suggest.units import BIAS, WEIGHT, Group, Reading, Unit, is_norm, is_stack, readings
from parity.weights.suggest.vocabulary import VOCABULARY

# The entries by which a group of units can map: each layout in which somebody stores the same numbers.


# The number of heads and their width, which shapes do not show.


@dataclass(frozen=True)
class Geometry:
    """Numbers that the modules give for their attention, each once and the candidate's first.

    Attributes:
        head_dims: channels of a head.
        groups: key and value heads.
    """

    head_dims: tuple[int, ...]
    groups: tuple[int, ...]

    def layouts(self, query_rows: int | None, key_rows: int | None, all_rows: int) -> Iterator[tuple[int, int]]:
        """Yield ``(groups, head_dim)`` that fit the rows of query, key and value.

        Args:
            query_rows: None if they are fused.
            key_rows: None if they are fused.
            all_rows: the rows of query, key and value together.
        """
        for head_dim in self.head_dims or USUAL.head_dims:
            for groups in self._list_group_counts(key_rows, all_rows, head_dim):
                rest = all_rows - 2 * groups * head_dim
                if rest > 0 and rest % (groups * head_dim) == 0 and query_rows in (None, rest):
                    yield groups, head_dim

    def _list_group_counts(self, key_rows: int | None, all_rows: int, head_dim: int) -> Sequence[int]:
        if key_rows is not None:
            return (key_rows // head_dim,) if key_rows % head_dim == 0 and key_rows >= head_dim else ()
        as_many_as_heads = all_rows // 3 // head_dim
        return tuple(dict.fromkeys((*self.groups, as_many_as_heads, 1))) if as_many_as_heads else ()


def geometry_of(candidate: nn.Module, reference: nn.Module) -> Geometry:
    """Return what the two modules say about their attention, in attributes that are numbers."""
    modules = (*candidate.modules(), *reference.modules())
    named = VOCABULARY.attributes
    return Geometry(_read_numbers(modules, named.head_dim), _read_numbers(modules, (*named.groups, *named.heads)))


def _read_numbers(modules: Sequence[nn.Module], names: Sequence[str]) -> tuple[int, ...]:
    found = [getattr(module, name, None) for module in modules for name in names]
    return tuple(dict.fromkeys(n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0))


# The entries by which a group of units can map: every layout in which such weights are stored somewhere.


Entries = tuple[tuple[Side, Side], ...]


@dataclass(frozen=True)
class Layout:
    """One way to map a group.

    Attributes:
        entries: left and right sides of a weight map.
        usual: whether it is tried at once, or only if no usual one explains what the candidate computes.
    """

    entries: Entries
    usual: bool = True


@dataclass(frozen=True)
class Shapes:
    """Shapes of all parameters by name."""

    reference: Mapping[str, Shape]
    candidate: Mapping[str, Shape]

    def fit(self, entries: Entries) -> bool:
        """Return whether both sides of each entry pack to one shape."""
        try:
            return all(shape_of(left, self.reference) == shape_of(right, self.candidate) for left, right in entries)
        except MisfitError:
            return False


def layouts(group: Group, shapes: Shapes, geometry: Geometry) -> list[Layout]:
    """Return every layout whose shapes fit, the likeliest first; biases follow their weights.

    If the reference has no bias, TE's is constant 0. If only their order put the reference's units together, each other
    order is a layout, too.
    """
    kinds = {kind for unit in group.reference for kind in unit.parameters}
    lacking = {unit: [kind for kind in unit.parameters if kind not in kinds] for unit in group.candidate}
    constant_biases = tuple(_make_constant_entry(unit, kind, 0.0) for unit, own in lacking.items() for kind in own)
    candidate = [unit.without([unit.parameters[kind] for kind in own]) for unit, own in lacking.items()]
    orders = [group.reference] if group.named else list(permutations(group.reference))
    found: dict[tuple[str, ...], Layout] = {}
    for reference in orders:
        for layout in _find_layouts(reference, candidate, group.parts, geometry):
            if layout.entries and shapes.fit(layout.entries):
                written = tuple(f"{describe(left)}: {describe(right)}" for left, right in layout.entries)
                found.setdefault(written, Layout(layout.entries + constant_biases, layout.usual))
    return sorted(found.values(), key=lambda layout: not layout.usual)


def constant_layouts(unit: Unit) -> list[Layout]:
    """Return layouts for a unit of TE that the reference lacks, if constants can fill it: 0 a bias, 1 a norm's gain.

    TE's norm with ``zero_centered_gamma`` stores its gain minus 1, which is 0.
    """
    if WEIGHT not in unit.parameters:
        return [Layout(tuple(_make_constant_entry(unit, kind, 0.0) for kind in unit.parameters))]
    if not is_norm(unit):
        return []
    return [
        Layout(tuple(_make_constant_entry(unit, kind, gain if kind == WEIGHT else 0.0) for kind in unit.parameters))
        for gain in (1.0, 0.0)
    ]


def copied_entries(entries: Entries, unit: Unit, twin: Unit) -> Entries:
    """Return the entries of a unit's layout that also fill its twin's parameters; a constant has an entry for each."""
    filled: list[tuple[Side, Side]] = []
    for left, right in entries:
        kind = next(kind for kind, name in unit.parameters.items() if name in names(right))
        if kind not in twin.parameters:
            filled.append((left, right))
        elif isinstance(left, Constant):
            filled += [(left, right), (constant(left.value, *left.shape), twin.parameters[kind])]
        else:
            filled.append((left, copies(*names(right), twin.parameters[kind])))
    return (
        *filled,
        *(_make_constant_entry(twin, kind, 0.0) for kind in twin.parameters if kind not in unit.parameters),
    )


def _make_constant_entry(unit: Unit, kind: str, value: float) -> tuple[Side, Side]:
    return constant(value, *unit.shapes[kind]), unit.parameters[kind]


def _find_layouts(
    reference: Sequence[Unit], candidate: Sequence[Unit], parts: Sequence[str], geometry: Geometry
) -> Iterator[Layout]:
    """Yield layouts for each way to read the reference's weights; a convolution's is not transposed."""
    stacked = _is_stacked(reference, candidate)
    ways = [Reading(tuple(reference), {})] if stacked else list(readings(reference, candidate))
    for reading in ways:
        is_convolution = reading.patterns or (not stacked and any(len(unit.shape) > 2 for unit in reading.units))
        for transposed in (False,) if is_convolution else (False, True):
            for layout in _of_kinds(reading.units, candidate, parts, transposed, geometry):
                entries = tuple((reading.side(left), right) for left, right in layout.entries)
                yield Layout(entries, layout.usual and reading.usual)


def _of_kinds(
    reference: Sequence[Unit], candidate: Sequence[Unit], parts: Sequence[str], transposed: bool, geometry: Geometry
) -> Iterator[Layout]:
    """Yield layouts with the weights of the reference transposed or as they are."""
    words = [part.removeprefix("cross ") for part in parts]
    if _is_stacked(reference, candidate):
        yield from map(Layout, _of_fused_experts(reference, candidate, words, transposed))
    elif words == ["query", "key", "value"]:
        yield from _of_attention(reference, candidate, transposed, geometry)
    elif words in (["gate", "up"], ["key", "value"]) and len(reference) + len(candidate) > 2:
        yield from map(Layout, _of_two(reference, candidate, transposed, words, geometry))
    elif len(reference) == len(candidate) == 1:
        yield from map(Layout, _of_one(reference[0], candidate[0], words, transposed))


def _of_one(reference: Unit, candidate: Unit, words: Sequence[str], transposed: bool) -> Iterator[Entries]:
    right = candidate.parameters
    left = {kind: _list_sides([reference], kind, transposed)[0] for kind in right}
    yield tuple((left[kind], right[kind]) for kind in right)
    if len(candidate.shape) == 1 and WEIGHT in reference.parameters and WEIGHT in right and not transposed:
        for by in (-1.0, 1.0):
            shifted = {**left, WEIGHT: shift(left[WEIGHT], by)}
            yield tuple((shifted[kind], right[kind]) for kind in right)
    if words == ["gate", "up"]:
        yield tuple((reorder(left[kind], (1, 0)), right[kind]) for kind in right)
        evens_first = _evens_first(candidate.shape[0])
        yield tuple((reorder(left[kind], evens_first), right[kind]) for kind in right)


def _of_two(
    reference: Sequence[Unit], candidate: Sequence[Unit], transposed: bool, words: Sequence[str], geometry: Geometry
) -> Iterator[Entries]:
    """Yield entries for gate and up, or key and value, stacked in either order; key and value also head by head."""
    kinds = dict.fromkeys(kind for unit in candidate for kind in unit.parameters)
    orders = [(0, 1), (1, 0)] if words == ["gate", "up"] else [(0, 1)]
    blocks = [None] if words == ["gate", "up"] else [None, *geometry.groups]
    for order in orders:
        for count in blocks:
            entries = []
            for kind in kinds:
                left = _list_sides(reference, kind, transposed)
                right: list[Side] = [unit.parameters[kind] for unit in candidate if kind in unit.parameters]
                if len(left) == len(right) == 2:
                    entries += list(zip([left[i] for i in order], right, strict=True))
                    continue
                one, other = (stack(*[side[i] for i in order]) if len(side) == 2 else side[0] for side in (left, right))
                if count is not None and len(left) == 2:
                    one = reorder(one, _in_turn(count))
                entries.append((one, other))
            yield tuple(entries)


def _in_turn(count: int) -> tuple[int, ...]:
    """Return the order that interleaves two stacks of ``count`` blocks each."""
    return tuple(i for block in range(count) for i in (block, count + block))


def _evens_first(count: int) -> tuple[int, ...]:
    """Return the order of ``count`` blocks that undoes ``_in_turn``: the first, third and so on, then the others."""
    return (*range(0, count, 2), *range(1, count, 2))


def _of_attention(
    reference: Sequence[Unit], candidate: Sequence[Unit], transposed: bool, geometry: Geometry
) -> Iterator[Layout]:
    """Yield layouts for query, key and value, fused or not on either side; if fused, by group or one after another."""
    if reference[0].has_bias_of_all and all(BIAS in unit.parameters for unit in candidate):
        yield from map(Layout, _of_one_bias(reference, candidate, transposed, geometry))
        return
    if len(reference) == 1 and len(candidate) == 2:
        yield from map(Layout, _of_query_beside_key_and_value(reference[0], candidate, transposed, geometry))
    if len(reference) not in (1, 3) or len(candidate) not in (1, 3):
        return
    query_rows, key_rows = None, None
    if len(reference) == 3:
        query_rows, key_rows, _ = (_count_rows(unit, transposed) for unit in reference)
    elif len(candidate) == 3:
        query_rows, key_rows, _ = (unit.shape[0] for unit in candidate)
    geometries = list(geometry.layouts(query_rows, key_rows, sum(unit.shape[0] for unit in candidate)))
    kinds = dict.fromkeys(kind for unit in candidate for kind in unit.parameters)
    left = {kind: _list_sides(reference, kind, transposed) for kind in kinds}
    right = {kind: [unit.parameters.get(kind) for unit in candidate] for kind in kinds}
    yield from (Layout(entries) for entries in _fused_layouts(left, right, geometries))
    for head_dim in dict.fromkeys(head_dim for _, head_dim in geometries):
        for rotary_dim in (head_dim, head_dim // 2, head_dim // 4):
            rotate = partial(_convert_rope_form, head_dim=head_dim, rotary_dim=rotary_dim)
            if rotary_dim < 2 or rotary_dim % 2:
                continue
            if len(reference) == 3:
                rotated = {kind: rotate(parts) for kind, parts in left.items()}
                yield from (Layout(entries, usual=False) for entries in _fused_layouts(rotated, right, geometries))
            if len(candidate) == 3:
                rotated = {kind: rotate(parts) for kind, parts in right.items()}
                yield from (Layout(entries, usual=False) for entries in _fused_layouts(left, rotated, geometries))


def _of_one_bias(
    reference: Sequence[Unit], candidate: Sequence[Unit], transposed: bool, geometry: Geometry
) -> Iterator[Entries]:
    """Yield entries for three weights of the reference whose query unit holds one bias for all three, in this order.

    ``nn.MultiheadAttention`` with ``kdim`` or ``vdim`` has ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight`` and
    ``in_proj_bias``.
    """
    weights, bias = _list_sides(reference, WEIGHT, transposed), reference[0].parameters[BIAS]
    te_weights: list[Side] = [unit.parameters[WEIGHT] for unit in candidate]
    te_biases: list[Side] = [unit.parameters[BIAS] for unit in candidate]
    if len(reference) == len(candidate) == 3:
        yield (*zip(weights, te_weights, strict=True), (bias, stack(*te_biases)))
    elif len(reference) == 3 and len(candidate) == 2:
        query_first = (te_weights[0], te_weights[1]), (te_biases[0], te_biases[1])
        yield from _of_one_bias_to_query_beside_key_and_value(weights, bias, *query_first, geometry.groups)
    elif len(reference) == 3 and len(candidate) == 1:
        query_rows, key_rows, _ = (_count_rows(unit, transposed) for unit in reference)
        heads = list(geometry.layouts(query_rows, key_rows, candidate[0].shape[0]))
        yield from _of_one_bias_to_one(weights, bias, te_weights[0], te_biases[0], heads)


def _of_one_bias_to_one(
    weights: Sequence[Side], bias: Side, te_weight: Side, te_bias: Side, heads: Sequence[tuple[int, int]]
) -> Iterator[Entries]:
    """Yield the entries for TE's fused weight: by group, for each pair in ``heads``, or one after another."""
    for groups, head_dim in heads:
        fused = interleaved_qkv(*weights, groups=groups, head_dim=head_dim)
        yield (fused, te_weight), (bias, separated_qkv(te_bias, groups=groups, head_dim=head_dim))
    yield (stack(*weights), te_weight), (bias, te_bias)


def _of_one_bias_to_query_beside_key_and_value(
    weights: Sequence[Side],
    bias: Side,
    te_weights: tuple[Side, Side],
    te_biases: tuple[Side, Side],
    groups: Sequence[int],
) -> Iterator[Entries]:
    """Yield the entries for TE's cross-attention, whose key and value are fused: one after another, or by group."""
    key_value = stack(*weights[1:])
    yield (weights[0], te_weights[0]), (key_value, te_weights[1]), (bias, stack(*te_biases))
    for count in groups:
        by_group, te_bias = reorder(key_value, _in_turn(count)), reorder(te_biases[1], _evens_first(2 * count))
        yield (weights[0], te_weights[0]), (by_group, te_weights[1]), (bias, stack(te_biases[0], te_bias))


def _of_query_beside_key_and_value(
    reference: Unit, candidate: Sequence[Unit], transposed: bool, geometry: Geometry
) -> Iterator[Entries]:
    """Yield entries for one weight that TE's cross-attention holds in two, key and value stacked or head by head."""
    query, fused = candidate
    for count in (None, *geometry.groups):
        entries: list[tuple[Side, Side]] = []
        for kind in fused.parameters:
            key_value: Side = fused.parameters[kind]
            if count is not None:
                key_value = reorder(key_value, _evens_first(2 * count))
            entries.append((_list_sides([reference], kind, transposed)[0], stack(query.parameters[kind], key_value)))
        yield tuple(entries)


def _fused_layouts(
    left: Mapping[str, Sequence[Side]],
    right: Mapping[str, Sequence[Side | None]],
    geometries: Sequence[tuple[int, int]],
) -> Iterator[Entries]:
    """Yield entries for each way to fuse.

    Args:
        left: for each kind, one side of the reference or three.
        right: the same for the candidate; None for a bias that one of its three units lacks.
        geometries: possible groups and head dimensions.
    """
    fused_left = len(next(iter(left.values()))) == 1
    fused_right = len(next(iter(right.values()))) == 1
    if not fused_left and not fused_right:
        entries = [entry for kind in right for entry in zip(left[kind], right[kind], strict=True)]
        yield tuple((one, other) for one, other in entries if other is not None)
        return
    complete = {kind: [side for side in sides if side is not None] for kind, sides in right.items()}
    if complete != right:  # a fused bias has all three parts
        return
    right = complete
    # A single group is Q, K and V one after another.
    heads = [(groups, head_dim) for groups, head_dim in geometries if groups > 1]
    if fused_left and fused_right:
        yield tuple((left[kind][0], right[kind][0]) for kind in right)
        for groups, head_dim in heads:
            separated = partial(separated_qkv, groups=groups, head_dim=head_dim)
            yield tuple((left[kind][0], separated(right[kind][0])) for kind in right)
            yield tuple((separated(left[kind][0]), right[kind][0]) for kind in right)
        return
    ways: list[Callable[..., Term]] = [
        partial(interleaved_qkv, groups=groups, head_dim=head_dim) for groups, head_dim in heads
    ]
    # TE's own fused weight is interleaved by default, another model's usually is not.
    for fuse in [*ways, stack] if fused_right else [stack, *ways]:
        if fused_right:
            yield tuple((fuse(*left[kind]), right[kind][0]) for kind in right)
        else:
            yield tuple((left[kind][0], fuse(*right[kind])) for kind in right)


def _convert_rope_form(parts: Sequence[Side | None], head_dim: int, rotary_dim: int) -> list[Any]:
    """Return the parts with query and key in the other form of RoPE; None stays None."""
    query, key, value = parts
    rotated = [
        part if part is None else rope_halves(part, head_dim=head_dim, rotary_dim=rotary_dim) for part in (query, key)
    ]
    return [*rotated, value]


def _of_fused_experts(
    reference: Sequence[Unit], candidate: Sequence[Unit], words: Sequence[str], transposed: bool
) -> Iterator[Entries]:
    """Yield entries for a weight ``[experts, out, in]`` on one side or both; gate and up also with rows in turn."""
    in_two = words == ["gate", "up"]
    orders: list[tuple[int, ...]] = [(0, 1), (1, 0)] if in_two else [(0,)]
    kinds = dict.fromkeys(kind for unit in candidate for kind in unit.parameters)
    sides = {kind: [[u for u in side if kind in u.parameters] for side in (reference, candidate)] for kind in kinds}
    for order in orders:
        entries = []
        for kind, (left, right) in sides.items():
            flip = transposed and kind == WEIGHT
            entries.append((_all_experts(left, kind, order, flip), _all_experts(right, kind, order, False)))
        yield tuple(entries)
    if in_two and len(reference) == 1:
        in_turn = {WEIGHT: "e (f two) d -> e (two f) d", BIAS: "e (f two) -> e (two f)"}
        yield tuple(
            (
                rearrange(_all_experts(left, kind, (0, 1), transposed and kind == WEIGHT), in_turn[kind], two=2),
                _all_experts(right, kind, (0, 1), False),
            )
            for kind, (left, right) in sides.items()
        )


def _all_experts(units: Sequence[Unit], kind: str, order: tuple[int, ...], transposed: bool) -> Side:
    """Return one term with all experts' parameters of a kind, gate over up in the given order."""
    numbers = sorted({unit.expert for unit in units if unit.expert is not None})
    if numbers:  # an expert's own units, one expert after another
        each = [[unit for unit in units if unit.expert == number] for number in numbers]
        return experts(*(_one_expert([unit.parameters[kind] for unit in own], order, transposed) for own in each))
    names: list[Side] = [unit.parameters[kind] for unit in units]
    flipped = [transpose(name) if transposed else name for name in names]
    if len(flipped) == 2:
        return stack(*(flipped[i] for i in order), dim=1)
    return reorder(flipped[0], order, dim=1) if order == (1, 0) else flipped[0]


def _one_expert(names: Sequence[str], order: tuple[int, ...], transposed: bool) -> Side:
    sides: list[Side] = [transpose(name) if transposed else name for name in names]
    return stack(*(sides[i] for i in order)) if len(sides) == 2 else sides[0]


def _is_stacked(reference: Sequence[Unit], candidate: Sequence[Unit]) -> bool:
    """Return whether one side has all experts in one weight, and the other side has all experts in some form.

    Convolutions do not count.
    """
    stacked = [any(is_stack(unit) for unit in side) for side in (reference, candidate)]
    numbered = [all(unit.expert is not None for unit in side) for side in (reference, candidate)]
    return any(stacked) and all(stack or number for stack, number in zip(stacked, numbered, strict=True))


def _list_sides(reference: Sequence[Unit], kind: str, transposed: bool) -> list[Side]:
    """Return the reference's sides of one kind; a bias that only some of the units have is 0 in the others."""
    sides: list[Side] = []
    for unit in reference:
        name = unit.parameters.get(kind)
        if name is None:
            sides.append(constant(0.0, _count_rows(unit, transposed)))
        else:
            sides.append(transpose(name) if transposed and len(unit.shapes[kind]) > 1 else name)
    return sides


def _count_rows(unit: Unit, transposed: bool) -> int:
    """Return the output features of a linear layer."""
    return unit.shape[-1] if transposed else unit.shape[0]


# What modules say about how they store their weights, and which layouts contradict that.


# How query, key and value (or the latter two) are fused: group by group, or all of one after all of another.
Order = Literal["by group", "in turn"]
_BY_GROUP: frozenset[Order] = frozenset({"by group"})
_IN_TURN: frozenset[Order] = frozenset({"in turn"})
_ANY = _BY_GROUP | _IN_TURN
_NONE: frozenset[Order] = frozenset()

_FUSED_BY_TE = ("qkv.weight", "qkv.bias", "layernorm_qkv.weight", "layernorm_qkv.bias")
_FUSED_BY_TE_IN_CROSS_ATTENTION = ("key_value.weight", "key_value.bias")


@dataclass(frozen=True)
class Stored:
    """Hold what a module says about its parameters, by their names; it says nothing about some of them.

    Attributes:
        offsets: what was added to a norm's gain: -1.0 with TE's ``zero_centered_gamma``, else 0.0.
        orders: the orders of fused queries, keys and values.
        matrices: weights of linear layers that are stored as ``[out, in]``.
    """

    offsets: Mapping[str, float]
    orders: Mapping[str, Order]
    matrices: frozenset[str]


def stored(module: nn.Module) -> Stored:
    """Return what the module's parts say, PyTorch's by their class and TE's by their attributes.

    A class that is derived from one of PyTorch's and computes something else says nothing.
    """
    offsets: dict[str, float] = {}
    orders: dict[str, Order] = {}
    matrices: set[str] = set()
    from_te = of_te(module)
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        own = {f"{prefix}{name}": weight for name, weight in part.named_parameters(recurse=False)}
        if path in from_te:
            orders.update((f"{prefix}{name}", order) for name, order in _orders_in_te(part))
            matrices |= {name for name, weight in own.items() if weight.dim() == 2}
            if (centered := getattr(part, "zero_centered_gamma", None)) is not None:
                offset = -1.0 if centered else 0.0
                offsets |= {name: offset for name, weight in own.items() if weight.dim() == 1}
        elif isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward:
            matrices.add(f"{prefix}weight")
        elif type(part).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
            offsets[f"{prefix}weight"] = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            matrices |= {name for name, weight in own.items() if weight.dim() == 2}
            if part.num_heads > 1:
                orders |= {f"{prefix}in_proj_weight": "in turn", f"{prefix}in_proj_bias": "in turn"}
    return Stored(offsets, orders, frozenset(matrices))


def _orders_in_te(attention: nn.Module) -> Iterator[tuple[str, Order]]:
    """Yield the orders in a ``te.MultiheadAttention``; a single group is in both orders."""
    interleaved = getattr(attention, "qkv_weight_interleaved", None)
    if interleaved is not None and getattr(attention, "num_gqa_groups", 1) > 1:
        for name in (*_FUSED_BY_TE, *_FUSED_BY_TE_IN_CROSS_ATTENTION):
            yield name, "by group" if interleaved else "in turn"


def with_doubts(layouts: Sequence[Layout], reference: Stored, candidate: Stored) -> list[Layout]:
    """Return the layouts; those that contradict the modules become unusual and come last, unless all usual ones do."""
    doubted = [
        replace(layout, usual=layout.usual and not _contradicts_modules(layout.entries, reference, candidate))
        for layout in layouts
    ]
    if not any(layout.usual for layout in doubted):
        return list(layouts)
    return sorted(doubted, key=lambda layout: not layout.usual)


def _contradicts_modules(entries: Entries, reference: Stored, candidate: Stored) -> bool:
    return any(
        _offsets_differ(left, right, reference, candidate)
        or _is_transposed(left, right, reference, candidate)
        or not _find_orders(left, reference) & _find_orders(right, candidate)
        for left, right in entries
    )


def _offsets_differ(left: Side, right: Side, reference: Stored, candidate: Stored) -> bool:
    one, other = _find_offset(left, reference), _find_offset(right, candidate)
    return one is not None and other is not None and one != other


def _find_offset(side: Side, module: Stored) -> float | None:
    """Return what was added to a norm's gain to become this side; None if that is not known."""
    if isinstance(side, str):
        return module.offsets.get(side)
    if isinstance(side, Copies):
        return _find_offset(side.parts[0], module)
    if isinstance(side, Shift):
        before = _find_offset(side.parts[0], module)
        return None if before is None else before + side.by
    return None


def _is_transposed(left: Side, right: Side, reference: Stored, candidate: Stored) -> bool:
    """Return whether a weight that is stored as ``[out, in]`` on both sides is transposed between them."""
    return (
        candidate.matrices.issuperset(names(right))
        and _transposes_matrices(left, reference.matrices)
        and not _transposes_matrices(right, candidate.matrices)
    )


def _transposes_matrices(side: Side, matrices: frozenset[str]) -> bool:
    if isinstance(side, (str, Constant)):
        return False
    if isinstance(side, Transpose):
        return matrices.issuperset(names(side))
    return any(_transposes_matrices(part, matrices) for part in side.parts)


def _find_orders(side: Side, module: Stored) -> frozenset[Order]:
    """Return the possible orders of a side's queries, keys and values; none if a term expects another order."""
    if isinstance(side, str):
        return frozenset({module.orders[side]}) if side in module.orders else _ANY
    if isinstance(side, Constant):
        return _ANY
    if isinstance(side, InterleavedQKV):
        return _BY_GROUP
    parts = [_find_orders(part, module) for part in side.parts]
    if isinstance(side, Stack):
        return _IN_TURN if all(part & _IN_TURN for part in parts) else _NONE
    if isinstance(side, SeparatedQKV):
        return _IN_TURN if parts[0] & _BY_GROUP else _NONE
    if isinstance(side, Reorder):
        return _apply_reorder(parts[0], side.order)
    return parts[0] if isinstance(side, (Transpose, Rearrange)) else _ANY


def _apply_reorder(before: frozenset[Order], order: Sequence[int]) -> frozenset[Order]:
    """Return the possible orders after keys and values were reordered from in turn to by group, or the other way."""
    groups = len(order) // 2
    by_group = tuple(block for group in range(groups) for block in (group, groups + group))
    in_turn = (*range(0, 2 * groups, 2), *range(1, 2 * groups, 2))
    if tuple(order) == tuple(range(len(order))):
        return before
    if tuple(order) == by_group:
        return _BY_GROUP if before & _IN_TURN else _NONE
    if tuple(order) == in_turn:
        return _IN_TURN if before & _BY_GROUP else _NONE
    return _ANY
