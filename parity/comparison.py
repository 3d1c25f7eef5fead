"""Runs one case at one precision: the only place where the flow from a case to its result is written down."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from parity import diagnose, te, weights
from parity.case import Case, Pair, as_case
from parity.errors import measure
from parity.execute import Pass, run
from parity.judgeable import NothingToJudge, check_tolerances, gradients_missed, remarks
from parity.precision import PRECISIONS, Precision, why_unavailable
from parity.prepare import Prepared, build, cast, prepare
from parity.result import Kind, Result, TensorResult
from parity.rounding import rounded
from parity.te import Backend, Kernels
from parity.tolerance import margin, tolerance
from parity.user_error import UserError
from parity.validate import CheckedSize, check_case

Tensors = dict[tuple[Kind, str], Tensor]


def compare(
    pair: Case | Pair,
    precisions: Sequence[str] = tuple(PRECISIONS),
    seeds: Iterable[int] = (0,),
    backend: Backend | Literal["auto"] = "auto",
) -> list[Result]:
    """Compare a pair at each of its sizes, precisions and seeds, without pytest.

    Args:
        pair: what ``@parity.pair`` made of a function, or a ``parity.Pair`` of modules that hold their weights already.
        precisions: names from ``parity.precision.PRECISIONS``.
        seeds: of weights, inputs and output gradients.
        backend: ``gpu``, ``cpu``, or ``auto`` for TE's real kernels where they can run.

    Returns:
        One result for each size, precision and seed, in this order.

    Raises:
        UserError: if the pair's weight map or inputs do not fit, or a precision's name is unknown.
        parity.te.BackendUnavailable: if the backend cannot be had on this machine.
    """
    case = as_case(pair)
    unknown = [name for name in precisions if name not in PRECISIONS]
    if unknown:
        raise UserError(f"unknown precision {unknown[0]!r}; there are {', '.join(PRECISIONS)}")
    kernels = te.kernels(backend)
    chosen = [PRECISIONS[name] for name in precisions if case.precisions is None or name in case.precisions]
    seeds = list(seeds)
    return [
        compare_at(case, checked, precision, seed, kernels)
        for checked in check_case(case, kernels.te)
        for precision in chosen
        for seed in seeds
    ]


def compare_at(case: Case, checked: CheckedSize, precision: Precision, seed: int, kernels: Kernels) -> Result:
    """Compare a case at one size, precision and seed.

    Never raises for a module that fails: the result's status and reason tell.
    """
    began = time.perf_counter()

    def result(**fields: object) -> Result:
        return Result(
            case=case.name,
            precision=precision.name,
            size=dict(checked.size),
            size_label=checked.label,
            seed=seed,
            backend=kernels.backend,
            seconds=time.perf_counter() - began,
            path=str(case.path),
            **fields,  # type: ignore[arg-type]
        )

    unavailable = why_unavailable(precision, kernels)
    if unavailable is not None:
        return result(status="skipped", reason=unavailable)
    step = "the reference in FP64"
    try:
        prepared = prepare(case, checked, precision.dtype, seed, kernels)
        step = f"the reference under the rounding model of {precision.name}"
        expected = _run_rounded(prepared, precision)
        step = "the candidate"
        candidate, unreached = _run_candidate(case, checked, prepared, precision, seed, kernels)
    except UserError as error:
        return result(status="error", reason=str(error))
    except Exception as error:
        prepare.cache_clear()
        return result(status="error", reason=f"{step} raised {type(error).__name__}: {error}")
    golden = _tensors(prepared.golden)
    tensors = _judge(golden, expected, candidate, precision.dtype)
    passed = all(tensor.passed for tensor in tensors)
    if passed:
        try:
            check_tolerances(tensors, precision.name)
        except NothingToJudge as error:
            return result(status="error", reason=str(error))
    outputs = {name: tensor for (kind, name), tensor in candidate.items() if kind == "output"}
    missed = gradients_missed(unreached, prepared.weights, prepared.reference)
    findings = diagnose.findings(tensors, outputs, missed, prepared, precision)
    notes = remarks(tensors, golden, candidate, prepared.reference, prepared.golden.not_compared, precision.dtype)
    return result(status="passed" if passed else "failed", tensors=tensors, findings=findings, notes=notes)


def _run_rounded(prepared: Prepared, precision: Precision) -> Tensors:
    """The reference in FP32 under the rounding model, its results rounded to the dtype in which TE returns them."""
    prepared.reference.float()
    store = precision.rounding.store
    with rounded(precision.rounding, prepared.reference.parameters()) as phase:
        ran = run(
            prepared.reference,
            prepared.call,
            cast(prepared.inputs, torch.float32),
            prepared.input_names,
            lambda outputs: {name: prepared.cotangents[name].to(output.dtype) for name, output in outputs.items()},
            before_backward=phase.begin_backward,
        )
    return {key: store(tensor) for key, tensor in _tensors(ran).items()}


def _run_candidate(
    case: Case, checked: CheckedSize, prepared: Prepared, precision: Precision, seed: int, kernels: Kernels
) -> tuple[Tensors, tuple[str, ...]]:
    """The candidate's tensors in the reference's layout, and the TE parameters that no gradient reached."""
    pair = build(case, checked, seed, kernels)
    candidate = pair.candidate.to(precision.dtype)
    parameters = dict(candidate.named_parameters())
    with torch.no_grad():
        for name, tensor in prepared.candidate_weights.items():
            parameters[name].copy_(tensor)
    for _ in range(1 + precision.warmup_passes):
        ran = run(
            candidate,
            pair.call_candidate,
            prepared.inputs,
            prepared.input_names,
            lambda outputs: _fitting(prepared.cotangents, outputs),
            forward_context=precision.autocast(kernels),
        )
    gradients = {
        name: ran.weight_gradients.get(name, torch.zeros_like(parameter)).double()
        for name, parameter in parameters.items()
    }
    frozen = tuple(name for name, parameter in parameters.items() if not parameter.requires_grad)
    shapes = {name: tuple(parameter.shape) for name, parameter in prepared.reference.named_parameters()}
    in_reference_layout = weights.gradients_to_reference(pair.weights, gradients, shapes)
    return _tensors(dataclasses.replace(ran, weight_gradients=in_reference_layout)), ran.unreached + frozen


def _fitting(cotangents: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The cotangents in the candidate's dtype.

    Raises:
        UserError: if the candidate's outputs are not as many or not of the shapes of the reference's.
    """
    reference = {name: tuple(cotangent.shape) for name, cotangent in cotangents.items()}
    candidate = {name: tuple(output.shape) for name, output in outputs.items()}
    if reference != candidate:
        raise UserError(
            f"the candidate returns {candidate} where the reference returns {reference}; "
            "bring them to one shape in the pair's call_candidate or call_reference"
        )
    return {name: cotangents[name].to(output.dtype) for name, output in outputs.items()}


def _tensors(ran: Pass) -> Tensors:
    """All tensors of a pass by kind and name."""
    tensors: Tensors = {("output", name): tensor for name, tensor in ran.outputs.items()}
    tensors.update({("input gradient", name): tensor for name, tensor in ran.input_gradients.items()})
    tensors.update({("weight gradient", name): tensor for name, tensor in ran.weight_gradients.items()})
    return tensors


def _judge(golden: Tensors, expected: Tensors, candidate: Tensors, dtype: torch.dtype) -> tuple[TensorResult, ...]:
    results = []
    for (kind, name), truth in golden.items():
        errors = measure(candidate[kind, name], truth, dtype)
        model = measure(expected[kind, name], truth, dtype)
        bound = tolerance(model, dtype, _summed_terms(kind, truth, golden))
        results.append(
            TensorResult(
                name=name,
                kind=kind,
                shape=tuple(truth.shape),
                errors=errors,
                expected=model,
                tolerance_relative_l2=bound.relative_l2,
                tolerance_max_abs=bound.max_abs,
                margin=margin(errors, bound),
            )
        )
    return tuple(results)


def _summed_terms(kind: Kind, tensor: Tensor, golden: Tensors) -> int:
    """About how many terms one element sums: a parameter's gradient all tokens, anything else a row's width."""
    if kind != "weight gradient":
        return tensor.shape[-1] if tensor.dim() else 1
    outputs = [output for (kind, _), output in golden.items() if kind == "output"]
    return max(output.numel() // max(1, output.shape[-1]) if output.dim() else 1 for output in outputs)
