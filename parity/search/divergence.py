"""Find where a candidate begins to differ, and where an unexplained error is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parity.case.weight_map import names
from parity.mistakes.alternatives import is_written, unusual, written_near
from parity.mistakes.codes import finding, repairable
from parity.mistakes.decoding import positions_of
from parity.mistakes.hypothesis import Hypothesis
from parity.mistakes.reads import described
from parity.mistakes.replay import outputs_with
from parity.numerics.errors import Tolerance, margin, measure
from parity.numerics.factors import Uneven, uneven
from parity.numerics.freedom import UNFUSED
from parity.passes.all_passes import as_activation, under_model
from parity.passes.one_pass import outputs_of
from parity.passes.prepare import Prepared, cast
from parity.result import Finding, TensorResult
from parity.search.failure import Failure, few_outputs
from parity.shown import few_of
from parity.trace.calls import tracing
from parity.trace.trace import Site, Trace, Value, agree, edit, grouped

if TYPE_CHECKING:
    from parity.te import Precision

# The first submodule of a candidate that computes something that its reference does not.
#
# Submodules are matched by values, not by names: each column of a right submodule's result is a column of some value
# that the reference computes, too, apart from a bias that TE adds later, and from rows that no output reads. If one
# side packs its sequences, or computes two batches at once, only the rows that both sides compute are compared.


# The rounding of each intermediate value of a reference at a precision.


Place = tuple[Site, int, bool]


def values_under(prepared: Prepared, precision: Precision) -> dict[Place, Tensor]:
    """Return the reference's values under the rounding model, by the call that returned or was given each, and where.

    The values' numbers would not identify them, since a reference may make other casts in FP64 than in FP32.
    """
    prepared.reference.float()
    traces: list[Trace] = []

    def traced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with tracing(module) as trace:
            returned = (prepared.call or nn.Module.__call__)(module, *args, **kwargs)
        traces.append(trace)
        return returned

    # To the rounding model, whatever depends on a tensor that requires a gradient is an activation.
    inputs = tree_map_only(Tensor, as_activation, cast(prepared.inputs, torch.float32))
    with under_model(prepared, precision.rounding, UNFUSED):
        outputs_of(prepared.reference, traced, inputs)
    return places(traces[0])


def places(trace: Trace) -> dict[Place, Tensor]:
    """Return a trace's tensors, by the call that first returned or was given each, and where."""
    return {place: trace.tensor(value) for place, value in _by_place(trace).items()}


def _by_place(trace: Trace) -> dict[Place, Value]:
    values = {value.number: value for call in trace.calls for value in (*call.inputs, *call.outputs)}
    return {(one.site, one.position, one.returned): one for one in values.values()}


# The columns of a candidate's value among those of all values that its reference computes.
#
# Values are matched by their columns, not by names. Columns are compared by random projections.


MOST_NOISE = 0.3
"""A value with more noise than this share of it cannot be told from another one."""

MOSTLY = 0.9
"""The share of a value's columns that must be found."""

_NOISE = 5.0  # two values are the same if they differ by less than this many times what the precision costs
_UNLIKE = 0.7  # unrelated values differ by more than this share
_CONSTANT = 1e-6  # a column is constant if less than this share of its norm is left without its mean
_FEWEST_ROWS = 8
_PROJECTIONS = 16
_MOST_PAIRS = 2**23  # of a row and another that it may be; their distances take 64 MiB
_TRIES = 4  # values in which rows are looked for, since only those before the first layer are nearly exact


@dataclass(frozen=True)
class _Known:
    """Columns of the reference's values that have the same number of rows.

    Attributes:
        projected: the projected columns, ``[columns, projections]``.
        near: how far from each a column may be to count as the same, ``[columns]``.
        holders: the value to which each belongs.
    """

    projected: Tensor
    near: Tensor
    holders: list[Place]


@dataclass(frozen=True)
class _Shared:
    """The rows that a candidate's value shares with values of the reference.

    Attributes:
        own: the numbers of the candidate's rows.
        kept: the numbers of the reference's rows; None for all.
    """

    own: Tensor
    kept: Tensor | None


class Columns:
    """The columns of all values of a reference.

    Args:
        trace: the reference's trace in FP64.
        rounded: its values under the rounding model.
        stored: the dtype to which the candidate rounds a value at least once.
    """

    def __init__(self, trace: Trace, rounded: Mapping[Place, Tensor], stored: torch.dtype) -> None:
        self._values = places(trace)
        self._rounded = rounded
        self._stored = stored
        self._found: dict[tuple[int, bytes], _Known] = {}
        self._shared: dict[int, dict[int, _Shared]] = defaultdict(dict)  # by the row counts of candidate and reference
        self._tried: Counter[int] = Counter()

    def share(self, x: Tensor, kept: Tensor | None = None) -> float | None:
        """Return the share of a value's columns that are a column of some traced value; None if that cannot be told.

        Values of more than three dimensions, such as attention's scores, have layouts of their own and are left out.

        Args:
            x: the candidate's value.
            kept: True for the rows that are compared, in the shape of ``x`` without its last dimension; None for all.
        """
        surely, perhaps = [], []
        for same, known in self._same(x, kept):
            surely.append((same & (known.near <= MOST_NOISE)).any(1).double().mean().item())
            perhaps.append(same.any(1).double().mean().item())
        return None if not surely or max(surely) < MOSTLY <= max(perhaps) else max(surely)

    def learn_rows(self, x: Tensor) -> bool:
        """Find the rows that a value shares with a traced one, in the same order, if one of them has more rows.

        Return whether any were found that were not known. Rows of zeros are left out: FP8 takes only certain numbers of
        rows, and a port may fill up packed sequences.

        Args:
            x: a value of the candidate's that has been cast at most, such as what its first layer is given.
        """
        rows, known = _rows(x), len(self._shared[_rows(x)])
        if x.dim() not in (2, 3) or self._tried[rows] == _TRIES:
            return False
        self._tried[rows] += 1
        filled = x.flatten(0, -2).any(-1).nonzero().flatten().cpu()
        own = x.double().flatten(0, -2)[filled] @ random_directions(x.shape[-1]).to(x.device)
        near = _NOISE * torch.finfo(self._stored).eps * torch.linalg.vector_norm(own, dim=1, keepdim=True)
        for y in self._values.values():
            others = _rows(y)
            if others in self._shared[rows] or others == rows or rows * others > _MOST_PAIRS:
                continue
            if _may_hold_rows(y, x) and min(len(filled), others) >= _FEWEST_ROWS:
                held = y.double().flatten(0, -2) @ random_directions(y.shape[-1]).to(y.device)
                may_be = (torch.cdist(own, held.to(own.device)) <= near).cpu()
                has_fewer = len(filled) <= others
                chosen = _only_way_in_order(may_be if has_fewer else may_be.T)
                if chosen is not None:
                    shared = _Shared(filled, chosen) if has_fewer else _Shared(filled[chosen], None)
                    self._shared[rows][others] = shared
        return len(self._shared[rows]) > known

    def rows_shared(self, x: Tensor) -> set[int]:
        """Return the row counts of those values of the reference that share rows with values of as many rows as x."""
        return set(self._shared[_rows(x)])

    def rows_held(self, x: Tensor) -> set[int]:
        """Return how many rows those values of the reference have that hold most of a value's columns."""
        return {_rows(self._values[place]) for place in self.holders(x)}

    def holders(self, x: Tensor, kept: Tensor | None = None) -> Iterator[Place]:
        """Yield each traced value that holds most of a value's columns, in these rows or in all."""
        for same, known in self._same(x, kept):
            for place in dict.fromkeys(known.holders):
                columns = torch.tensor([holder == place for holder in known.holders])
                if same[:, columns].any(1).double().mean() >= MOSTLY:
                    yield place

    def _same(self, x: Tensor, kept: Tensor | None) -> Iterator[tuple[Tensor, _Known]]:
        """Yield, for each layout, which columns of ``x`` are known ones, ``[columns, known]``, if that can be told."""
        if x.dim() not in (2, 3):
            return
        layouts = []
        for exchanged in (False, True)[: x.dim() - 1]:
            rows = None if kept is None else (kept.T if exchanged else kept).flatten().nonzero().flatten()
            layouts.append((_flat(x.transpose(0, 1) if exchanged else x, rows), self._of_rows(_rows(x), rows)))
        for others, shared in self._shared[_rows(x)].items() if kept is None else ():
            layouts.append((_flat(x, shared.own), self._of_rows(others, shared.kept)))
        for compared, known in layouts:
            columns = _varying(_projected(compared))
            if len(columns) and len(known.near):
                yield torch.cdist(columns, known.projected) <= known.near.clamp(max=_UNLIKE), known

    def _of_rows(self, rows: int, kept: Tensor | None) -> _Known:
        """Return the columns of all values that have this many rows, and how much rounding may move them.

        Args:
            rows: how many rows the values have.
            kept: the rows that are compared, in their order; None for all.
        """
        key = rows, b"" if kept is None else kept.cpu().numpy().tobytes()
        if key not in self._found:
            self._found[key] = self._columns(rows, kept)
        return self._found[key]

    def _columns(self, rows: int, kept: Tensor | None) -> _Known:
        count = rows if kept is None else len(kept)
        values = {place: y for place, y in self._values.items() if count >= _FEWEST_ROWS and _has_rows(y, rows)}
        if not values:
            return _Known(torch.empty(0, _PROJECTIONS), torch.empty(0), [])
        exact = {place: _projected(_flat(y, kept)) for place, y in values.items()}
        least = _NOISE * torch.finfo(self._stored).eps / 2
        near = [
            _cost(columns, values[place], self._rounded.get(place), kept).clamp(min=least)
            for place, columns in exact.items()
        ]
        told = torch.cat(near)
        told = told[told <= MOST_NOISE]
        # A reference may make other casts in FP32 than in FP64. Such values are assumed to be as noisy as any others.
        unknown = told.max().item() if len(told) else MOST_NOISE
        varying = {place: _varying(columns) for place, columns in exact.items()}
        return _Known(
            torch.cat(list(varying.values())),
            torch.cat(near).nan_to_num(nan=unknown),
            [place for place, columns in varying.items() for _ in columns],
        )


def _only_way_in_order(may_be: Tensor) -> Tensor | None:
    """Return which column belongs to each row, in ascending order; None if there is no way, or more than one.

    Args:
        may_be: whether a column may belong to a row, ``[rows, columns]``.
    """

    def first_ones(may_be: Tensor) -> list[int] | None:
        found = [-1]
        for columns in may_be:
            after = columns[found[-1] + 1 :].nonzero()
            if not len(after):
                return None
            found.append(found[-1] + 1 + int(after[0]))
        return found[1:]

    forward, backward = first_ones(may_be), first_ones(may_be.flip(0, 1))
    last = may_be.shape[1] - 1
    if forward is None or backward is None or forward != [last - column for column in reversed(backward)]:
        return None
    return torch.tensor(forward)


def random_directions(size: int) -> Tensor:
    """Return random directions ``[size, projections]`` in FP64, the same for each size."""
    return torch.randn(size, _PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _flat(x: Tensor, kept: Tensor | None) -> Tensor:
    """Return the rows whose numbers are ``kept``, ``[rows, columns]``; all if it is None."""
    rows = x.flatten(0, -2)
    return rows if kept is None else rows[kept.to(x.device)]


def _cost(exact: Tensor, value: Tensor, model: Tensor | None, kept: Tensor | None) -> Tensor:
    """Return how far another column may be from each varying one to count as the same; NaN without the model's value.

    Args:
        exact: the value's columns, projected.
        value: the reference's value in FP64.
        model: the same value under the rounding model, if there is one.
        kept: the numbers of the rows that are compared; None for all.
    """
    varies = exact.any(1)
    if model is None or model.shape != value.shape:
        return torch.full((int(varies.sum()),), math.nan, dtype=torch.float64)
    apart = torch.linalg.vector_norm(_projected(_flat(model, kept)) - exact, dim=1)[varies]
    return _NOISE * torch.maximum(apart, apart.square().mean().sqrt())


def _varying(columns: Tensor) -> Tensor:
    return columns[columns.any(1)]


def _has_rows(y: Tensor, rows: int) -> bool:
    return y.is_floating_point() and y.dim() > 1 and 0 < y.numel() == rows * y.shape[-1]


def _projected(x: Tensor) -> Tensor:
    """Return the projections ``[columns, projections]`` of ``[rows, columns]``.

    Each column is taken without its mean, and scaled to norm 1, or 0 if it is constant.
    """
    x = x.double()
    centred = x - x.mean(0)
    norm = torch.linalg.vector_norm(centred, dim=0)
    varies = norm > _CONSTANT * torch.linalg.vector_norm(x, dim=0)
    scaled = torch.where(varies, centred / norm.clamp(min=1e-300), 0.0)
    return (scaled.T @ random_directions(len(x)).to(x.device)).cpu() / math.sqrt(_PROJECTIONS)


# Rows of a reference's values that none of its outputs reads, such as those of padded queries.
#
# A port may have anything there: TE's attention leaves zeros, and everything that is computed from them differs, too.


class UnreadRows:
    """The rows that a candidate leaves zero somewhere, and what it computes from them.

    Args:
        prepared: what is compared.
        trace: the reference's trace in FP64.
        columns: the columns of its values.
    """

    def __init__(self, prepared: Prepared, trace: Trace, columns: Columns) -> None:
        self._prepared = prepared
        self._made = {
            (value.site, value.position, value.returned): (call, value)
            for call in trace.calls
            if isinstance(value := call.result, Value)
        }
        self._columns = columns
        self._zero: dict[torch.Size, Tensor] = {}  # the rows that are zero somewhere, by the shape of all rows
        self._tried: dict[tuple[Place, bytes], bool] = {}

    def hide_what_differs(self, x: Tensor) -> bool:
        """Return whether a candidate's value is the reference's apart from rows that no output reads."""
        zero = ~x.any(-1)
        zero = zero | self._zero.get(zero.shape, torch.zeros_like(zero))
        if not zero.any() or zero.all() or (self._columns.share(x, ~zero) or 0.0) < MOSTLY:
            return False
        hidden = any(self._is_unread(place, zero) for place in self._columns.holders(x, ~zero))
        if hidden:
            self._zero[zero.shape] = zero
        return hidden

    def _is_unread(self, place: Place, rows: Tensor) -> bool:
        """Return whether the reference returns the same if these rows of the value are zeros."""
        key = place, rows.cpu().numpy().tobytes()
        if key not in self._tried:
            self._tried[key] = place in self._made and self._returns_the_same(place, rows)
        return self._tried[key]

    def _returns_the_same(self, place: Place, rows: Tensor) -> bool:
        call, _ = self._made[place]

        def without(was: Tensor) -> Tensor:
            # In the order of the candidate's rows, or with batch and sequence exchanged.
            exchanged = rows.dim() == 2 and rows.shape != was.shape[:-1] == rows.T.shape
            hidden = (rows.T if exchanged else rows).reshape(was.shape[:-1])
            return was.masked_fill(hidden.unsqueeze(-1), 0.0)

        assumed = Hypothesis("", "rows of zeros", "", (edit(call, (), without),))
        outputs = outputs_with(self._prepared, (assumed,), torch.float64)
        golden = self._prepared.golden.outputs
        return outputs is not None and all(agree(outputs[name], x) for name, x in golden.items())


# The search for the first submodule that differs, as described at the top of this file.


_MOVED = 0.5  # the share of rows that must stand elsewhere; with fewer, they are the same rows with an error
_MOST_ROWS = 512  # rows that are looked for among others
_WITH_POSITIONS = 3  # dimensions: batch, positions and channels


@dataclass(frozen=True)
class _Returned:
    """A submodule's result; ``module`` also says which call it was, if the submodule was called before."""

    module: str
    tensor: Tensor
    given: Tensor | None


@dataclass(frozen=True)
class Divergence:
    """The first submodule of a candidate that computes something that its reference does not.

    Attributes:
        module: its path.
        given: the value of the reference that it is given; None if it is given none, or if that cannot be told.
        finding: a finding that names it and the last submodule that agrees.
    """

    module: str
    given: Value | None
    finding: Finding


def first_divergence(failure: Failure, trace: Trace) -> Iterator[Divergence]:
    """Yield where the candidate departs from the reference; nothing if all submodules agree or none does.

    Args:
        failure: a failure whose candidate's outputs are finite.
        trace: the reference's trace in FP64.
    """
    is_in_parts = failure.prepared.evaluation
    # If a port runs in parts, nothing tells where its calls on the probing inputs begin.
    if all(result.passed for result in failure.outputs) or (is_in_parts and failure.is_on_probes):
        return
    returned: list[_Returned] = []
    failure.rerun(lambda module: _record(module, returned))
    failure.prepared.clock.check()
    rounded = values_under(failure.prepared, failure.precision)
    columns = Columns(trace, rounded, failure.precision.dtype)
    unread = UnreadRows(failure.prepared, trace, columns)
    agreed: list[str] = []
    confirmed: set[int] = set()  # the row counts of values of the reference that right submodules share rows with
    reordered: set[int] = set()  # the row counts of tensors whose tokens a mixture of experts has sorted by expert
    number = -1 if failure.is_on_probes else failure.precision.warmup_passes
    for one in _joined(returned, trace) if is_in_parts else _compared_pass(returned, number):
        failure.prepared.clock.check()
        share, given = columns.share(one.tensor), one.given
        if (share or 0.0) < MOSTLY:
            both = (one.tensor,) if given is None else (given, one.tensor)
            learned = [columns.learn_rows(tensor) for tensor in both]
            share = columns.share(one.tensor) if any(learned) else share
        if (share is not None and share >= MOSTLY) or unread.hide_what_differs(one.tensor):
            if columns.rows_shared(one.tensor):
                confirmed |= columns.rows_held(one.tensor)
            agreed.append(one.module)
            continue
        of_given = None if given is None else columns.share(given)
        if given is not None and (of_given or 0.0) < MOSTLY and _has_rows_in_another_order(given, trace):
            reordered |= {_rows(one.tensor), _rows(given)}
        rows = {_rows(one.tensor), *(columns.rows_shared(one.tensor) & confirmed)}
        if share is None or rows & reordered or not rows & _rows_in_reference(one.module, failure.prepared, trace):
            continue
        last = agreed[-1] if agreed else ""
        held = None if given is None else next(columns.holders(given), None)
        value = None if held is None else _by_place(trace)[held]
        yield Divergence(
            one.module,
            value,
            repairable(
                "first-divergence",
                f"{one.module} is the first submodule of the candidate whose result {tuple(one.tensor.shape)} is not "
                f"among the reference's values: {1 - share:.0%} of its columns equal no column of theirs. "
                f"{f'{last}, which runs before it, agrees' if last else 'No submodule before it could be compared'}",
                _next_to(one.module, last, of_given, "" if value is None else described(value, trace)),
            ),
        )
        return


def _rows_in_reference(module: str, prepared: Prepared, trace: Trace) -> set[int]:
    """Return how many rows values have where the reference computes with a submodule's parameters.

    A submodule with other rows computes something else, such as packed sequences. If it has no parameters, all of the
    reference's are meant.
    """
    path = f"{module.partition(' (call ')[0]}."
    own = {
        name
        for left, right in prepared.weights.items()
        if any(each.startswith(path) for each in names(right))
        for name in names(left)
    }
    found = set()
    for call in trace.calls:
        parameters = {trace.parameters[value.number] for value in call.inputs if value.number in trace.parameters}
        if parameters & own or (parameters and not own):
            tensors = [trace.tensor(value) for value in (*call.inputs, *call.outputs)]
            found |= {_rows(x) if x.is_floating_point() else x.numel() for x in tensors}
    return found


def _next_to(module: str, last: str, of_given: float | None, given: str) -> str:
    """Say where to look next.

    Args:
        module: the first submodule that does not agree.
        last: the last one before it that agrees; empty if there is none.
        of_given: how much of the module's input agrees; None if that cannot be told.
        given: which of the reference's values the input is; empty if that cannot be told.
    """
    alone = f"compare {module} alone, as a pair of its own with the part of the reference that it replaces"
    between = f"between {last} and {module}" if last else f"before {module}"
    if of_given is None:
        return f"{alone}; if that passes, look at what the candidate computes {between}"
    if of_given >= MOSTLY:
        is_given = f", {given}" if given else ""
        return (
            f"{alone}: its input is a value that the reference also computes{is_given}; if that passes, the module is "
            "given the wrong value"
        )
    return f"look at what the candidate computes {between}: even the input of {module} is not in the reference"


def _record(module: nn.Module, returned: list[_Returned]) -> None:
    """Register hooks that keep the first tensor that each submodule, and the module itself, returns."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(submodule: nn.Module, args: Any, result: Any) -> None:
            given = next(_activations(args), None)
            returned.extend(_Returned(name, x, given) for x in islice(_activations(result), 1))

        return keep

    for name, submodule in module.named_modules():
        submodule.register_forward_hook(hook(name))


def _activations(tree: Any) -> Iterator[Tensor]:
    return (x.detach() for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point())


def _compared_pass(returned: list[_Returned], number: int) -> list[_Returned]:
    """Return the submodules' results in the pass that is compared, each call after the first with its number.

    Warm-up passes come before it. Passes on probing inputs come after it, and the last of them is compared. Each pass
    ends with the module itself. If the pair calls something else, each pass begins with the same submodule.

    Args:
        returned: the results in all passes.
        number: the number of the compared pass, from 0; -1 for the last.
    """
    ends = [i for i, one in enumerate(returned) if not one.module]
    starts = [0, *(end + 1 for end in ends[:-1])] if ends else []
    starts = starts or [i for i, one in enumerate(returned) if one.module == returned[0].module]
    number = number if number >= 0 else len(starts) - 1
    if not 0 <= number < len(starts):
        return []
    calls: Counter[str] = Counter()
    numbered: list[_Returned] = []
    for one in returned[starts[number] : [*starts, len(returned)][number + 1]]:
        calls[one.module] += 1
        which = f"{one.module} (call {calls[one.module]})" if calls[one.module] > 1 else one.module
        numbered += [replace(one, module=which)] if one.module else []
    return numbered


def _joined(returned: Sequence[_Returned], trace: Trace) -> list[_Returned]:
    """Return the submodules' results token by token, or in other parts, joined as if one pass had returned them.

    Modules whose parts do not add up to as many positions as the reference's attention has are left out.
    """
    seq = positions_of(trace)
    found = []
    for name, calls in grouped(returned, lambda one: one.module).items():
        for dim in (1, 0):
            parts = [one.tensor for one in calls if one.tensor.dim() == _WITH_POSITIONS]
            ends = list(accumulate(part.shape[dim] for part in parts))
            if name and seq in ends:
                parts = parts[: ends.index(seq) + 1]
                if len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) == 1:
                    found.append(_Returned(name, torch.cat(parts, dim), None))
                    break
    return found


def _has_rows_in_another_order(x: Tensor, trace: Trace) -> bool:
    """Return whether a submodule was given exactly the rows of a traced value, in another order or repeated.

    The columns of values computed from them are not in the reference.
    """
    if x.dim() not in (2, 3):
        return False
    rows = x.double().flatten(0, -2)
    rows = rows[rows.any(1)]
    directions = random_directions(x.shape[-1]).to(x.device)
    known = {y.flatten(0, -2) for y in trace.tensors if _may_hold_rows(y, x) and len(rows) >= y.shape[:-1].numel()}
    for y in known:
        wanted, held = rows[:_MOST_ROWS] @ directions, y.double().to(x.device) @ directions
        apart, where = torch.cdist(wanted, held).min(1)
        is_held = apart <= MOST_NOISE * torch.linalg.vector_norm(wanted, dim=1)
        has_moved = where != torch.arange(len(where), device=where.device)
        if is_held.double().mean() >= MOSTLY and has_moved.double().mean() >= _MOVED:
            return True
    return False


def _may_hold_rows(y: Tensor, x: Tensor) -> bool:
    return y.is_floating_point() and y.dim() in (2, 3) and y.shape[-1] == x.shape[-1] and y.numel() > 0


def _rows(x: Tensor) -> int:
    return x.shape[:-1].numel()


# Outputs that are right except for one factor.


_FAR = 3.0  # rounding moves a factor by up to this many times what it does in the rounding models
_MOST = 1e6  # a larger factor is not a scale but another magnitude altogether


def scaled_outputs(factor: float) -> Hypothesis:
    """Return the mistake that a number multiplies all outputs, to be paired with another; alone it needs no search."""

    return Hypothesis(
        "output-scale",
        f"outputs times {factor:.4g}",
        f"leave the outputs as large as the reference's; they are {readable(factor)} times that",
        returned=lambda x: x * factor,
        value=factor,
        tuned=scaled_outputs,
    )


def scale_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding on each failed output if all are multiples of the right ones, in numbers that prove it.

    If outputs passed, the same of gradients whose slices have different factors.
    """
    found = []
    for result in failure.results if failure.outputs_passed else failure.outputs:
        if not result.passed:
            factor, several = factor_of(failure, result), _uneven(failure, result)
            in_slices = several is not None and several.left <= result.tolerance_relative_l2
            if result.numel < 2 or not (in_slices or (factor is not None and not failure.outputs_passed)):
                return
            told = "is 0 everywhere; look for equal terms that cancel, and for a part that is never computed"
            if several is not None:
                told = f"is {several.told}, and otherwise right; look for a mean, a count or a scale of each by itself"
            elif factor:
                told = (
                    f"is {readable(factor)} times what it should be, and otherwise right; look for a scale that is "
                    "applied twice or not at all"
                )
            found.append((f"{result.label} {told}", doubt_about(factor)))
    title = "gradient-scale" if failure.outputs_passed else "output-scale"
    yield from (finding(title, f"{told}{doubt}", sure=not doubt) for told, doubt in found)


def whole_scale_findings(failure: Failure) -> Iterator[Finding]:
    """Yield a finding if outputs of few numbers, and every gradient, are the right ones times one factor.

    A factor always explains a single number, so the gradients must share it.
    """
    failed = [result for result in failure.results if not result.passed and result.finite]
    outputs = [result for result in failed if result.kind == "output"]
    if not few_outputs(failure) or len(outputs) < len(failure.outputs) or len(failed) == len(outputs):
        return
    factor = factor_of(failure, outputs[0])
    if factor is None or shared_factor(failure, failed) is None:
        return
    hidden = [one for one in failure.results if one.passed and abs(factor - 1.0) > one.tolerance_relative_l2]
    if any(bool(failure.golden[one.key].any()) for one in hidden):
        return
    doubt = doubt_about(factor)
    yield finding(
        "loss-scale",
        f"{', '.join(one.label for one in outputs)} and every gradient are {readable(factor)} times what they should "
        "be, and otherwise right; look for a sum instead of a mean, or for a number of tokens, sequences, microbatches "
        f"or ranks by which only one side divides the loss{doubt}",
        sure=not doubt,
    )


def factor_of(failure: Failure, result: TensorResult, everywhere: bool = True) -> float | None:
    """Return the factor by which all of a tensor is multiplied; None if it is wrong in other ways, or right.

    If rounding may have moved it from a number that people write, it is that number. Unless it must be the same
    ``everywhere``, slices may have other factors, but no more than the tensor's tolerance allows.
    """
    key = result.key
    right, candidate = failure.golden[key], failure.candidate[key].double()
    square = right.square().sum().item()
    factor = (candidate * right).sum().item() / square if square else math.nan
    if not math.isfinite(factor) or abs(factor) > _MOST or abs(factor - 1.0) <= result.tolerance_relative_l2:
        return None
    if factor == 0.0:
        return factor if not bool(candidate.any()) else None
    errors = measure(candidate / factor, right, failure.precision.dtype)
    bound = Tolerance(result.tolerance_relative_l2, result.tolerance_max_abs)
    if margin(errors, bound) > 1.0 or (everywhere and _uneven(failure, result) is not None):
        return None
    moved = max(abs((model[key] * right).sum().item() / square - 1.0) for model in failure.models)
    written = written_near(abs(factor), _FAR * moved)
    return math.copysign(written, factor) if written > 0.0 and written != 1.0 else factor


def _uneven(failure: Failure, result: TensorResult) -> Uneven | None:
    rounded = [model[result.key] for model in failure.models]
    return uneven(failure.candidate[result.key], failure.golden[result.key], rounded)


def shared_factor(failure: Failure, failed: Sequence[TensorResult], everywhere: bool = True) -> float | None:
    """Return the factor that all tensors share, as the most exact one shows it; None if one of them has another.

    Rounding moves a tensor's factor by no more than its tolerance.
    """
    factors = [factor_of(failure, result, everywhere) for result in failed]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(failed):
        return None
    exact = [result.tolerance_relative_l2 for result in failed]
    shared = known[exact.index(min(exact))]
    are_same = (
        abs(factor - shared) <= (min(exact) + error) * abs(shared) for factor, error in zip(known, exact, strict=True)
    )
    return shared if all(are_same) else None


def doubt_about(factor: float | None) -> str:
    """Return the end of a message about a factor if it is neither a count, nor one over it, nor written by people."""
    is_count = not factor or any(readable(x).startswith("1/") for x in (factor, 1.0 / factor))
    return "" if not factor or is_count or is_written(abs(factor)) else unusual(factor)


def readable(factor: float) -> str:
    """Return a factor as ``1/128`` if it is one over a whole number, else with four digits, or more if it is near 1."""
    inverse = 1.0 / factor if factor else 0.0
    if abs(inverse) > 1.1 and abs(inverse - round(inverse)) < 1e-3 * abs(inverse):
        return f"1/{round(inverse)}"
    from_one = abs(factor - 1.0)
    return f"{factor:.{max(4, 2 - math.floor(math.log10(from_one))) if from_one else 1}g}"


# The place of an unexplained error: which tensors it is in, and which of their rows, columns and heads.


_MOST_TENSORS = 3
_MOST_RIGHT = 6  # a message names at most this many tensors that pass, or runs of rows that do not
_MOSTLY = 0.9  # the error is in a part that has this share of its square
_SMALL = 0.5  # such a part is at most this share of a dimension
_PERIODS = (2, 4, 8, 16, 32, 64, 128)
_RIGHT = 2.0  # a row is right up to this many tolerances, as small parts have larger limits than the whole
_CLEARLY = 4.0  # and if the squared error of each wrong row is this many times as large, in these tolerances


def where_the_error_is(failure: Failure, untried: int = 0) -> Iterator[Finding]:
    """Yield one finding for each of the worst tensors, the outputs first; the first says what to do.

    Args:
        failure: the comparison.
        untried: how many known mistakes the search's budget did not last for.
    """
    clock = failure.prepared.clock
    known = "known mistake that was tried" if clock.ended or untried or failure.broken else "known mistake"
    failed = [result for result in failure.results if not result.passed and result.finite]
    failed.sort(key=lambda result: (result.kind != "output", -result.margin))
    # A single number, such as a loss, may be right by chance, and zeros prove nothing.
    tells = [result for result in failure.results if result.kind != "output" or result.numel != 1]
    passed = [result.label for result in tells if result.passed and bool(failure.golden[result.key].any())]
    step = _next_step(failure)
    others = f". These are right: {few_of(passed, _MOST_RIGHT)}" if passed else ""
    if clock.ended:
        others += f". The search for the cause {ended_early(clock.limit)}"
    elif untried:
        others += f". The search ended before it had tried {untried} known mistakes"
    for number, result in enumerate(failed[:_MOST_TENSORS]):
        where = "; ".join(_places(failure, result))
        either = " either" if number else ""
        told = f"no {known} explains the error of {result.label}{either}, {_size(result)}. The error is {where}"
        yield finding("unexplained", told if number else f"{told}{others}; {step}", repair=step)


def ended_early(seconds: float) -> str:
    """Return the end of a sentence on a search that a limit of this many seconds has ended."""
    return (
        f"was stopped after {seconds:g} s; give it more time with --parity-diagnosis=SECONDS, --diagnosis of parity "
        "run, or diagnosis_seconds of parity.compare"
    )


def _next_step(failure: Failure) -> str:
    """Say how to narrow down an error that nothing explains."""
    smaller = (
        "compare parts of it as pairs of their own, or with fewer layers: the smallest that still fails has the mistake"
    )
    if all(result.passed for result in failure.outputs) and not few_outputs(failure):
        return (
            "each output is within its limits, so look for what the backward pass alone does, such as detach(), hooks "
            f"or recomputation, and for a function that differs too little to show in outputs; {smaller}"
        )
    if failure.precision.recipe is not None:
        return f"compare it at bf16: if it passes there, look at recipes, casts and cached weights; if not, {smaller}"
    return smaller


def _size(result: TensorResult) -> str:
    """Describe how large a tensor's error is; there is no relative error if golden is 0."""
    errors, expected = result.errors, result.expected
    if not math.isfinite(errors.relative_l2):
        return f"which is 0 in golden and up to {errors.max_abs:.2g} in the candidate"
    return f"whose relative error is {errors.relative_l2:.2g} where {expected.relative_l2:.2g} is expected"


def _places(failure: Failure, result: TensorResult) -> Iterator[str]:
    """Yield which indices of a tensor are wrong, by dimension and by sequence, or else which have most of the error."""
    golden = failure.golden[result.key]
    error = failure.candidate[result.key].double() - golden
    if error.numel() < 2 or not bool(error.any()):
        yield f"{float(error.sum()):.2g}"
        return
    whole = error.square().sum()

    def along(*dims: int) -> tuple[Tensor, Tensor, bool]:
        """Return each index's share of the error along some dimensions, which are wrong, and whether that is clear."""
        rest = [dim for dim in range(error.dim()) if dim not in dims]
        own, right = (x.square().sum(rest) if rest else x.square() for x in (error, golden))
        times = own / ((_RIGHT * result.tolerance_relative_l2) ** 2 * right.clamp(min=float(right.mean())))
        wrong = times > 1.0
        is_part = bool(wrong.any()) and not bool(wrong.all())
        return own / whole, wrong, is_part and bool(times[wrong].min() > _CLEARLY * times[~wrong].max())

    told: dict[int, str] = {}
    every = []
    for dim in (dim for dim in range(error.dim()) if error.shape[dim] > 1):
        (share, wrong, is_clear), name = along(dim), _name(dim, result)
        if is_clear:
            told[dim] = (
                f"in {name} {_describe_ranges(wrong)} ({int(wrong.sum())} of {len(wrong)}; the others are right)"
            )
        elif described := _concentrated(share) or _periodic(share):
            told[dim] = f"in {name} {described}"
        elif bool(wrong.all()):
            every.append(f"each of its {len(wrong)} {name}")
    if _name(1, result) == "positions":
        _, wrong, is_clear = along(0, 1)
        if is_clear and wrong.sum() < wrong.any(1).sum() * wrong.any(0).sum():
            rows = [f"{_describe_ranges(some)} of row {number}" for number, some in enumerate(wrong) if some.any()]
            right = f"the other {int((~wrong).sum())} of {wrong.numel()} are right"
            both = f"in positions {few_of(rows, _MOST_RIGHT)} of the batch ({right})"
            told = {0: both} | {dim: each for dim, each in told.items() if dim > 1}
    yield from told.values() or [f"in {' and '.join(every)}" if every else "in no row or column alone"]
    projection = (error * golden).sum() / golden.square().sum()
    along_right = projection.square() * golden.square().sum() / whole
    if along_right > _MOSTLY:
        yield f"{along_right:.0%} of it is as if the right values were multiplied by {readable(1 + projection.item())}"


def _describe_ranges(chosen: Tensor) -> str:
    """Return where a boolean vector is true: ``3 to 7, 12``."""
    edges = nn.functional.pad(chosen.int(), (1, 1)).diff()
    ends = zip((edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist(), strict=True)
    runs = [f"{first} to {last - 1}" if last - first > 1 else f"{first}" for first, last in ends]
    return few_of(runs, _MOST_RIGHT)


def _concentrated(share: Tensor) -> str | None:
    """Return the indices with most of the error, if they are few: ``0 (95% of it, of 16)``."""
    order = share.argsort(descending=True)
    count = int((share[order].cumsum(0) < _MOSTLY).sum()) + 1
    if count > max(1, int(_SMALL * len(share))):
        return None
    chosen = torch.zeros_like(share).index_fill(0, order[:count], 1.0)
    return f"{_describe_ranges(chosen)} ({float(share @ chosen):.0%} of it, of {len(share)})"


def _periodic(share: Tensor) -> str | None:
    """Return ``1 of each 2`` if the error recurs with a period."""
    for period in _PERIODS:
        if len(share) % period == 0 and len(share) > period:
            by_phase = share.unflatten(0, (-1, period)).sum(0)
            if float(by_phase.max()) > _MOSTLY:
                return f"{int(by_phase.argmax())} of each {period} ({float(by_phase.max()):.0%} of it)"
    return None


def _name(dim: int, result: TensorResult) -> str:
    """Return what a dimension of ``[batch, seq, ..., channels]`` or of a weight ``[out, in]`` is called."""
    dims = len(result.shape)
    if dims == 1:
        return "elements"
    if dims == 2:
        return ("rows", "columns")[dim]
    if result.kind == "weight gradient":
        return f"dimension {dim}, at"
    return {0: "rows of the batch", 1: "positions", dims - 1: "channels"}.get(dim, f"dimension {dim}, at")
