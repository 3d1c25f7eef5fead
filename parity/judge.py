"""Golden, model and candidate tensors in, verdicts out: every statistic of every tensor against its limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parity.calibration.table import Table
from parity.directions import Direction, resemblance
from parity.errors import Errors, measure
from parity.passes import Tensors
from parity.precision import Precision
from parity.result import Check, Kind, TensorResult
from parity.statistics import Statistic, least_error, statistics


def judge(
    golden: Tensors,
    models: Sequence[Tensors],
    candidate: Tensors,
    precision: Precision,
    table: Table,
    known: Sequence[Direction],
) -> tuple[TensorResult, ...]:
    """Judge every tensor.

    Args:
        golden: in FP64.
        models: the rounding model's tensors, one for each way in which faithful kernels compute.
        candidate: the candidate's tensors, in the reference's layout.
        precision: at which they were computed.
        table: what faithful ports show.
        known: directions of subtle mistakes.
    """
    return tuple(_judged(key, golden, models, candidate, precision, table, known) for key in golden)


def observe(
    key: tuple[Kind, str],
    golden: Tensors,
    models: Sequence[Tensors],
    candidate: Tensors,
    dtype: torch.dtype,
    known: Sequence[Direction],
) -> list[Statistic]:
    """The statistics of one tensor; none where the candidate, golden or every model has a NaN or an infinity.

    Args:
        key: kind and name of the tensor.
        golden, models, candidate, known: as for ``judge``.
        dtype: in which the candidate returns it.
    """
    kind, name = key
    truth = golden[key].double()
    error = candidate[key].double() - truth
    modelled = [difference for difference in (model[key].double() - truth for model in models) if _finite(difference)]
    if not modelled or not _finite(error):
        return []
    least = least_error(dtype, summed_terms(kind, truth, golden))
    found = list(statistics(error, modelled, truth, least))
    expected = max(*(torch.linalg.vector_norm(m).item() for m in modelled), least * _norm(truth))
    if kind == "output":
        mistake = resemblance(name, error, modelled, truth, expected, known)
        found += [mistake] if mistake else []
    return found


def summed_terms(kind: Kind, tensor: Tensor, golden: Tensors) -> int:
    """About how many terms one element sums: a parameter's gradient all tokens, anything else a row's width."""
    if kind != "weight gradient":
        return tensor.shape[-1] if tensor.dim() else 1
    outputs = [output for (k, _), output in golden.items() if k == "output"]
    return max(output.numel() // max(1, output.shape[-1]) if output.dim() else 1 for output in outputs)


def _judged(
    key: tuple[Kind, str],
    golden: Tensors,
    models: Sequence[Tensors],
    candidate: Tensors,
    precision: Precision,
    table: Table,
    known: Sequence[Direction],
) -> TensorResult:
    kind, name = key
    truth = golden[key]
    errors = measure(candidate[key], truth, precision.dtype)
    expected = _most([measure(model[key], truth, precision.dtype) for model in models])
    found = observe(key, golden, models, candidate, precision.dtype, known)
    checks = tuple(
        Check(s.name, s.value, table.limit(precision.name, kind, s.name), s.where, s.coefficient) for s in found
    )
    limits = {check.statistic: check.limit for check in checks}
    least = least_error(precision.dtype, summed_terms(kind, truth, golden))
    nothing_to_judge = 0.0 if errors.finite and not truth.numel() else math.inf
    return TensorResult(
        name=name,
        kind=kind,
        shape=tuple(truth.shape),
        errors=errors,
        expected=expected,
        tolerance_relative_l2=limits.get("norm", 0.0) * max(expected.relative_l2, least),
        tolerance_max_abs=limits.get("largest", 0.0) * max(expected.max_abs, least * expected.golden_rms),
        checks=checks,
        margin=max((check.margin for check in checks), default=nothing_to_judge),
    )


def _most(modelled: Sequence[Errors]) -> Errors:
    """Of two models' errors the larger: a faithful port may compute as either does."""
    return max(modelled, key=lambda errors: (errors.finite, errors.relative_l2))


def _finite(x: Tensor) -> bool:
    return math.isfinite(_norm(x))


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
