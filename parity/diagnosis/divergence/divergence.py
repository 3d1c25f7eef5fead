"""Finds the first submodule of a candidate that computes something that its reference does not.

Names do not pair submodules, values do: each column of what a right submodule returns is a column of some value that
the reference computes, too, but for a bias that TE adds later, and for rows that no output reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parity.diagnosis.codes import finding
from parity.diagnosis.divergence.columns import MOST_NOISE, MOSTLY, Columns, random_directions
from parity.diagnosis.divergence.noise import values_under
from parity.diagnosis.divergence.unread_rows import UnreadRows
from parity.diagnosis.failure import Failure
from parity.result import Finding
from parity.watching.trace import Trace

_MOVED = 0.5  # of the rows, which must stand elsewhere; else they are the same ones, with an error
_MOST_ROWS = 512  # that are looked for among others


@dataclass(frozen=True)
class _Returned:
    """What a submodule returned, ``module`` telling which call it was, too, where it was called before."""

    module: str
    tensor: Tensor
    given: Tensor | None


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
    failure.prepared.clock.check()
    rounded = values_under(failure.prepared, failure.precision)
    columns = Columns(trace, rounded, failure.precision.dtype)
    unread = UnreadRows(failure.prepared, trace, columns)
    agreed: list[str] = []
    reordered: set[int] = set()  # numbers of rows, of tokens that a mixture of experts has sorted by expert
    for one in _compared_pass(returned, failure.precision.warmup_passes):
        failure.prepared.clock.check()
        share = columns.share(one.tensor)
        if (share is not None and share >= MOSTLY) or unread.hide_what_differs(one.tensor):
            agreed.append(one.module)
            continue
        given = one.given
        if given is not None and (columns.share(given) or 0.0) < MOSTLY and _has_rows_in_another_order(given, trace):
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


def _has_rows_in_another_order(x: Tensor, trace: Trace) -> bool:
    """Whether what a submodule was given has the rows of a traced value, all of them, in another order or repeated.

    Nothing that is computed from them has its columns in the reference.
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
