"""Finds the first submodule of a candidate that computes something that its reference does not.

Names do not pair submodules, values do: each column of what a right submodule returns is a column of some value that
the reference computes, too, but for a bias that TE adds later. Columns are compared by random projections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parity.calls import Trace
from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure
from parity.result import Finding

_NOISE = 5.0  # times what the precision costs the outputs, within which two values are the same
_MOST_NOISE = 0.3  # of a value, beyond which nothing could be told
_MOSTLY = 0.9  # of a value's columns, which must be found
_FEWEST_ROWS = 8
_PROJECTIONS = 16


@dataclass(frozen=True)
class _Returned:
    """What a submodule returned."""

    module: str
    tensor: Tensor


def first_divergence(failure: Failure, trace: Trace) -> Iterator[Finding]:
    """A finding that names the last submodule that agrees and the first that does not; none where all do or none does.

    Args:
        failure: the outputs of the candidate are finite.
        trace: of the reference in FP64.
    """
    near = _NOISE * max(result.expected.relative_l2 for result in failure.outputs)
    if failure.rerun is None or near > _MOST_NOISE:
        return
    returned: list[_Returned] = []
    failure.rerun(lambda module: _record(module, returned))
    agreed: list[str] = []
    for one in _compared_pass(returned, failure.precision.warmup_passes):
        share = _share_that_agrees(one.tensor, trace, near)
        if share is None:
            continue
        if share >= _MOSTLY:
            agreed.append(one.module)
            continue
        before = f"{agreed[-1]} before it agrees" if agreed else "nothing before it can be compared"
        yield finding(
            "first-divergence",
            f"{one.module} is the first submodule of the candidate whose result {tuple(one.tensor.shape)} the "
            f"reference does not compute: {1 - share:.0%} of its columns are nowhere in it; {before}",
        )
        return


def _record(module: nn.Module, returned: list[_Returned]) -> None:
    """Registers hooks that keep the first tensor that each submodule returns."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(submodule: nn.Module, args: Any, result: Any) -> None:
            tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
            returned.extend(_Returned(name, x.detach().double()) for x in tensors[:1])

        return keep

    for name, submodule in module.named_modules():
        if name:
            submodule.register_forward_hook(hook(name))


def _compared_pass(returned: list[_Returned], passes_before: int) -> list[_Returned]:
    """What was returned in the pass that is compared; each pass returns from the same submodule first.

    Passes that warm up come before it, one on probing inputs may come after it.
    """
    starts = [i for i, one in enumerate(returned) if one.module == returned[0].module]
    if len(starts) <= passes_before:
        return []
    return returned[starts[passes_before] : [*starts, len(returned)][passes_before + 1]]


def _share_that_agrees(x: Tensor, trace: Trace, near: float) -> float | None:
    """The share of a value's columns that are a column of some traced value; None if none has as many rows.

    Values of more dimensions, such as attention's scores, have layouts of their own and are left out.
    """
    if x.dim() not in (2, 3) or x.numel() // x.shape[-1] < _FEWEST_ROWS:
        return None
    layouts = [x.flatten(0, -2), x.transpose(0, 1).flatten(0, -2)] if x.dim() > 2 else [x]
    rows = len(layouts[0])
    traced = [y.double().flatten(0, -2) for y in trace.tensors if _has_rows(y, rows)]
    if not traced:
        return None
    weights = torch.randn(rows, _PROJECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = torch.cat([_projected(y, weights.to(y.device)) for y in traced])
    shares = []
    for layout in layouts:
        distances = torch.cdist(_projected(layout, weights.to(x.device)), known).amin(1)
        shares.append((distances <= near).double().mean().item())
    return max(shares)


def _has_rows(y: Tensor, rows: int) -> bool:
    return y.is_floating_point() and y.dim() > 1 and y.numel() == rows * y.shape[-1]


def _projected(x: Tensor, weights: Tensor) -> Tensor:
    """``[columns, projections]`` of ``[rows, columns]``, each column without its mean and of norm 1."""
    centred = x - x.mean(0)
    scaled = centred / torch.linalg.vector_norm(centred, dim=0).clamp(min=1e-300)
    return scaled.T @ weights / math.sqrt(weights.shape[1])
