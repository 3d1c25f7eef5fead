"""Check a weight map against both modules, and say what is wrong with it."""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import Tensor, nn

from parity.case.weight_map import (
    SIDES,
    Constant,
    Copies,
    MisfitError,
    Shape,
    Side,
    WeightMap,
    WeightMapError,
    describe,
    holds,
    names,
    shape_of,
)

# What a module's names mean to a weight map: parameters, further names of tied ones, buffers, LayerNorms' weights.


@dataclass(frozen=True)
class OtherNames:
    """Names in a module other than its parameters' own.

    Attributes:
        tied: further names of tied parameters, with the first name, the only one in ``module.named_parameters()``.
        buffers: names that no map may use.
        layer_norms: weights of PyTorch's LayerNorm, which has no bias if it was built without one.
    """

    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: Set[str] = frozenset()
    layer_norms: Set[str] = frozenset()


@dataclass(frozen=True)
class Parameters:
    """Hold what a map may name of one module.

    Attributes:
        kind: ``reference`` or ``TE``.
        shapes: the shapes of its parameters, by name.
        others: its other names.
    """

    kind: str
    shapes: Mapping[str, Shape]
    others: OtherNames = field(default_factory=OtherNames)


def other_names(module: nn.Module) -> OtherNames:
    """Return a module's names that are not parameters' own, and those of its LayerNorms."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return OtherNames(
        tied={name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]},
        buffers=frozenset(name for name, _ in module.named_buffers(remove_duplicate=False)),
        layer_norms=frozenset(
            f"{path}.weight" if path else "weight"
            for path, part in module.named_modules()
            if isinstance(part, nn.LayerNorm)
        ),
    )


# A map's problems as a user reads them: problems of similar layers are merged, advice is given once, lists are cut.


MOST_LINES = 20
MOST_LETTERS = 600

# Numbers in names, which count layers or experts: ``layers.3.weight``, ``3.weight``, ``scales.3``, ``weight3``.
_NUMBER = re.compile(r'(?<=[\w\]]\.)\d+(?=\.|")|(?<=["( ])\d+(?=\.[A-Za-z_])|(?<=weight)\d+|(?<=bias)\d+')
_CONSTANT = re.compile(r"constant\([^)]*\)")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a map.

    Attributes:
        text: the problem, with the parameters' names and shapes.
        advice: what to do; given once for all problems that share it, whatever constants it names.
    """

    text: str
    advice: str = ""


def lines(problems: Iterable[Problem]) -> list[str]:
    """Return a line for each problem, merged for similar layers; long lists and long lines are shortened."""
    told: set[str] = set()
    found: list[str] = []
    for problem in _merge_similar_problems(problems):
        kind = _CONSTANT.sub("", problem.advice)
        text = _shorten_text(problem.text)
        found.append(text if not kind or kind in told else f"{text}; {problem.advice}")
        told.add(kind)
    hidden = len(found) - MOST_LINES
    return found if hidden <= 1 else [*found[:MOST_LINES], f"and {hidden} more problems like these"]


def _shorten_text(text: str) -> str:
    """Return the ends of a long text, such as an entry that names dozens of experts."""
    end = MOST_LETTERS // 2
    return text if len(text) <= MOST_LETTERS else f"{text[:end]} ... {text[-end:]}"


def _merge_similar_problems(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the problems in their order; those that differ only in layers' numbers are merged into the first."""
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((_NUMBER.sub("#", problem.text), _NUMBER.sub("#", problem.advice)), []).append(problem)
    for members in alike.values():
        unique = list(dict.fromkeys(members))
        yield from [_merge_into_one(unique)] if len(unique) > 1 and _are_all_combinations(unique) else unique


def _find_number_columns(problems: Sequence[Problem]) -> list[tuple[int, ...]]:
    """Return the numbers in each place of the problems' names."""
    each = [[int(number) for number in _NUMBER.findall(f"{p.text}\n{p.advice}")] for p in problems]
    return list(zip(*each, strict=True))


def _are_all_combinations(problems: Sequence[Problem]) -> bool:
    """Return whether independent numbers, such as those of layers and experts, occur in all combinations."""
    independent = {
        tuple(number - column[0] for number in column): len(set(column)) for column in _find_number_columns(problems)
    }
    return math.prod(independent.values()) == len(problems)


def _merge_into_one(problems: Sequence[Problem]) -> Problem:
    """Return one problem, with ranges for its numbers."""
    ranges = iter([_format_ranges(sorted(set(column))) for column in _find_number_columns(problems)])
    text = _NUMBER.sub(lambda _: next(ranges), problems[0].text)
    return replace(problems[0], text=text, advice=_NUMBER.sub(lambda _: next(ranges), problems[0].advice))


def _format_ranges(numbers: Sequence[int]) -> str:
    """Return ``0..11``, or ``0..3,7`` if some are left out."""
    starts = [0, *(i for i, (one, other) in enumerate(pairwise(numbers), 1) if other != one + 1), len(numbers)]
    runs = [numbers[start:stop] for start, stop in pairwise(starts)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


# Parameters that only one of the modules ties: what to say about them, and what to write in the map.


# Advice on TE's one parameter, if the reference has two.
UNTIED = "but the reference has two separate parameters: tie them there too, or build the TE module with two"


def tied_in_entry(
    left: Side, right: Side, weights: WeightMap, reference: Parameters, candidate: Parameters
) -> Iterator[str]:
    """Yield what is wrong with the names in an entry that are further names of tied parameters."""
    firsts = [_find_first_name(side, module) for side, module in ((left, reference), (right, candidate))]
    if None not in firsts and weights.get(str(firsts[0])) == firsts[1]:
        yield f'both modules tie this to "{firsts[0]}", which has an entry: leave this one out'
        return
    for name in names(left):
        if (first := reference.others.tied.get(name)) is not None:
            text = f'"{name}" is not a reference parameter of its own: it is tied to "{first}"'
            if isinstance(right, str) and right in candidate.shapes and isinstance(weights.get(first), str):
                yield f"{text}, and TE has both apart: {fill_both(weights, first, right)} in place of both entries"
            else:
                yield f"{text}; map that"
    for name in names(right):
        if (first := candidate.others.tied.get(name)) is not None:
            mapped = any(first in names(other) for other in weights.values() if isinstance(other, SIDES))
            advice = UNTIED if mapped else "map that"
            tied = f'"{name}" is not a TE parameter of its own: it is tied to "{first}"'
            yield f"{tied}{', ' if mapped else '; '}{advice}"


def tied_elsewhere(name: str, shape: Shape, there: Parameters, here: Parameters) -> str | None:
    """Return the name under which the other module ties a parameter that is unused here, if there is one.

    It is the same name or, failing that, the only one of the same shape.
    """
    tied = [other for other, first in there.others.tied.items() if there.shapes[first] == shape]
    if name in tied:
        return name
    alike = [other for other in tied if other not in here.shapes]
    return alike[0] if len(alike) == 1 and len(shape) > 1 else None


def fill_both(weights: WeightMap, first: str, name: str) -> str:
    """Say what to do if the reference ties a parameter to ``first``, and TE has its own, ``name``."""
    filled = weights.get(first)
    both = describe(Copies((filled, name))) if isinstance(filled, str) else f'copies(..., "{name}")'
    return f'tie TE\'s, or write "{first}": {both}'


def _find_first_name(side: Side, module: Parameters) -> str | None:
    return module.others.tied.get(side) if isinstance(side, str) else None


def untied(weights: WeightMap, reference: nn.Module, candidate: nn.Module) -> tuple[str, ...]:
    """Return a sentence about each parameter of the candidate that training moves away from the reference's.

    It is one in the reference, but the candidate holds it apart; or the reference has none, and the map fills it with a
    constant.

    Two parameters are also one if they share their memory, as after ``b.weight = nn.Parameter(a.weight.data)``: an
    optimizer that changes one changes the other.

    Args:
        weights: a map that ``check_map`` accepts.
        reference, candidate: as they train, before anything casts them.

    Raises:
        WeightMapError: if two of the candidate's parameters share memory, but are separate in the reference.
    """
    of_reference, of_candidate = _find_shared_memory(reference), _find_shared_memory(candidate)
    by_left = {name: sides for sides in weights.items() for name in names(sides[0])}
    by_right = {name: sides for sides in weights.items() for name in names(sides[1])}
    for name, first in of_candidate.items():
        here, there = by_right[name], by_right[first]
        copied = any({name, first} <= set(some) for some in _find_copies(here[1]))
        if any(names(here[0])) and not (copied or (here[0] != there[0] and _are_one(here[0], there[0], of_reference))):
            raise WeightMapError(f'TE\'s "{name}" shares the memory of its "{first}", {UNTIED}')
    told = []
    for name, (left, _) in by_right.items():
        if holds(left, Constant) and candidate.training and candidate.get_parameter(name).requires_grad:
            told.append(
                f'TE\'s "{name}" is trained, but the map fills it, or a part of it, with a constant, since the '
                "reference has no such parameter: that part's gradient is not compared, and training moves it; freeze "
                "it, as with requires_grad_(False), or build TE's module without it"
            )
    for name, first in of_reference.items():
        here, there = by_left[name], by_left[first]
        if here[0] == there[0] or not _are_one(here[1], there[1], of_candidate):
            apart = [*names(there[1]), *names(here[1])]
            told.append(_describe_drift(f'"{name}" shares the memory of "{first}"', apart))
    tied = other_names(reference).tied
    for left, right in weights.items():
        for apart in _find_copies(right):
            if len({of_candidate.get(name, name) for name in apart}) > 1:
                further = [other for other, first in tied.items() if first in names(left)]
                one = f'"{further[0]}" is tied to {describe(left)}' if further else f"{describe(left)} is one parameter"
                told.append(_describe_drift(one, apart))
    return tuple(lines(map(Problem, told)))


def _describe_drift(in_reference: str, apart: list[str]) -> str:
    """Say what happens to parameters that are held apart."""
    shown = ", ".join(f'"{name}"' for name in dict.fromkeys(apart))
    return (
        f"in the reference {in_reference}, but the candidate holds it as separate parameters, {shown}: these are equal "
        "now, but will drift apart in training, since each gets only its share of the gradient; tie them, or add up "
        "their gradients before each step"
    )


def _find_copies(side: Side) -> Iterator[list[str]]:
    """Yield the parameters of each ``copies`` in a side."""
    if isinstance(side, Copies):
        yield [name for part in side.parts for name in names(part)]
    elif not isinstance(side, str):
        for part in getattr(side, "parts", ()):
            yield from _find_copies(part)


def _find_shared_memory(module: nn.Module) -> dict[str, str]:
    """Return the parameters that share another one's memory, in the same shape, each with the first in that memory."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        place = _locate_in_memory(parameter)
        if place is not None and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found


def share_memory_alike(copied: nn.Module, original: nn.Module) -> None:
    """Let parameters of a copied module share memory where the original's do; ``copy.deepcopy`` separates them."""
    parameters = dict(copied.named_parameters())
    for name, first in _find_shared_memory(original).items():
        parameters[name].data = parameters[first].data


def _locate_in_memory(tensor: Tensor) -> tuple[object, ...] | None:
    """Return where a tensor is in memory; None if it has none of its own, such as a quantized or empty one."""
    if tensor.is_meta or not tensor.numel() or not tensor.data_ptr():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _are_one(one: Side, other: Side, sharing: Mapping[str, str]) -> bool:
    """Return whether two sides are the same parameters, or share memory."""
    first, second = ([sharing.get(name, name) for name in names(side)] for side in (one, other))
    return first == second


# Parameters that no entry of a weight map mentions: what to say about each, and what is probably meant.


_BIAS, _WEIGHT = "bias", "weight"


def unused_of_reference(weights: WeightMap, reference: Parameters, candidate: Parameters) -> Iterator[Problem]:
    """Yield what to say about the reference's parameters that the map leaves out."""
    used = {name for left in weights if isinstance(left, SIDES) for name in names(left)}
    for name, shape in reference.shapes.items():
        if name in used:
            continue
        text = f'reference parameter "{name}" {tuple(shape)} is used by no entry'
        if (other := tied_elsewhere(name, shape, candidate, reference)) is not None:
            yield Problem(f'{text}; TE ties its "{other}" to "{candidate.others.tied[other]}", {UNTIED}')
        elif (norm := _norm_of_bias(name, weights, reference, candidate)) is not None:
            yield Problem(f'{text}; TE\'s "{norm}" has no bias', 'is normalization="LayerNorm" meant?')
        else:
            yield Problem(text)


def unused_of_te(weights: WeightMap, reference: Parameters, candidate: Parameters) -> Iterator[Problem]:
    """Yield what to say about TE's parameters that the map does not fill."""
    used = {name for right in weights.values() if isinstance(right, SIDES) for name in names(right)}
    for name, shape in candidate.shapes.items():
        if name in used:
            continue
        text = f'TE parameter "{name}" {tuple(shape)} is filled by no entry'
        zeros = describe(Constant(0.0, tuple(shape)))
        if (other := tied_elsewhere(name, shape, reference, candidate)) is not None:
            first = reference.others.tied[other]
            ties = f'the reference ties "{other}" to "{first}", and TE has both apart'
            yield Problem(f"{text}; {ties}: {fill_both(weights, first, name)}")
        elif (norm := norm_without_bias(name, weights, reference, candidate)) is not None:
            yield Problem(
                f'{text}; the reference\'s norm "{norm}" has no bias and looks like an RMSNorm',
                'build the TE module with normalization="RMSNorm"; only if the reference has a LayerNorm without a '
                f"bias, map {zeros} to TE's",
            )
        else:
            advice = (
                f"if the reference has no such parameter, build the TE module without it or map {zeros} to it; if "
                "another TE parameter holds the same values, map to copies(...) of both"
            )
            yield Problem(text, advice if weights else "")


def norm_without_bias(bias: str, weights: WeightMap, reference: Parameters, candidate: Parameters) -> str | None:
    """Return the weight of the reference's norm without a bias, such as an RMSNorm, if ``bias`` is that of TE's norm.

    None if the parameter is not the bias of a norm, or if the reference's norm has a bias or is PyTorch's LayerNorm.
    """
    weight = _weight_beside(bias, candidate.shapes)
    if weight is None:
        return None
    lefts = [left for left, right in weights.items() if isinstance(right, SIDES) and weight in names(right)]
    for name in (name for left in lefts if isinstance(left, SIDES) for name in names(left)):
        if name in reference.shapes and name not in reference.others.layer_norms and not _has_bias(name, reference):
            return name
    return None


def _norm_of_bias(bias: str, weights: WeightMap, reference: Parameters, candidate: Parameters) -> str | None:
    """Return the weight of TE's norm without a bias, if ``bias`` is that of the reference's norm."""
    weight = _weight_beside(bias, reference.shapes)
    if weight is None:
        return None
    rights = [right for left, right in weights.items() if isinstance(left, SIDES) and weight in names(left)]
    for name in (name for right in rights if isinstance(right, SIDES) for name in names(right)):
        if name in candidate.shapes and name.replace(_WEIGHT, _BIAS) not in candidate.shapes:
            return name
    return None


def _weight_beside(bias: str, shapes: Mapping[str, Shape]) -> str | None:
    """Return the norm's weight that has this bias: both have one shape, while a linear layer's weight is a matrix."""
    if not bias.endswith(_BIAS) or len(shapes[bias]) != 1:
        return None
    weight = bias.removesuffix(_BIAS) + _WEIGHT
    return weight if shapes.get(weight) == shapes[bias] else None


def _has_bias(weight: str, module: Parameters) -> bool:
    """Return whether a parameter of the same shape beside this weight may be its bias, whatever its name."""
    scope, shape = weight.rpartition(".")[0], module.shapes[weight]
    beside = [name for name in module.shapes if name != weight and name.rpartition(".")[0] == scope]
    return any(module.shapes[name] == shape and name.rpartition(".")[2][:1] in "bo" for name in beside)


# Check that a weight map uses each parameter of both modules once, in shapes that fit, and say what is wrong if not.


_NO_OTHERS = OtherNames()


def check_map(
    weights: WeightMap,
    reference_shapes: Mapping[str, Shape],
    candidate_shapes: Mapping[str, Shape],
    reference_others: OtherNames = _NO_OTHERS,
    candidate_others: OtherNames = _NO_OTHERS,
) -> None:
    """Check that a map uses each parameter of both modules once, in shapes that fit.

    Args:
        weights: the map.
        reference_shapes: shapes of the reference's parameters by name.
        candidate_shapes: shapes of TE's parameters by name.
        reference_others, candidate_others: their other names, see ``other_names``.

    Raises:
        WeightMapError: with every problem, one per line; those of similar layers share a line. For an empty map, that
            is the only problem.
    """
    reference = Parameters("reference", reference_shapes, reference_others)
    candidate = Parameters("TE", candidate_shapes, candidate_others)
    problems = [
        *_map_problems(weights, reference, candidate),
        *unused_of_reference(weights, reference, candidate),
        *unused_of_te(weights, reference, candidate),
    ]
    if problems and not weights:
        raise WeightMapError(
            f"the pair has no weight map, so nothing says how the reference's {len(reference_shapes)} parameters fill "
            f"TE's {len(candidate_shapes)}"
        )
    if problems:
        raise WeightMapError("\n".join(lines(problems)))


def check_entries(
    weights: WeightMap,
    reference_shapes: Mapping[str, Shape],
    candidate_shapes: Mapping[str, Shape],
    reference_others: OtherNames = _NO_OTHERS,
    candidate_others: OtherNames = _NO_OTHERS,
) -> None:
    """Check a map as ``check_map`` does, but let it leave parameters out.

    Raises:
        WeightMapError: as ``check_map`` does.
    """
    reference = Parameters("reference", reference_shapes, reference_others)
    problems = list(_map_problems(weights, reference, Parameters("TE", candidate_shapes, candidate_others)))
    if problems:
        raise WeightMapError("\n".join(lines(problems)))


def _map_problems(weights: WeightMap, reference: Parameters, candidate: Parameters) -> Iterator[Problem]:
    """Yield what is wrong with the map's entries."""
    if not isinstance(weights, Mapping):
        raise WeightMapError(f"weights must be a dict {{left: right}}, not {type(weights).__name__}")
    for left, right in weights.items():
        entry = _describe_entry(left, right)
        unknown = [*_unknown_names(left, reference), *_unknown_names(right, candidate)]
        if isinstance(left, SIDES) and isinstance(right, SIDES):
            unknown += tied_in_entry(left, right, weights, reference, candidate)
        yield from (Problem(f"{entry}: {told}") for told in unknown)
        yield from map(Problem, _entry_problems(left, right, reference.shapes, candidate.shapes, not unknown))
    for module, side in ((reference, 0), (candidate, 1)):
        for name, entries in _find_entries_by_name(weights, side).items():
            if len(entries) > 1:
                described = " and in ".join(_describe_entry(*entry) for entry in entries)
                advice = "; copies(...) on the right fills several TE parameters with one" if side == 0 else ""
                yield Problem(f'{module.kind} parameter "{name}" is used {len(entries)} times: in {described}{advice}')


def _find_entries_by_name(weights: WeightMap, side: int) -> dict[str, list[tuple[Side, Side]]]:
    """Return the entries that mention each parameter on their left (0) or right (1) side."""
    users: dict[str, list[tuple[Side, Side]]] = defaultdict(list)
    for entry in weights.items():
        if isinstance(entry[0], SIDES) and isinstance(entry[1], SIDES):
            for name in names(entry[side]):
                users[name].append(entry)
    return users


def _entry_problems(
    left: Side,
    right: Side,
    reference_shapes: Mapping[str, Shape],
    candidate_shapes: Mapping[str, Shape],
    known: bool,
) -> Iterator[str]:
    """Yield what is wrong with an entry apart from its names; ``known`` says whether these are parameters' names."""
    entry = _describe_entry(left, right)
    strangers = [side for side in (left, right) if not isinstance(side, SIDES)]
    for side in strangers:
        yield (
            f"{entry}: {describe(side)} is neither a parameter's name nor a term; combine several parameters with "
            "stack(...)"
        )
    if strangers:
        return
    if holds(right, Constant):
        yield f"{entry}: a constant stands for what the reference lacks, so it belongs on the left"
    if holds(left, Copies):
        yield (
            f"{entry}: copies(...) is for TE parameters that hold the same parameter of the reference, so it belongs "
            "on the right"
        )
    if not known:
        return
    shapes = f"({_describe_shapes(left, reference_shapes)}; {_describe_shapes(right, candidate_shapes)})"
    try:
        left_shape, right_shape = shape_of(left, reference_shapes), shape_of(right, candidate_shapes)
    except MisfitError as misfit:
        yield f"{entry}: {misfit} {shapes}"
        return
    if left_shape != right_shape:
        advice = ""
        if len(left_shape) == 2 and left_shape == right_shape[::-1]:
            advice = "; is one the transpose() of the other?"
        elif math.prod(left_shape) == math.prod(right_shape):
            advice = "; rearrange() gives the same elements another shape"
        yield f"{entry}: the left side is {left_shape}, the right side {right_shape} {shapes}{advice}"


def _unknown_names(side: Side, module: Parameters) -> Iterator[str]:
    for name in names(side) if isinstance(side, SIDES) else ():
        if name in module.others.buffers:
            yield (
                f'"{name}" is not a {module.kind} parameter of its own: it is a buffer, and buffers are not mapped; '
                "give both modules the same in the factory"
            )
        elif name not in module.shapes and name not in module.others.tied:
            close = _find_closest_name(name, module.shapes)
            advice = f'; did you mean "{close}" {tuple(module.shapes[close])}?' if close else ""
            yield f'there is no {module.kind} parameter "{name}"{advice}'


def _find_closest_name(name: str, known: Mapping[str, Shape]) -> str | None:
    """Return the only name with one prefix more or less, or else the one with the most letters in common."""
    within = sorted((other for other in known if name.endswith(f".{other}")), key=len)
    below = [other for other in known if other.endswith(f".{name}")]
    found = within[-1:] or (below if len(below) == 1 else difflib.get_close_matches(name, known, n=1))
    return found[0] if found else None


def _describe_entry(left: object, right: object) -> str:
    return f"{describe(left)}: {describe(right)}"


def _describe_shapes(side: Side, shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {tuple(shapes[name])}" for name in names(side)) or "no parameter"
