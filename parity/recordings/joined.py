"""Put together what tensor parallel ranks have recorded of one pass, as one process would have computed it.

Parameters are joined by TE's marks, which say along which dimension ranks divide them. For everything else, the pair's
own TE module, whole, is called once: each of its values has the shape of the whole, so a value that is smaller on each
rank is divided along the dimension in which it is smaller. The columns that a linear layer returns are those of the
rows of its weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parity.case.case import Pair
from parity.case.transfer import parameter_shapes
from parity.ranks.layout import Degrees, Over, places
from parity.recordings.folder import RecordedPass, RecordedValue, StoredPass, key_of, unpacked
from parity.shown import few_of
from parity.stages.watch import Watch
from parity.te import Kernels, Precision
from parity.te.state import moved
from parity.user_error import UserError

Shape = tuple[int, ...]


def group_ranks(passes: Sequence[StoredPass]) -> list[list[StoredPass]]:
    """Return the passes in groups of tensor parallel ranks, which compute one batch together."""
    groups: dict[tuple[int, int, int], list[StoredPass]] = defaultdict(list)
    for one in passes:
        groups[one.index.step, one.index.number, one.index.rank // max(one.index.tp, 1)].append(one)
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
    group: Sequence[StoredPass], build: Callable[[], Pair], kernels: Kernels, precision: Precision
) -> StoredPass:
    """Return a pass of tensor parallel ranks as one; a pass of one rank as it is.

    Args:
        group: the pass on each rank, in their order.
        build: returns the pair, whose TE module is whole.
        kernels: TE's kernels, for the call of that module.
        precision: the precision that was recorded.

    Raises:
        UserError: if the ranks were called with other arguments, or a parameter's parts do not make the pair's.
    """
    first = group[0].index
    if len(group) == 1 and first.tp <= 1:
        return group[0]
    if len(group) != first.tp:
        raise UserError(f"{first} is of {first.tp} tensor parallel ranks, and {len(group)} of them are there")
    made, pair = Degrees(tp=first.tp), build()
    shapes = parameter_shapes(pair.candidate)
    rows = {name: _rows_of(shapes[name], split, made) for name, split in first.splits.items() if name in shapes}
    tensors: dict[str, Tensor] = {}
    for kind, join in (("weight", _join_parameter), ("argument", _join_argument)):
        for name in first.names(kind):
            for what in (kind, f"gradient of {kind}"):
                if group[0].has(what, name):
                    parts = [one.tensor(what, name) for one in group]
                    tensors[key_of(what, name)] = join(name, parts, first, shapes)
    whole = _call_whole(group[0], tensors, pair, kernels, precision)
    values = _join_values(group, whole, rows, tensors)
    _join_outputs(group, whole, tensors)
    index = dataclasses.replace(
        first, values=values, tensors={key: tuple(x.shape) for key, x in tensors.items()}, ranks=first.ranks // first.tp
    )
    return JoinedPass(index, group[0].path, tensors)


# Arguments and parameters.


def _join_argument(name: str, parts: Sequence[Tensor], index: RecordedPass, shapes: Mapping[str, Shape]) -> Tensor:
    """Return an argument, or its gradient; with sequence parallelism, TE divides sequences along the first dimension.

    ``gather_along_first_dim`` in ``pytorch/distributed.py`` of TE 2.20.2 puts them together.
    """
    if all(torch.equal(parts[0], other) for other in parts[1:]):
        return parts[0]
    if not index.sequence_parallel:
        raise UserError(
            f"{index}: tensor parallel ranks were called with different tensors (argument {name}); record the module "
            "that they call with the same, such as the whole model"
        )
    return torch.cat(list(parts))


def _join_parameter(name: str, parts: Sequence[Tensor], index: RecordedPass, shapes: Mapping[str, Shape]) -> Tensor:
    """Return a parameter, or its gradient; parts of a gradient that each rank has of the whole are added up."""
    split, made = index.splits.get(name), Degrees(tp=index.tp)
    if split is None:
        same = all(torch.equal(parts[0], other) for other in parts[1:])
        return parts[0] if same else torch.stack(list(parts)).sum(0)
    shape = shapes.get(name)
    dim, blocks = split
    over = (Over("tp", dim, blocks),)
    if shape is None or math.prod(shape) != sum(x.numel() for x in parts):
        raise UserError(
            f"the ranks' parts of {name} are {[tuple(x.shape) for x in parts]}, which do not make the pair's, of shape "
            f"{shape}: name the recorded model's size with --size"
        )
    whole = parts[0].new_empty(math.prod(shape))
    for rank, x in enumerate(parts):
        whole[places(shape, over, made, rank).flatten()] = x.flatten()
    return whole.reshape(shape)


def _rows_of(shape: Shape, split: tuple[int, int], made: Degrees) -> list[Tensor]:
    """Return which rows of a whole weight each rank has; empty if ranks divide its columns."""
    dim, blocks = split
    if dim != 0:
        return []
    over = (Over("tp", 0, blocks),)
    return [places((shape[0],), over, made, rank) for rank in range(made.tp)]


# Values.


def _call_whole(
    one: StoredPass, tensors: Mapping[str, Tensor], pair: Pair, kernels: Kernels, precision: Precision
) -> dict[tuple[str, str], list[Shape]]:
    """Call the pair's whole TE module as the ranks were called; return its values' shapes, by function and submodule.

    Raises:
        UserError: if the call raises.
    """
    module = moved(pair.candidate, device=kernels.device, dtype=precision.dtype)
    watch = Watch({name: (name,) for name, _ in module.named_parameters()})
    given = unpacked(one.index.arguments, lambda name: tensors[key_of("argument", name)].to(kernels.device))
    try:
        with precision.autocast(kernels), watch.watching(module):
            module(*given["args"], **given["kwargs"])
    except Exception as error:
        raise UserError(f"the pair's TE module cannot be called as the recorded one was: {error}") from error
    found: dict[tuple[str, str], list[Shape]] = defaultdict(list)
    for value in watch.seen:
        found[value.name, value.module].append(tuple(value.tensor.shape))
    return found


def _join_values(
    group: Sequence[StoredPass],
    whole: Mapping[tuple[str, str], Sequence[Shape]],
    rows: Mapping[str, list[Tensor]],
    tensors: dict[str, Tensor],
) -> tuple[RecordedValue, ...]:
    """Add the joined values and their gradients to ``tensors``, and return those that could be joined."""
    numbers: dict[int, int] = {}  # of joined values, by their numbers on the ranks
    seen: dict[tuple[str, str], int] = defaultdict(int)
    kept: list[RecordedValue] = []
    for place, value in enumerate(group[0].index.values):
        known = whole.get((value.name, value.module), ())
        shape = known[seen[value.name, value.module]] if seen[value.name, value.module] < len(known) else None
        seen[value.name, value.module] += 1
        if any(place >= len(one.index.values) or one.index.values[place].name != value.name for one in group):
            break  # the ranks make other calls from here on
        columns = next((rows[name] for name in value.weights if rows.get(name)), None)
        x = _join_parts([one.tensor("value", place) for one in group], shape, columns)
        if x is None:
            continue
        gradient = None
        if all(one.has("gradient of value", place) for one in group):
            gradient = _join_parts([one.tensor("gradient of value", place) for one in group], shape, columns)
        numbers[place] = len(kept)
        parents = tuple(numbers[parent] for parent in value.parents if parent in numbers)
        tensors[key_of("value", len(kept))] = x
        if gradient is not None:
            tensors[key_of("gradient of value", len(kept))] = gradient
        kept.append(dataclasses.replace(value, parents=parents, has_gradient=gradient is not None))
    return tuple(kept)


def _join_parts(parts: Sequence[Tensor], whole: Shape | None, columns: Sequence[Tensor] | None = None) -> Tensor | None:
    """Return the whole of a value; None if it cannot be told how ranks divide it."""
    if all(torch.equal(parts[0], other) for other in parts[1:]) and whole in (None, tuple(parts[0].shape)):
        return parts[0]
    part = tuple(parts[0].shape)
    if whole is None or len(whole) != len(part):
        return None
    differing = [dim for dim, (one, other) in enumerate(zip(part, whole, strict=True)) if one != other]
    if len(differing) != 1 or part[differing[0]] * len(parts) != whole[differing[0]]:
        return None
    (dim,) = differing
    joined = torch.cat(list(parts), dim)
    if columns and dim == len(whole) - 1 and sum(map(len, columns)) == whole[-1]:
        return joined[..., torch.cat(list(columns)).argsort()]
    return joined


def _join_outputs(
    group: Sequence[StoredPass], whole: Mapping[tuple[str, str], Sequence[Shape]], tensors: dict[str, Tensor]
) -> None:
    shapes = [shape for some in whole.values() for shape in some]
    for name in group[0].index.outputs:
        for kind in ("output", "gradient of output"):
            if all(one.has(kind, name) for one in group):
                parts = [one.tensor(kind, name) for one in group]
                x = next((x for shape in (None, *shapes) if (x := _join_parts(parts, shape)) is not None), None)
                if x is None:
                    raise UserError(
                        f"{group[0].index}: the ranks' parts of {few_of([name])} are {tuple(parts[0].shape)}, and no "
                        "value of the pair's TE module is as many times larger as there are ranks"
                    )
                tensors[key_of(kind, name)] = x


def count_tensor_parallel_ranks(module: nn.Module) -> tuple[int, bool]:
    """Return over how many ranks TE's modules divide their parameters, and whether these divide sequences as well."""
    size = max((int(getattr(one, "tp_size", 1) or 1) for one in module.modules()), default=1)
    return size, size > 1 and any(getattr(one, "sequence_parallel", False) is True for one in module.modules())
