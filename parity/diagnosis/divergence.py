"""Finds the first submodule of a candidate that computes something that its reference does not.

Names do not pair submodules, values do: each column of what a right submodule returns is a column of some value that
the reference computes, too, but for a bias that TE adds later. Columns are compared by random projections.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.diagnosis.noise import Place, places, values_under
from parity.result import Finding
from parity.watching.trace import Trace

_NOISE = 5.0  # times what the precision costs a value, within which two values are the same
_MOST_NOISE = 0.3  # of a value, beyond which it is not told from another one
_UNLIKE = 0.7  # of a value, within which no unrelated value is
_MOSTLY = 0.9  # of a value's columns, which must be found
_CONSTANT = 1e-6  # of a column's norm, below which what is left without its mean is nothing
_FEWEST_ROWS = 8
_MOVED = 0.5  # of the rows, which must stand elsewhere; else they are the same ones, with an error
_MOST_ROWS = 512  # that are looked for among others
_PROJECTIONS = 16


@dataclass(frozen=True)
class _Returned:
    """What a submodule returned, ``module`` telling which call it was, too, where it was called before."""

    module: str
    tensor: Tensor
    given: Tensor | None


@dataclass(frozen=True)
class _Known:
    """Columns of the reference's values, as many rows each.

    Attributes:
        projected: ``[columns, projections]``.
        near: within which another is the same, ``[columns]``.
    """

    projected: Tensor
    near: Tensor


def first_divergence(failure: Failure, trace: Trace) -> Iterator[Finding]:
    """A finding that names the last submodule that agrees and the first that does not; none where all do or none does.

    Args:
        failure: the outputs of the candidate are finite.
        trace: of the reference in FP64.
    """
    if failure.rerun is None or all(result.passed for result in failure.outputs):
        return
    returned: list[_Returned] = []
    failure.rerun(lambda module: _record(module, returned))
    rounded = values_under(failure.prepared, failure.precision)
    known: dict[int, _Known] = {}

    def share_of(x: Tensor) -> float | None:
        if _rows(x) not in known:
            known[_rows(x)] = _columns(trace, rounded, _rows(x), failure.precision.dtype)
        return _share_that_agrees(x, known[_rows(x)])

    agreed: list[str] = []
    reordered: set[int] = set()  # numbers of rows, of tokens that a mixture of experts has sorted by expert
    for one in _compared_pass(returned, failure.precision.warmup_passes):
        share = share_of(one.tensor)
        if share is not None and share >= _MOSTLY:
            agreed.append(one.module)
            continue
        given = one.given
        if given is not None and (share_of(given) or 0.0) < _MOSTLY and _has_rows_in_another_order(given, trace):
            reordered |= {_rows(one.tensor), _rows(given)}
        if share is None or _rows(one.tensor) in reordered:
            continue
        before = f"{agreed[-1]} before it agrees" if agreed else "nothing before it can be compared"
        yield finding(
            "first-divergence",
            f"{one.module} is the first submodule of the candidate whose result {tuple(one.tensor.shape)} the "
            f"reference does not compute: {1 - share:.0%} of its columns are nowhere in it; {before}",
        )
        return


def _record(module: nn.Module, returned: list[_Returned]) -> None:
    """Registers hooks that keep the first tensor that each submodule returns, and what the module itself does."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(submodule: nn.Module, args: Any, result: Any) -> None:
            given = next(_activations(args), None)
            returned.extend(_Returned(name, x, given) for x in islice(_activations(result), 1))

        return keep

    for name, submodule in module.named_modules():
        submodule.register_forward_hook(hook(name))


def _activations(tree: Any) -> Iterator[Tensor]:
    return (x.detach() for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point())


def _compared_pass(returned: list[_Returned], passes_before: int) -> list[_Returned]:
    """What submodules returned in the pass that is compared, each call after the first with its number.

    Passes that warm up come before it, one on probing inputs may come after it. Each ends with the module itself; where
    the pair calls something else, each begins with the same submodule.
    """
    ends = [i for i, one in enumerate(returned) if not one.module]
    starts = [0, *(end + 1 for end in ends)] if ends else []
    starts = starts or [i for i, one in enumerate(returned) if one.module == returned[0].module]
    if len(starts) <= passes_before:
        return []
    calls: Counter[str] = Counter()
    numbered: list[_Returned] = []
    for one in returned[starts[passes_before] : [*starts, len(returned)][passes_before + 1]]:
        calls[one.module] += 1
        which = f"{one.module} (call {calls[one.module]})" if calls[one.module] > 1 else one.module
        numbered += [replace(one, module=which)] if one.module else []
    return numbered


def _share_that_agrees(x: Tensor, known: _Known) -> float | None:
    """The share of a value's columns that are a column of some traced value; None if that cannot be told.

    Values of more dimensions, such as attention's scores, have layouts of their own and are left out.
    """
    if x.dim() not in (2, 3) or not len(known.near):
        return None
    clear = known.near <= _MOST_NOISE
    near = known.near.clamp(max=_UNLIKE)
    surely, perhaps = [], []
    for layout in [x.flatten(0, -2), x.transpose(0, 1).flatten(0, -2)] if x.dim() > 2 else [x]:
        columns = _varying(_projected(layout))
        if not len(columns):
            return None
        same = torch.cdist(columns, known.projected) <= near
        surely.append((same & clear).any(1).double().mean().item())
        perhaps.append(same.any(1).double().mean().item())
    return None if max(surely) < _MOSTLY <= max(perhaps) else max(surely)


def _has_rows_in_another_order(x: Tensor, trace: Trace) -> bool:
    """Whether what a submodule was given has the rows of a traced value, all of them, in another order or repeated.

    Nothing that is computed from them has its columns in the reference.
    """
    if x.dim() not in (2, 3):
        return False
    rows = x.double().flatten(0, -2)
    rows = rows[rows.any(1)]
    directions = _directions(x.shape[-1]).to(x.device)
    known = {y.flatten(0, -2) for y in trace.tensors if _may_hold_rows(y, x) and len(rows) >= y.shape[:-1].numel()}
    for y in known:
        wanted, held = rows[:_MOST_ROWS] @ directions, y.double().to(x.device) @ directions
        apart, where = torch.cdist(wanted, held).min(1)
        is_held = apart <= _MOST_NOISE * torch.linalg.vector_norm(wanted, dim=1)
        has_moved = where != torch.arange(len(where), device=where.device)
        if is_held.double().mean() >= _MOSTLY and has_moved.double().mean() >= _MOVED:
            return True
    return False


def _may_hold_rows(y: Tensor, x: Tensor) -> bool:
    return y.is_floating_point() and y.dim() in (2, 3) and y.shape[-1] == x.shape[-1] and y.numel() > 0


def _columns(trace: Trace, rounded: Mapping[Place, Tensor], rows: int, stored: torch.dtype) -> _Known:
    """The columns of all values of a trace that have so many rows, and what the precision costs them.

    Args:
        trace: of the reference in FP64.
        rounded: its values under the rounding model.
        rows: of the candidate's value.
        stored: the dtype to which the candidate rounds a value at least once.
    """
    values = {place: y for place, y in places(trace).items() if rows >= _FEWEST_ROWS and _has_rows(y, rows)}
    if not values:
        return _Known(torch.empty(0, _PROJECTIONS), torch.empty(0))
    exact = {place: _projected(y.flatten(0, -2)) for place, y in values.items()}
    least = _NOISE * torch.finfo(stored).eps / 2
    near = [_cost(columns, values[place], rounded.get(place)).clamp(min=least) for place, columns in exact.items()]
    told = torch.cat(near)
    told = told[told <= _MOST_NOISE]
    # In FP32 a reference may make other casts than in FP64; these values are taken for as noisy as others may be.
    unknown = told.max().item() if len(told) else _MOST_NOISE
    return _Known(torch.cat([_varying(columns) for columns in exact.values()]), torch.cat(near).nan_to_num(nan=unknown))


def _cost(exact: Tensor, value: Tensor, model: Tensor | None) -> Tensor:
    """Within which another column is the same as each of a value's that varies; NaN where the model has no such value.

    Args:
        exact: the value's columns, projected.
        value: of the reference in FP64.
        model: the same under the rounding model.
    """
    varies = exact.any(1)
    if model is None or model.shape != value.shape:
        return torch.full((int(varies.sum()),), math.nan, dtype=torch.float64)
    apart = torch.linalg.vector_norm(_projected(model.flatten(0, -2)) - exact, dim=1)[varies]
    return _NOISE * torch.maximum(apart, apart.square().mean().sqrt())


def _varying(columns: Tensor) -> Tensor:
    return columns[columns.any(1)]


def _rows(x: Tensor) -> int:
    return x.shape[:-1].numel()


def _has_rows(y: Tensor, rows: int) -> bool:
    return y.is_floating_point() and y.dim() > 1 and y.numel() == rows * y.shape[-1]


def _projected(x: Tensor) -> Tensor:
    """``[columns, projections]`` of ``[rows, columns]``, each column without its mean, of norm 1 or 0."""
    x = x.double()
    centred = x - x.mean(0)
    norm = torch.linalg.vector_norm(centred, dim=0)
    varies = norm > _CONSTANT * torch.linalg.vector_norm(x, dim=0)
    scaled = torch.where(varies, centred / norm.clamp(min=1e-300), 0.0)
    return (scaled.T @ _directions(len(x)).to(x.device)).cpu() / math.sqrt(_PROJECTIONS)


def _directions(size: int) -> Tensor:
    return torch.randn(size, _PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
