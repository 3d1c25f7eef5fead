"""Put together what ranks have recorded of one pass, as one process would have computed it.

Tensor parallel ranks divide parameters as TE marks them, context parallel ranks sequences, and expert parallel ranks
experts and batches. How arguments and outputs are divided is declared by the pair (``parity.Parallel``). For everything
else, the pair's own TE module, whole, is called once with the recorded weights and arguments: a value is divided along
the dimension in which it is smaller on each rank. A value that this puts into another order than the whole module's,
such as tokens that each rank has sorted, is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from parity.case.case import Case, Pair
from parity.case.patterns import expanded_names
from parity.case.transfer import fill, parameter_shapes
from parity.case.validate import modules_without_memory
from parity.passes.one_pass import positional_names
from parity.ranks.layout import AxisName, Degrees, Over, Split, places, whole_names, whole_shape
from parity.recordings.folder import RecordedPass, RecordedValue, StoredPass, key_of, unpacked
from parity.stages.watch import Watch
from parity.te import Kernels, Precision
from parity.te.state import moved
from parity.user_error import UserError

Shape = tuple[int, ...]
_JOINING: tuple[AxisName, ...] = ("tp", "cp", "ep")  # data parallel ranks are judged one by one


def find_degrees(index: RecordedPass, case: Case, kernels: Kernels, size: Mapping[str, Any]) -> Degrees:
    """Return over how many ranks the pass was computed that have to be put together.

    How many divide experts is told by the names of parameters, or by the sizes of those that hold several experts, for
    a pair that is declared over expert parallel ranks.
    """
    made = Degrees(tp=index.tp, cp=index.cp, sequence_parallel=index.sequence_parallel)
    declared = sorted({one.ep for one in case.ranks if one.ep > 1 and index.ranks % (one.ep * made.count) == 0})
    if not declared:
        return made
    pair = modules_without_memory(case, kernels.te, size)
    whole, own = parameter_shapes(pair.candidate), index.names("weight")
    stacked = [
        (index.tensors[key_of("weight", name)][over.dim], whole[name][over.dim])
        for name, split in _find_declared(pair, whole).items()
        for over in split
        if over.axis == "ep" and name in own
    ]
    for ep in declared:
        is_divided = whole.keys() != set(own) or any(size * ep == full for size, full in stacked)
        names = {name for rank in range(ep) for name in whole_names(own, list(whole), ep, rank).values()}
        if is_divided and names == whole.keys():
            return dataclasses.replace(made, ep=ep)
    return made


def _find_declared(pair: Pair, shapes: Mapping[str, Shape]) -> dict[str, Split]:
    """Return how the pair declares that parameters are divided, by their names."""
    declared = expanded_names(pair.parallel.weights, shapes)
    return {name: tuple(split) for name, split in declared.items() if name in shapes}


def group_ranks(passes: Sequence[StoredPass], made: Degrees) -> list[list[StoredPass]]:
    """Return the passes in groups of ranks that compute one batch together."""
    groups: dict[tuple[int, int, int], list[StoredPass]] = defaultdict(list)
    for one in passes:
        groups[one.index.step, one.index.number, one.index.rank // made.count].append(one)
    return list(groups.values())


@dataclass(frozen=True)
class JoinedPass(StoredPass):
    """A pass that was put together; its tensors are in memory.

    Attributes:
        tensors: by their keys.
    """

    tensors: Mapping[str, Tensor]

    @contextmanager
    def opened(self) -> Iterator[Callable[[str], Tensor]]:
        yield self.tensors.__getitem__


def join_ranks(
    group: Sequence[StoredPass], made: Degrees, build: Callable[[], Pair], kernels: Kernels, precision: Precision
) -> StoredPass:
    """Return a pass of ranks that computed it together as one; a pass of one rank as it is.

    Args:
        group: the pass on each rank, in their order.
        made: how many ranks there are along each axis.
        build: returns the pair, whose TE module is whole.
        kernels: TE's kernels, for the call of that module.
        precision: the precision that was recorded.

    Raises:
        UserError: if the ranks were called with other arguments than the pair declares, or a parameter's parts do not
            make the pair's.
    """
    first = group[0].index
    if made.count == 1 and len(group) == 1:
        return group[0]
    if len(group) != made.count:
        raise UserError(f"{first} is of {made.count} ranks ({made.label}), and {len(group)} of them are there")
    pair = build()
    joining = _Joining(group, made, pair, _name_in_whole(group, made, pair), _find_splits(first, pair))
    tensors = dict(joining.join_parameters(parameter_shapes(pair.candidate)))
    for name in first.names("argument"):
        tensors |= joining.join_kind("argument", name)
    whole = _call_whole(first, tensors, pair, kernels, precision)
    values = _join_values(joining, whole, tensors)
    shapes = [one.shape for some in whole.values() for one in some]
    for name in first.outputs:
        tensors |= joining.join_kind("output", name, shapes)
    index = dataclasses.replace(
        first,
        values=values,
        tensors={key: tuple(x.shape) for key, x in tensors.items()},
        unreached=joining.rename(first.unreached),
        frozen=joining.rename(first.frozen),
        ranks=first.ranks // made.count,
        notes=(*first.notes, *joining.notes),
    )
    return JoinedPass(index, group[0].path, tensors)


def _name_in_whole(group: Sequence[StoredPass], made: Degrees, pair: Pair) -> list[dict[str, str]]:
    """Return on each rank the whole module's names of its parameters: each rank counts its experts from 0."""
    whole = list(parameter_shapes(pair.candidate))
    own = group[0].index.names("weight")
    return [whole_names(own, whole, made.ep, made.place(rank)["ep"]) for rank in range(made.count)]


@dataclass(frozen=True)
class _Argument:
    """Stands for a recorded tensor among arguments."""

    name: str


def _find_splits(index: RecordedPass, pair: Pair) -> dict[str, Split]:
    """Return how the pair declares that recorded arguments and outputs are divided, by their recorded names."""
    given, splits = unpacked(index.arguments, _Argument), pair.parallel.splits
    named = dict(zip(positional_names(pair.reference, pair.call_reference, given["args"]), given["args"], strict=True))
    keys = {one.name: name for name, one in {**named, **given["kwargs"]}.items() if isinstance(one, _Argument)}
    outputs = [name for name in splits if name.startswith("output")]
    keys |= {name: name if name in splits or not outputs else outputs[0] for name in index.outputs}
    shapes = {name: index.tensors[key_of("output" if name in index.outputs else "argument", name)] for name in keys}
    return {
        name: tuple(dataclasses.replace(one, dim=one.dim % len(shapes[name])) for one in splits.get(key, ()))
        for name, key in keys.items()
    }


@dataclass(frozen=True)
class _Joining:
    """Ranks that computed one pass together.

    Attributes:
        group: the pass on each rank, in their order.
        made: how many ranks there are along each axis.
        pair: its TE module is whole.
        names: on each rank, the whole module's names of its parameters.
        splits: how arguments and outputs are divided, by their recorded names.
        notes: what was seen that is not as declared.
    """

    group: Sequence[StoredPass]
    made: Degrees
    pair: Pair
    names: Sequence[Mapping[str, str]]
    splits: dict[str, Split]
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> RecordedPass:
        """What the first rank recorded."""
        return self.group[0].index

    def rename(self, own: Sequence[str]) -> tuple[str, ...]:
        """Return the whole module's names of parameters that have these names on each rank."""
        return tuple(dict.fromkeys(held.get(name, name) for held in self.names for name in own))

    def tensors(self, kind: str, name: object) -> dict[int, Tensor]:
        """Return a tensor as each rank recorded it, if all did."""
        has = all(one.has(kind, name) for one in self.group)
        return {rank: one.tensor(kind, name) for rank, one in enumerate(self.group)} if has else {}

    def join_parameters(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole parameters and their gradients, by key."""
        held: dict[str, dict[int, str]] = defaultdict(dict)
        declared = _find_declared(self.pair, shapes)
        for rank, names in enumerate(self.names):
            for own, whole in names.items():
                held[whole][rank] = own
        for name, owners in held.items():
            own = next(iter(owners.values()))
            marked = [Over("tp", *self.first.splits[own])] if own in self.first.splits else []
            split = declared.get(name, tuple(marked))
            for kind in ("weight", "gradient of weight"):
                parts = {
                    rank: one.tensor(kind, owners[rank])
                    for rank, one in enumerate(self.group)
                    if rank in owners and one.has(kind, owners[rank])
                }
                if len(parts) == len(owners):
                    is_sum = kind != "weight"
                    x = self.place(parts, split, "" if is_sum else f"weight {name}", ("cp", "ep") if is_sum else ())
                    if name in shapes and x.numel() != math.prod(shapes[name]):
                        raise UserError(
                            f"the ranks' parts of {name} are {[tuple(x.shape) for x in parts.values()]}, which do not "
                            f"make the pair's, of shape {shapes[name]}: name the recorded model's size with --size"
                        )
                    yield key_of(kind, name), x

    def join_kind(self, kind: str, name: str, shapes: Sequence[Shape] = ()) -> dict[str, Tensor]:
        """Return an argument or output and its gradient, by key.

        Args:
            kind: ``argument`` or ``output``.
            name: its recorded name.
            shapes: of what the whole module computes, among which an output may be that tensor parallel ranks divide.
        """
        parts, split = self.tensors(kind, name), self.splits.get(name, ())
        if not parts:
            raise UserError(f"{self.first} has the {kind} {name} on some ranks only: record the same call on each")
        if not any(one.axis == "tp" for one in split) and self.differ(parts, "tp"):
            # TE divides sequences along the first dimension (``gather_along_first_dim`` in ``pytorch/distributed.py``
            # of TE 2.20.2).
            dims = [0] if kind == "argument" and self.made.sequence_parallel else []
            part = whole_shape(parts[0].shape, split, self.made)
            dims += [dim for shape in shapes if (dim := _find_divided(part, shape, self.made.tp)) is not None]
            self.splits[name] = split = (*split, *(Over("tp", dim) for dim in dims[:1]))
        found = {key_of(kind, name): self.place(parts, split, f"{kind} {name}")}
        if gradients := self.tensors(f"gradient of {kind}", name):
            found[key_of(f"gradient of {kind}", name)] = self.place(gradients, split)
        return found

    def find_dims(self, own: int, full: int) -> tuple[Shape, Split] | None:
        """Return the dimensions of a declared argument or output that one of a value's consists of, and their split.

        Args:
            own: the value's size in this dimension on a rank.
            full: its size in the whole.
        """
        for kind in ("argument", "output"):
            for name in self.first.names(kind):
                split, part = self.splits.get(name, ()), self.first.tensors[key_of(kind, name)]
                shape = whole_shape(part, split, self.made)
                for begin, end in itertools.combinations(range(len(part) + 1), 2):
                    if math.prod(part[begin:end]) == own and math.prod(shape[begin:end]) == full:
                        inside = [one for one in split if begin <= one.dim < end and self.made.of(one.axis) > 1]
                        return part[begin:end], tuple(dataclasses.replace(one, dim=one.dim - begin) for one in inside)
        return None

    def order_columns(self, value: RecordedValue, columns: int) -> Tensor | None:
        """Return how the whole module orders the columns of a layer with several weights, which TE concatenates.

        Each rank has the columns of its part of the first weight, then of the second, as of queries, keys and values.
        """
        shapes = {name: self.first.tensors[key_of("weight", name)] for name in self.first.splits}
        own = [shape for name, shape in shapes.items() if name.rpartition(".")[0] == value.module and len(shape) > 1]
        sizes = [shape[0] for shape in own]
        if len(sizes) < 2 or sum(sizes) * self.made.tp != columns:
            return None
        return torch.cat([some.flatten() for some in torch.arange(columns).view(self.made.tp, -1).split(sizes, 1)])

    def count_blocks(self, value: RecordedValue, columns: int) -> int:
        """Return of how many blocks a linear layer's columns are, each of which tensor parallel ranks divide."""
        for name in value.weights:
            dim, blocks = self.first.splits.get(name, (1, 1))
            if dim == 0 and self.tensors("weight", name)[0].shape[0] * self.made.tp == columns:
                return blocks
        return 1

    def differ(self, parts: Mapping[int, Tensor], axis: AxisName) -> bool:
        """Return whether ranks along an axis have different numbers."""
        return any(not _are_equal([parts[rank] for rank in some if rank in parts]) for some in self.made.peers(axis))

    def place(
        self, parts: Mapping[int, Tensor], split: Split, what: str = "", adds: Collection[AxisName] = ()
    ) -> Tensor:
        """Return the whole of a tensor that is divided so; what several ranks hold parts of a sum of is added up.

        Args:
            parts: what each rank holds.
            split: how it is divided.
            what: what it is, if it must be the same on all ranks that do not divide it; empty for a gradient.
            adds: along which axes ranks hold parts of a sum even if these are equal.

        Raises:
            UserError: if it is not the same.
        """
        own = dict(parts)
        for axis in _JOINING:
            if any(one.axis == axis for one in split):
                continue
            for ranks in self.made.peers(axis):
                held = [rank for rank in ranks if rank in own]
                same = [own.pop(rank) for rank in held]
                is_sum = len(same) > 1 and (axis in adds or not _are_equal(same))
                if is_sum and what:
                    raise UserError(
                        f"{self.first}: the ranks of {axis} have different tensors as {what}. If they divide it, say "
                        f'so in the pair, as in parity.Parallel(splits={{"input": [parity.over("{axis}", dim=0)]}}); '
                        "otherwise record the module that they call with the same, such as the whole model"
                    )
                if same:
                    own[held[0]] = torch.stack(same).double().sum(0) if is_sum else same[0]
        if not split:
            (x,) = own.values()
            return x
        first = next(iter(own.values()))
        shape = whole_shape(first.shape, split, self.made)
        whole = first.new_empty(math.prod(shape))
        for rank, x in own.items():
            whole[places(shape, split, self.made, rank).flatten()] = x.flatten()
        return whole.reshape(shape)


def _are_equal(some: Sequence[Tensor]) -> bool:
    return all(torch.equal(some[0], other) for other in some[1:])


def _find_divided(part: Sequence[int], whole: Sequence[int], ranks: int) -> int | None:
    """Return the only dimension in which a part is smaller than a whole, by as many times as there are ranks."""
    differing = [dim for dim, (one, other) in enumerate(zip(part, whole, strict=False)) if one != other]
    is_one = len(part) == len(whole) and len(differing) == 1 and part[differing[0]] * ranks == whole[differing[0]]
    return differing[0] if is_one else None


# Values.


@dataclass(frozen=True)
class _WholeValue:
    """A value that the whole module computed: its shape, and a number that tells one row from another."""

    shape: Shape
    marks: Tensor


def _mark_rows(x: Tensor) -> Tensor:
    """Return a number for each row of a value, FP64, by which rows are known again."""
    columns = x.shape[-1]
    return x.detach().cpu().double().reshape(-1, columns) @ torch.linspace(1.0, 2.0, columns, dtype=torch.float64).cos()


def _call_whole(
    index: RecordedPass, tensors: Mapping[str, Tensor], pair: Pair, kernels: Kernels, precision: Precision
) -> dict[tuple[str, str], list[_WholeValue]]:
    """Call the pair's whole TE module as the ranks were called; return its values, by function and submodule.

    Raises:
        UserError: if the call raises.
    """
    shapes = parameter_shapes(pair.candidate)
    recorded = {name: tensors.get(key_of("weight", name), torch.empty(0)) for name in shapes}
    fill(pair.candidate, {name: x for name, x in recorded.items() if tuple(x.shape) == shapes[name]})
    module = moved(pair.candidate, device=kernels.device, dtype=precision.dtype)
    watch = Watch({name: (name,) for name, _ in module.named_parameters()})
    given = unpacked(index.arguments, lambda name: tensors[key_of("argument", name)].to(kernels.device))
    try:
        with precision.autocast(kernels), watch.watching(module):
            module(*given["args"], **given["kwargs"])
    except Exception as error:
        raise UserError(f"the pair's TE module cannot be called as the recorded one was: {error}") from error
    found: dict[tuple[str, str], list[_WholeValue]] = defaultdict(list)
    for value in watch.seen:
        found[value.name, value.module].append(_WholeValue(tuple(value.tensor.shape), _mark_rows(value.tensor)))
    return found


def _join_values(
    joining: _Joining, whole: Mapping[tuple[str, str], Sequence[_WholeValue]], tensors: dict[str, Tensor]
) -> tuple[RecordedValue, ...]:
    """Add the joined values and their gradients to ``tensors``, and return those that could be joined."""
    numbers: dict[int, int] = {}  # of joined values, by their numbers on the ranks
    seen: dict[tuple[str, str], int] = defaultdict(int)
    kept: list[RecordedValue] = []
    for place, value in enumerate(joining.first.values):
        if any(place >= len(one.index.values) or one.index.values[place].name != value.name for one in joining.group):
            break  # the ranks make other calls from here on
        known = whole.get((value.name, value.module), ())[seen[value.name, value.module] :]
        seen[value.name, value.module] += 1
        parts = joining.tensors("value", place)
        way = _find_way(joining, parts, value, known[0]) if known else None
        if way is None:
            continue
        numbers[place] = number = len(kept)
        tensors[key_of("value", number)] = way(parts)
        gradients = joining.tensors("gradient of value", place)
        if gradients:
            tensors[key_of("gradient of value", number)] = way(gradients)
        parents = tuple(numbers[parent] for parent in value.parents if parent in numbers)
        lineage, weights = joining.rename(value.lineage), joining.rename(value.weights)
        told = dataclasses.replace(value, lineage=lineage, weights=weights)
        kept.append(dataclasses.replace(told, parents=parents, has_gradient=bool(gradients)))
    return tuple(kept)


def _find_way(
    joining: _Joining, parts: Mapping[int, Tensor], value: RecordedValue, whole: _WholeValue
) -> Callable[[Mapping[int, Tensor]], Tensor] | None:
    """Return what puts the parts of a value together, or of its gradient; None if it cannot be told."""
    is_even = len({x.shape for x in parts.values()}) == 1
    view, split = (_find_view(joining, parts[0].shape, value, whole.shape) if is_even else None) or ((), ())
    order = joining.order_columns(value, whole.shape[-1]) if any(one.axis == "tp" for one in split) else None
    rows, rest = sum(len(x) for x in parts.values()), {x.shape[1:] for x in parts.values()}

    def place(some: Mapping[int, Tensor], over: Split = split) -> Tensor:
        viewed = {rank: x.reshape(view) for rank, x in some.items()}
        placed = joining.place(viewed, over).reshape(whole.shape)
        return placed if order is None else placed[..., order]

    def follow(some: Mapping[int, Tensor]) -> Tensor:
        """Let the rows of one rank's experts follow those of the previous rank's."""
        return torch.cat(list(some.values()))

    if joining.made.ep == joining.made.count and not view and {(rows, *shape) for shape in rest} == {whole.shape}:
        way: Callable[[Mapping[int, Tensor]], Tensor] = follow
    elif not view or any(joining.differ(parts, axis) != any(one.axis == axis for one in split) for axis in _JOINING):
        return None
    else:
        way = place
    if not _is_reordered(_mark_rows(way(parts)), whole.marks):
        return way
    plain = tuple(dataclasses.replace(one, balanced=False) for one in split)
    if plain != split and not joining.notes and not _are_apart(_mark_rows(place(parts, plain)), whole.marks):
        joining.notes.append(
            f"from the first {value.name!r} in {value.module or 'the model'} on, each rank has neighbouring parts of a "
            "sequence; the pair declares one from the front and one from the back, which TE's causal attention takes "
            "them for"
        )
    return None


def _find_view(joining: _Joining, part: Shape, value: RecordedValue, whole: Shape) -> tuple[Shape, Split] | None:
    """Return how a value's parts are divided, in a view in which each divided dimension stands alone."""
    view: list[int] = []
    split: list[Over] = []
    for own, full in zip(part, whole, strict=True) if len(part) == len(whole) else ():
        if own == full:
            view.append(own)
        elif found := joining.find_dims(own, full):
            sizes, overs = found
            split += [dataclasses.replace(one, dim=len(view) + one.dim) for one in overs]
            view += sizes
        elif own * joining.made.tp == full:
            split.append(Over("tp", len(view), joining.count_blocks(value, full)))
            view.append(own)
        else:
            return None
    return (tuple(view), tuple(split)) if view else None


def _are_apart(marks: Tensor, right: Tensor) -> bool:
    return float((marks - right).norm()) > 0.1 * float(right.norm())


def _is_reordered(marks: Tensor, right: Tensor) -> bool:
    """Return whether rows are those of the whole module's value in another order."""
    off, off_if_sorted = (marks - right).norm(), (marks.sort().values - right.sort().values).norm()
    return _are_apart(marks, right) and bool(off_if_sorted < 0.2 * off)


def count_ranks(module: nn.Module) -> tuple[int, bool, int]:
    """Return how many ranks divide TE's parameters, whether they divide sequences, and how many attention is over."""
    size = max((int(getattr(one, "tp_size", 1) or 1) for one in module.modules()), default=1)
    is_sequence_parallel = size > 1 and any(
        getattr(one, "sequence_parallel", False) is True for one in module.modules()
    )
    groups = [group for one in module.modules() if (group := getattr(one, "cp_group", None)) is not None]
    cp = max(
        (math.prod(map(distributed.get_world_size, group if isinstance(group, list) else [group])) for group in groups),
        default=1,
    )
    return size, is_sequence_parallel, cp
