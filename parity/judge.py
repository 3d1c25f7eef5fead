"""Golden, model and candidate tensors in, verdicts out: every statistic of every tensor against its limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parity.calibration.table import Table
from parity.directions import Direction, resemblance
from parity.errors import difference, in_fp64, measure
from parity.passes import Tensors
from parity.precision import Precision
from parity.result import Check, Errors, Kind, TensorResult
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
    truth = in_fp64(golden[key])
    errors = [difference(tensors[key], truth) for tensors in (candidate, *models)]
    return _observed(key, errors[0], errors[1:], truth, least_error(dtype, summed_terms(key[0], truth, golden)), known)


def _observed(
    key: tuple[Kind, str],
    error: Tensor,
    model_errors: Sequence[Tensor],
    truth: Tensor,
    least: float,
    known: Sequence[Direction],
) -> list[Statistic]:
    finite = [model_error for model_error in model_errors if _finite(model_error)]
    if not finite or not _finite(error):
        return []
    found = list(statistics(error, finite, truth, least))
    kind, name = key
    if kind == "output":
        expected = max(*map(_norm, finite), least * _norm(truth))
        mistake = resemblance(name, error, finite, truth, expected, known)
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
    truth = in_fp64(golden[key])
    least = least_error(precision.dtype, summed_terms(kind, truth, golden))
    error, *model_errors = [difference(tensors[key], truth) for tensors in (candidate, *models)]
    errors = measure(candidate[key], truth, precision.dtype, error)
    expected = _most([model[key] for model in models], truth, precision.dtype, model_errors)
    found = _observed(key, error, model_errors, truth, least, known)
    checks = tuple(
        Check(s.name, s.value, table.limit(precision.name, kind, s.name), s.where, s.coefficient) for s in found
    )
    limits = {check.statistic: check.limit for check in checks}
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


def _most(modelled: Sequence[Tensor], truth: Tensor, dtype: torch.dtype, model_errors: Sequence[Tensor]) -> Errors:
    """Of two models' errors the larger that is finite: a faithful port may compute as either does."""
    norms = [_norm(model_error) for model_error in model_errors]
    most = max(range(len(norms)), key=lambda model: norms[model] if math.isfinite(norms[model]) else -1.0)
    return measure(modelled[most], truth, dtype, model_errors[most])


def _finite(x: Tensor) -> bool:
    return math.isfinite(_norm(x))


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
