"""Group parameters into units of a weight and its bias, and match units of both modules that hold the same numbers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from parity.case.weight_map import Shape, Side, rearrange, renamed, shape_of
from parity.trace.trace import grouped
from parity.weights.suggest.vocabulary import VOCABULARY

# Group a module's parameters into units: what one linear layer or norm holds, its weight and its bias.


WEIGHT, BIAS = "weight", "bias"

# ``q_proj.weight``, TE's ``query_weight``, and ``weight3`` of te.GroupedLinear's fourth expert.
_LEAF = re.compile(r"(?P<stem>.*?)_?(?P<kind>weight|bias|gamma|beta)(?P<expert>\d*)")
_KINDS = {name: kind for kind, names in VOCABULARY.kinds.items() for name in names}
# Names in ``nn.MultiheadAttention`` with ``kdim``.
_QUERY_WEIGHT, _BIAS_OF_ALL = "q_proj_weight", "in_proj_bias"
_EXPERT = re.compile(r"(?:^|\.)(?:local_)?experts?\.(\d+)(?=\.|$)")
_LAST_NUMBER = re.compile(r"(?P<before>(?:.*\.)?)(?P<number>\d+)(?P<after>(?:\.[^.]*\D[^.]*)*)")


@dataclass(frozen=True)
class Unit:
    """The parameters of one linear layer, norm or embedding.

    Attributes:
        path: the dotted path without ``weight`` or ``bias``: ``layers.0.self_attn.q_proj``, ``layernorm_qkv.query``.
        expert: its number among the experts of a mixture; None if it does not belong to a single expert.
        parameters: full names by kind, ``weight`` or ``bias``.
        shapes: the shapes of those parameters, by kind.

    Units are equal if path and expert are.
    """

    path: str
    expert: int | None
    parameters: Mapping[str, str] = field(compare=False)
    shapes: Mapping[str, Shape] = field(compare=False)

    @property
    def words(self) -> tuple[str, ...]:
        """The path's parts in lower case, without numbers."""
        return tuple(word.lower() for word in self.path.split(".") if word and not word.isdecimal())

    @property
    def scope(self) -> str:
        """The path of the module that this unit is a part of."""
        return self.path.rpartition(".")[0]

    @property
    def shape(self) -> Shape:
        """The shape of the weight, or of the only parameter."""
        return self.shapes[WEIGHT] if WEIGHT in self.shapes else next(iter(self.shapes.values()))

    @property
    def has_bias_of_all(self) -> bool:
        """Return whether it is a query whose bias is that of query, key and value, see ``layouts``."""
        weight, bias = self.parameters.get(WEIGHT, ""), self.parameters.get(BIAS, "")
        return weight.endswith(_QUERY_WEIGHT) and bias.endswith(_BIAS_OF_ALL)

    def without(self, names: Container[str]) -> Unit:
        """Return the same unit without those parameters."""
        kept = {kind: name for kind, name in self.parameters.items() if name not in names}
        return replace(self, parameters=kept, shapes={kind: self.shapes[kind] for kind in kept})


def is_stack(unit: Unit) -> bool:
    """Return whether its weight has three dimensions, like that of all experts ``[experts, out, in]``."""
    return unit.expert is None and len(unit.shapes.get(WEIGHT, ())) == 3


def units_of(shapes: Mapping[str, Shape]) -> list[Unit]:
    """Return the units of a module, in the order in which it declares their first parameters.

    Args:
        shapes: the shapes of its parameters, by name.
    """
    found: dict[tuple[str, int | None], dict[str, str]] = {}
    for name in shapes:
        weight = _weight_of(name, shapes)
        path, kind, expert = (
            _parse_name(name) if weight is None else (_parse_name(weight)[0], BIAS, _parse_name(weight)[2])
        )
        kinds = found.setdefault((path, expert), {})
        # A second "weight" with the same path, such as a scale beside it, is a unit of its own.
        target = kinds if kind not in kinds else found.setdefault((name, expert), {})
        target[kind] = name
    return [
        Unit(path, expert, kinds, {kind: tuple(shapes[name]) for kind, name in kinds.items()})
        for (path, expert), kinds in found.items()
    ]


def with_experts(units: Sequence[Unit], count: int) -> list[Unit]:
    """Return the units, numbered as experts if the last number in their path counts up to the number of experts.

    This is for a mixture whose list of experts has another name. If a unit has an expert's number, all stay as they
    are.
    """
    found = [_LAST_NUMBER.fullmatch(unit.path) for unit in units]
    families = grouped(filter(None, found), lambda match: (match["before"], match["after"]))
    numbers = {family: sorted(int(match["number"]) for match in some) for family, some in families.items()}
    if any(unit.expert is not None or (is_stack(unit) and unit.shape[0] == count) for unit in units):
        return list(units)
    return [
        replace(unit, expert=int(match["number"]))
        if match and numbers[match["before"], match["after"]] == list(range(count))
        else unit
        for unit, match in zip(units, found, strict=True)
    ]


def _parse_name(name: str) -> tuple[str, str, int | None]:
    """Return path, kind and expert of a parameter."""
    scope, _, leaf = name.rpartition(".")
    in_path = _EXPERT.search(scope)
    expert = int(in_path[1]) if in_path else None
    match = _LEAF.fullmatch(leaf)
    if match is None:
        return (scope, _KINDS[leaf], expert) if leaf in _KINDS else (name, WEIGHT, expert)
    if match["expert"]:
        expert = int(match["expert"])
    path = ".".join(filter(None, (scope, match["stem"])))
    return path, _KINDS.get(match["kind"], match["kind"]), expert


def _weight_of(name: str, shapes: Mapping[str, Shape]) -> str | None:
    """Return the weight of a bias: ``w1`` or ``w_in`` beside ``b1`` or ``b_in``; ``g`` for a norm's.

    One bias for query, key and value belongs to the query, if each of them has its own weight.
    """
    scope, dot, leaf = name.rpartition(".")
    if leaf == _BIAS_OF_ALL:
        query = f"{scope}{dot}{_QUERY_WEIGHT}"
        return query if query in shapes else None
    if leaf[:1] not in ("b", "B"):
        return None
    small = leaf[0] == "b"
    weight, gain = (f"{scope}{dot}{first if small else first.upper()}{leaf[1:]}" for first in "wg")
    if weight in shapes and len(shapes[name]) == len(shapes[weight]) - 1:
        return weight
    return gain if gain in shapes and len(shapes[name]) == 1 and shapes[gain] == shapes[name] else None


# What a unit computes, read from its name in the vocabulary of Hugging Face, Meta, Megatron and TE.


Parts = tuple[str, ...]

QUERY, KEY, VALUE, GATE, UP = "query", "key", "value", "gate", "up"
EMBEDDING, HEAD = "embedding", "head"
QKV: Parts = (QUERY, KEY, VALUE)

_PARTS_OF: dict[str, Parts] = {name: layer.parts for layer in VOCABULARY.layers for name in layer.names}
_NORM_OF: dict[str, str] = {name: part for part, names in VOCABULARY.norms.items() for name in names}
_IS_NORM = re.compile(r".*norm.*|ln(_?\w)?")
_PLACES = VOCABULARY.places


def parts_by_unit(units: Sequence[Unit]) -> dict[Unit, Parts]:
    """Return the parts that each unit's name shows; units whose name shows none have no entry.

    A unit of cross-attention has ``cross query`` and so on, even if only the units beside it show that it is one. An
    MLP's first layer with twice the elements of its second holds gate and up.
    """
    siblings = grouped(units, lambda unit: unit.scope)
    told = {unit: _find_parts(unit, siblings[unit.scope], units) for unit in units}
    told = {unit: _with_gate(unit, parts, told, siblings[unit.scope]) for unit, parts in told.items()}
    return _with_cross({unit: parts for unit, parts in told.items() if parts})


def is_norm(unit: Unit) -> bool:
    """Return whether it is named like a norm."""
    return bool(unit.words) and (unit.words[-1] in _NORM_OF or _IS_NORM.fullmatch(unit.words[-1]) is not None)


def _find_parts(unit: Unit, siblings: Sequence[Unit], everything: Sequence[Unit]) -> Parts:
    if not unit.words:
        return ()
    *context, word = unit.words
    if is_norm(unit) and word not in _PARTS_OF:
        return (_classify_norm(unit, context, word, siblings),)
    parts = _PARTS_OF.get(word) or _by_place(unit, context, word, siblings, everything)
    if any(part in QKV for part in parts) and _mentions_any(context, _PLACES.cross_attention):
        return tuple(f"cross {part}" for part in parts)
    return parts


def _classify_norm(unit: Unit, context: Sequence[str], word: str, siblings: Sequence[Unit]) -> str:
    # Of three numbered norms, as in nn.TransformerDecoderLayer, the second is cross-attention's.
    if word[-1] in "23" and any(sibling.words and sibling.words[-1] == f"{word[:-1]}3" for sibling in siblings):
        return "cross_norm" if word[-1] == "2" else "mlp_norm"
    if word == "final_layer_norm":  # a layer's own in BART and OPT, the model's in Megatron
        return "mlp_norm" if re.search(r"\d", unit.scope) else "final_norm"
    if word in _NORM_OF:
        return _NORM_OF[word]
    if _mentions_any(context, _PLACES.cross_attention):
        return "cross_norm"
    layer = _PARTS_OF.get(context[-1], ()) if context else ()  # a norm in one module with a linear layer, as TE's are
    if set(layer) & set(QKV) or _mentions_any(context, _PLACES.attention):
        return "attention_norm"
    if set(layer) & {GATE, UP} or _mentions_any(context, _PLACES.mlp):
        return "mlp_norm"
    return "norm"


def _by_place(
    unit: Unit, context: Sequence[str], word: str, siblings: Sequence[Unit], everything: Sequence[Unit]
) -> Parts:
    """Return what a word means among its neighbours."""
    beside = {sibling.words[-1] for sibling in siblings if sibling.words}
    if word == "w1":
        return (GATE,) if "w3" in beside else (UP,)
    if word == "gate":
        chooses = any(f".{other.path}".startswith(f".{unit.scope}.expert".replace("..", ".")) for other in everything)
        return ("router",) if chooses or _has_a_row_for_each_expert(unit, everything) else (GATE,)
    if word == "dense" and "intermediate" in context:
        return (UP,)
    if word not in _PLACES.last_layer:
        return ()
    if _mentions_any(context, _PLACES.attention):
        return ("attention_out",)
    if _mentions_any(context, _PLACES.mlp) or "output" in context:
        return ("down",)
    told = {part for name in beside for part in _PARTS_OF.get(name, ())}
    # TE's MultiheadAttention by itself has its projections in "qkv", beside "proj".
    if told & set(QKV) or any(other.scope.rpartition(".")[2] in _PARTS_OF for other in everything):
        return ("attention_out",)
    return ("down",) if told & {GATE, UP} else ()


def _has_a_row_for_each_expert(unit: Unit, everything: Sequence[Unit]) -> bool:
    """Return whether it has as many rows as there are experts below its scope, in one weight or numbered."""
    below = [other for other in everything if f"{other.path}.".startswith(unit.scope)]
    counts = {other.shape[0] for other in below if is_stack(other)}
    counts |= {1 + max((other.expert for other in below if other.expert is not None), default=-1)}
    return unit.shape[0] in counts


def _with_gate(unit: Unit, parts: Parts, told: dict[Unit, Parts], siblings: Sequence[Unit]) -> Parts:
    """Return ``(gate, up)`` for an MLP's first layer if it holds both."""
    if parts != (UP,) or any(told[other] == (GATE,) and other.expert == unit.expert for other in siblings):
        return parts
    down = [other for other in siblings if told[other] == ("down",) and other.expert == unit.expert]
    if len(down) == 1 and math.prod(unit.shape) == 2 * math.prod(down[0].shape):
        return (GATE, UP)
    return parts


def _with_cross(told: dict[Unit, Parts]) -> dict[Unit, Parts]:
    """Mark attention as cross-attention if TE's names say so, or if the other one says that it is self-attention.

    Only in cross-attention does ``te.MultiheadAttention`` have a layer for queries and one for key and value;
    ``nn.TransformerDecoderLayer`` has ``multihead_attn`` beside ``self_attn``.
    """
    attention = [unit for unit, parts in told.items() if set(parts) & set(QKV)]
    on_itself = [unit for unit in attention if any(word.startswith("self_at") for word in unit.words)]
    cross = [unit for unit in attention if any(word in _PLACES.te_cross_attention for word in unit.words)]
    if on_itself:
        cross += [unit for unit in attention if unit not in on_itself]
    if all(unit in cross for unit in attention):
        return told
    return {unit: tuple(f"cross {part}" for part in parts) if unit in cross else parts for unit, parts in told.items()}


def _mentions_any(words: Sequence[str], any_of: Sequence[str]) -> bool:
    return any(part in word for word in words for part in any_of)


# Weights that the reference stores with more dimensions than TE: convolutions over patches, projections to heads.


# The axes of a convolution's weight: channels out and in, then time, rows and columns of a patch.
_KERNEL_AXES = {3: "o c p", 4: "o c p q", 5: "o c t p q"}
_AXES = "abcdefgh"


@dataclass(frozen=True)
class Reading:
    """One way to read the reference's weights with as many dimensions as the candidate's have.

    Attributes:
        units: the reference's units, in the shapes that they are read in.
        patterns: patterns of ``rearrange``, by parameter; empty if they are read as they are.
        usual: whether it is tried at once.
    """

    units: tuple[Unit, ...]
    patterns: dict[str, str]
    usual: bool = True

    def side(self, side: Side) -> Side:
        """Return a side over the parameters as they are stored, from one over the parameters as they are read."""
        return renamed(side, lambda name: rearrange(name, self.patterns[name]) if name in self.patterns else name)


def flat(shape: Shape) -> Shape:
    """Return the shape as in a linear layer: without dimensions of 1, a convolution's channels and patch in one."""
    long = tuple(length for length in shape if length != 1)
    return (long[0], math.prod(long[1:])) if len(long) > 2 else long


def readings(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Iterator[Reading]:
    """Yield the ways to read the reference's weights that the candidate's shapes ask for, the likeliest first."""
    if len(reference) == len(candidate) and all(map(_same_but_for_ones, reference, candidate)):
        yield _without_ones(reference, candidate)
        return
    convolutions = [unit for unit in reference if len(unit.shape) > 2]
    ranks = {len(unit.shape) for unit in convolutions}
    if not ranks or any(len(unit.shape) != 2 for unit in candidate):
        yield Reading(tuple(reference), {})
    elif len(ranks) == 1 and ranks <= _KERNEL_AXES.keys():
        yield from _read_as_matrices(reference, convolutions)
        if ranks == {3}:
            yield from _of_heads(reference, convolutions)


def _read_as_matrices(reference: Sequence[Unit], convolutions: Sequence[Unit]) -> Iterator[Reading]:
    """Yield each order in which a patch's channels, rows and columns can follow each other.

    There is only one if the patch has a single element.
    """
    shape = convolutions[0].shape
    outer, channels, *patch = _KERNEL_AXES[len(shape)].split()
    units = tuple(
        replace(unit, shapes={**unit.shapes, WEIGHT: (unit.shape[0], math.prod(unit.shape[1:]))})
        if unit in convolutions
        else unit
        for unit in reference
    )
    names = [unit.parameters[WEIGHT] for unit in convolutions]
    if math.prod(shape[2:]) == 1:
        pattern = f"{outer} {channels} {' '.join('1' for _ in patch)} -> {outer} {channels}"
        yield Reading(units, dict.fromkeys(names, pattern))
        return
    usual = [(channels, *patch), (*patch, channels)]
    others = [order for order in permutations((channels, *patch)) if order not in usual]
    for order in (*usual, *others):
        pattern = f"{outer} {channels} {' '.join(patch)} -> {outer} ({' '.join(order)})"
        yield Reading(units, dict.fromkeys(names, pattern), usual=order in usual)


def _of_heads(reference: Sequence[Unit], projections: Sequence[Unit]) -> Iterator[Reading]:
    """Yield readings of projections to heads, ``[in, heads, head_dim]`` or ``[heads, head_dim, in]``, and back.

    The weight of a projection back is ``[heads, head_dim, out]``.
    """
    for pattern in ("d h k -> (h k) d", "h k d -> (h k) d", "h k d -> d (h k)"):
        units = tuple(
            replace(unit, shapes={**unit.shapes, WEIGHT: shape_of(rearrange(WEIGHT, pattern), unit.shapes)})
            if unit in projections
            else unit
            for unit in reference
        )
        yield Reading(units, {unit.parameters[WEIGHT]: pattern for unit in projections})


def _without_ones(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Reading:
    """Return the reading with dimensions of 1 where the candidate has them."""
    units: list[Unit] = []
    patterns: dict[str, str] = {}
    for left, right in zip(reference, candidate, strict=True):
        shared = left.parameters.keys() & right.parameters.keys()
        other = {kind: right.shapes[kind] for kind in shared if _differ_by_ones(left.shapes[kind], right.shapes[kind])}
        patterns |= {left.parameters[kind]: _make_pattern(left.shapes[kind], shape) for kind, shape in other.items()}
        units.append(replace(left, shapes={**left.shapes, **other}))
    return Reading(tuple(units), patterns)


def _same_but_for_ones(one: Unit, other: Unit) -> bool:
    return one.shape == other.shape or _differ_by_ones(one.shape, other.shape)


def _differ_by_ones(one: Shape, other: Shape) -> bool:
    return one != other and [n for n in one if n != 1] == [n for n in other if n != 1]


def _make_pattern(one: Shape, other: Shape) -> str:
    """Return the pattern from one shape to another that has dimensions of 1 in other places."""
    left, right = iter(_AXES), iter(_AXES)
    before = " ".join("1" if n == 1 else next(left) for n in one)
    after = " ".join("1" if n == 1 else next(right) for n in other)
    return f"{before} -> {after}"


# Units that hold the same numbers: by name first, then by shape and order.


# A part, an expert, and its number among its kind in the model, such as the third layer's query.
Key = tuple[str, int | None, int]

# Parts that are decided together: the form of RoPE for query and key, and which half is the gate for both halves.
_TOGETHER = (QKV, tuple(f"cross {part}" for part in QKV), (GATE, UP))


@dataclass(frozen=True)
class Group:
    """Units of both modules that hold the same numbers, e.g. ``q_proj``, ``k_proj`` and ``v_proj`` and TE's ``qkv``.

    Attributes:
        reference, candidate: the units in the order of their parts.
        parts: what the candidate's units compute; empty if no name shows it.
        named: whether names matched them; else their shapes did, and the order of the reference's is a guess.
    """

    reference: tuple[Unit, ...]
    candidate: tuple[Unit, ...]
    parts: Parts = ()
    named: bool = True


@dataclass(frozen=True)
class Matching:
    """Say how the units of two modules go together.

    Attributes:
        groups: units that belong together.
        exchangeable: groups of one unit each that only their order matched: any of them may hold any other's numbers.
        reference_left: units of the reference that have no counterpart.
        candidate_left: the candidate's units that have no counterpart.
        misfits: groups among those left that names matched, but that hold different numbers of elements.
    """

    groups: tuple[Group, ...]
    exchangeable: tuple[tuple[Group, ...], ...]
    reference_left: tuple[Unit, ...]
    candidate_left: tuple[Unit, ...]
    misfits: tuple[Group, ...] = ()


def match(
    reference: Sequence[Unit], candidate: Sequence[Unit], told: tuple[Mapping[Unit, Parts], Mapping[Unit, Parts]]
) -> Matching:
    """Match units whose names show the same part, then those with the same name, then those with fitting shapes.

    The n-th query belongs to the n-th query, in the order in which the modules declare them, so that it does not matter
    how layers are numbered; if the two have different numbers of them, names decide nothing.

    Args:
        reference, candidate: units that are to be matched.
        told: the parts that the names of both show, see ``parts_by_unit``; may include further units.
    """
    left = {unit: told[0].get(unit, ()) for unit in reference}
    right = {unit: told[1].get(unit, ()) for unit in candidate}
    named = list(_by_part(left, right))
    groups = [group for group in named if _count_elements(group.reference) == _count_elements(group.candidate)]
    rest = _Rest(reference, candidate, groups)
    groups += [rest.take(group) for group in list(_by_path(rest.reference, rest.candidate, right))]
    exchangeable: list[tuple[Group, ...]] = []

    def take(classes: Iterable[tuple[Group, ...]]) -> None:
        for alike in list(classes):
            for group in alike:
                rest.take(group)
            if len(alike) == 1:
                groups.extend(alike)
            else:
                exchangeable.append(alike)

    take(_stacks_by_shape(rest.reference, rest.candidate, right))
    while (fused := _fused_by_shape(rest.reference, rest.candidate)) is not None:
        groups.append(rest.take(fused))
    for ordered in (tuple, flat):
        take(_by_shape(rest.reference, rest.candidate, right, ordered))
    misfits = tuple(group for group in named if rest.has(group))
    return Matching(tuple(groups), tuple(exchangeable), tuple(rest.reference), tuple(rest.candidate), misfits)


class _Rest:
    """The units of both modules that are in no group yet."""

    def __init__(self, reference: Sequence[Unit], candidate: Sequence[Unit], groups: Iterable[Group]) -> None:
        self.reference, self.candidate = list(reference), list(candidate)
        for group in groups:
            self.take(group)

    def has(self, group: Group) -> bool:
        return set(group.reference) <= set(self.reference) and set(group.candidate) <= set(self.candidate)

    def take(self, group: Group) -> Group:
        self.reference = [unit for unit in self.reference if unit not in group.reference]
        self.candidate = [unit for unit in self.candidate if unit not in group.candidate]
        return group


def _by_part(reference: Mapping[Unit, Parts], candidate: Mapping[Unit, Parts]) -> Iterator[Group]:
    """Yield units that are connected through the parts that they share."""
    experts = _numbers_of_experts(reference, candidate)
    left, right = (_index_by_key(parts, experts) for parts in (reference, candidate))
    counts = [Counter((part, expert) for part, expert, _ in keys) for keys in (left, right)]
    shared = {key for key in left.keys() & right.keys() if counts[0][key[:2]] == counts[1][key[:2]]}
    open_keys = [key for key in right if key in shared]
    done: set[Key] = set()
    for start in open_keys:
        if start in done:
            continue
        keys = _find_connected_keys(start, left, right, shared)
        done |= keys
        members = [key for key in open_keys if key in keys]
        members.sort(key=lambda key: (_rank_part(key[0]), -1 if key[1] is None else key[1]))
        yield Group(
            tuple(dict.fromkeys(left[key] for key in members)),
            tuple(dict.fromkeys(right[key] for key in members)),
            tuple(dict.fromkeys(part for part, _, _ in members)),
        )


def _numbers_of_experts(reference: Iterable[Unit], candidate: Iterable[Unit]) -> set[int]:
    """Return how many experts a weight ``[experts, out, in]`` may have.

    They are as many as have numbers or, if none have, as many as such weights have on both sides.
    """
    numbered = 1 + max((unit.expert for unit in (*reference, *candidate) if unit.expert is not None), default=-1)
    if numbered:
        return {numbered}
    return set.intersection(*({unit.shape[0] for unit in side if is_stack(unit)} for side in (reference, candidate)))


def _index_by_key(parts: Mapping[Unit, Parts], experts: Container[int]) -> dict[Key, Unit]:
    """Return the units by part and expert; a fused weight ``[experts, out, in]`` has the parts of all experts."""
    keys: dict[Key, Unit] = {}
    seen: Counter[tuple[str, int | None]] = Counter()
    for unit, unit_parts in parts.items():
        fused = is_stack(unit) and unit.shape[0] in experts
        for part in unit_parts:
            for expert in range(unit.shape[0]) if fused else (unit.expert,):
                keys[part, expert, seen[part, expert]] = unit
                seen[part, expert] += 1
    return keys


def _find_connected_keys(start: Key, left: Mapping[Key, Unit], right: Mapping[Key, Unit], shared: set[Key]) -> set[Key]:
    """Return the keys whose units are connected to this key's, or whose layouts must be decided together with it."""
    found, front = {start}, [start]
    while front:
        key = front.pop()
        near = {other for other in shared if left[other] == left[key] or right[other] == right[key]}
        together = {(part, *key[1:]) for parts in _TOGETHER if key[0] in parts for part in parts}
        if together <= shared and (
            all(len({side[other] for other in together}) == len(together) for side in (left, right))
            or any(left[other].has_bias_of_all for other in together)
        ):
            near |= together
        front += near - found
        found |= near
    return found


def _rank_part(part: str) -> int:
    """Rank query before key before value, and gate before up."""
    order = (*QKV, GATE, UP)
    word = part.removeprefix("cross ")
    return order.index(word) if word in order else len(order)


def _by_path(reference: Sequence[Unit], candidate: Sequence[Unit], told: Mapping[Unit, Parts]) -> Iterator[Group]:
    """Yield units with the same name and fitting shapes."""
    paths = {(unit.path, unit.expert): unit for unit in reference}
    for unit in candidate:
        other = paths.get((unit.path, unit.expert))
        if other is not None and _have_fitting_shapes(other, unit):
            yield Group((other,), (unit,), told.get(unit, ()))


def _stacks_by_shape(
    reference: Sequence[Unit], candidate: Sequence[Unit], told: Mapping[Unit, Parts]
) -> Iterator[tuple[Group, ...]]:
    """Yield weights ``[experts, out, in]`` with TE's layers for each expert, if both sides have equally many.

    Otherwise yield two such weights that follow each other, for layers that hold the elements of both.
    """
    layers: dict[str, tuple[Unit, ...]] = defaultdict(tuple)
    for unit in candidate:
        if unit.expert is not None and len(unit.shape) == 2:
            layers[unit.path] += (unit,)
    stacks = [unit for unit in reference if is_stack(unit)]
    told = {own[0]: told.get(own[0]) or _halves_of(own, layers.values()) for own in layers.values()}
    for read in (_in_any_order, tuple, _transpose_shape):
        alike: dict[Shape, list[tuple[Unit, ...]]] = defaultdict(list)
        for own in layers.values():
            alike[read((len(own), *own[0].shape))].append(own)
        for shape, of_shape in alike.items():
            groups = tuple(_match_stacks(stacks, of_shape, shape, read, told))
            yield from [groups] if groups else []
            stacks = [unit for unit in stacks if all(unit not in group.reference for group in groups)]
            for group in groups:
                del layers[group.candidate[0].path]


def _match_stacks(
    stacks: Sequence[Unit],
    layers: Sequence[tuple[Unit, ...]],
    shape: Shape,
    read: Callable[[Shape], Shape],
    told: Mapping[Unit, Parts],
) -> Iterator[Group]:
    """Yield groups of layers that have one shape and are to be stacked; none if their numbers differ."""
    same = [unit for unit in stacks if read(unit.shape) == shape]
    if len(same) == len(layers):
        for one, own in zip(same, layers, strict=True):
            yield Group((one,), own, told.get(own[0], ()))
        return
    experts, rows, columns = len(layers[0]), *layers[0][0].shape
    halves = tuple(unit for unit in stacks if read(unit.shape) == read((experts, rows // 2, columns)))
    if len(layers) == 1 and not same and len(halves) == 2:
        yield Group(halves, layers[0], (GATE, UP))


def _halves_of(layers: Sequence[Unit], others: Iterable[Sequence[Unit]]) -> Parts:
    """Return gate and up if other layers map half of these layers' output channels back to their input channels."""
    rows, columns = layers[0].shape
    return (GATE, UP) if any(2 * other[0].shape[1] == rows and other[0].shape[0] == columns for other in others) else ()


def _in_any_order(shape: Shape) -> Shape:
    """Return the shape of a stack with its rows and columns sorted, so that they can be exchanged."""
    return (shape[0], *sorted(shape[1:]))


def _transpose_shape(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[1])


def _fused_by_shape(reference: Sequence[Unit], candidate: Sequence[Unit]) -> Group | None:
    """Return a unit of TE that no single unit of the reference fits, with the two or three that fit together."""
    for unit in candidate:
        if len(unit.shape) != 2 or any(_have_fitting_shapes(other, unit) for other in reference):
            continue
        rows, columns = unit.shape
        matrices = [
            other
            for other in reference
            if len(other.shape) == 2 and columns in other.shape and other.expert == unit.expert
        ]
        for count, parts in ((2, ("gate", "up")), (3, ("query", "key", "value"))):
            for first in range(len(matrices) - count + 1):
                run = matrices[first : first + count]
                if sum(math.prod(other.shape) for other in run) == rows * columns:
                    return Group(tuple(run), (unit,), parts, named=False)
    return None


def _by_shape(
    reference: Sequence[Unit],
    candidate: Sequence[Unit],
    told: Mapping[Unit, Parts],
    order: Callable[[Shape], Shape],
) -> Iterator[tuple[Group, ...]]:
    """Match units by their order if both sides have equally many of one shape."""
    classes: dict[object, tuple[list[Unit], list[Unit]]] = defaultdict(lambda: ([], []))
    for side, units in enumerate((reference, candidate)):
        for unit in units:
            classes[WEIGHT in unit.shapes, tuple(sorted(order(unit.shape))), unit.expert][side].append(unit)
    for left, right in classes.values():
        if left and len(left) == len(right):
            yield tuple(
                Group((one,), (other,), told.get(other, ()), named=False)
                for one, other in zip(left, right, strict=True)
            )


def _have_fitting_shapes(one: Unit, other: Unit) -> bool:
    return sorted(one.shape) == sorted(other.shape) or sorted(flat(one.shape)) == sorted(flat(other.shape))


def _count_elements(units: Sequence[Unit]) -> int:
    return sum(math.prod(unit.shape) for unit in units)
