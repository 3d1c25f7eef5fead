"""Names what is wrong with a failed comparison; the codes are explained in ``docs/findings.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from parity import weights
from parity.errors import measure
from parity.execute import outputs_of
from parity.hypotheses import Hypothesis, hypotheses
from parity.precision import Precision
from parity.prepare import Prepared, cast
from parity.result import Finding, TensorResult
from parity.tolerance import Tolerance, margin


def findings(
    tensors: Sequence[TensorResult],
    outputs: dict[str, Tensor],
    unreached: Sequence[str],
    prepared: Prepared,
    precision: Precision,
) -> tuple[Finding, ...]:
    """Every known cause that explains a failure; none for a comparison that passed.

    Args:
        tensors: all compared tensors of one run.
        outputs: the candidate's outputs, by name.
        unreached: names of TE parameters that the backward pass did not reach.
        prepared: what was compared.
        precision: at which it ran.
    """
    failed = [tensor for tensor in tensors if not tensor.passed]
    if not failed:
        return ()
    judged = [tensor for tensor in tensors if tensor.kind == "output"]
    explained = () if all(tensor.passed for tensor in judged) else _explanations(judged, outputs, prepared, precision)
    return (*_non_finite(failed, precision), *_unreached(unreached), *explained)


def _explanations(
    judged: Sequence[TensorResult], outputs: dict[str, Tensor], prepared: Prepared, precision: Precision
) -> Iterator[Finding]:
    """The hypotheses under which the reference computes the candidate's outputs within tolerance, best first."""
    if not all(tensor.errors.finite for tensor in judged):
        return
    shapes = {name: tuple(parameter.shape) for name, parameter in prepared.reference.named_parameters()}
    explaining: list[tuple[float, float, Hypothesis]] = []
    for hypothesis in hypotheses(prepared.weights, shapes):
        golden = _golden_under(hypothesis, prepared)
        errors = {name: measure(output, golden[name], precision.dtype) for name, output in outputs.items()}
        worst = max(
            margin(errors[tensor.name], Tolerance(tensor.tolerance_relative_l2, tensor.tolerance_max_abs))
            for tensor in judged
        )
        if worst <= 1.0:
            explaining.append((worst, max(error.relative_l2 for error in errors.values()), hypothesis))
    before = max(tensor.errors.relative_l2 for tensor in judged)
    titles = set()
    for _, after, hypothesis in sorted(explaining, key=lambda entry: entry[0]):
        if hypothesis.title in titles:  # the best of a kind, such as one of two activations that differ in noise
            continue
        titles.add(hypothesis.title)
        yield Finding(
            hypothesis.code,
            hypothesis.title,
            f"the outputs' relative error falls from {before:.2g} to {after:.2g}, what {precision.name} costs, if you "
            f"{hypothesis.repair}",
        )


def _golden_under(hypothesis: Hypothesis, prepared: Prepared) -> dict[str, Tensor]:
    """The outputs of the reference in FP64 as the hypothesis has it."""
    with _weights_of(hypothesis, prepared), hypothesis.context(), torch.no_grad():
        return outputs_of(prepared.reference, prepared.call, cast(prepared.inputs, torch.float64))


@contextmanager
def _weights_of(hypothesis: Hypothesis, prepared: Prepared) -> Iterator[None]:
    """Within the context the reference, in FP64, holds the candidate's weights as the hypothesis reads them."""
    prepared.reference.double()
    parameters = dict(prepared.reference.named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    candidate = {name: tensor.double() for name, tensor in prepared.candidate_weights.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in kept.items()}
    read = weights.to_reference(hypothesis.weights or prepared.weights, candidate, shapes)
    try:
        _fill(parameters, read)
        yield
    finally:
        _fill(parameters, kept)


def _fill(parameters: dict[str, torch.nn.Parameter], tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _non_finite(failed: Sequence[TensorResult], precision: Precision) -> Iterator[Finding]:
    for tensor in failed:
        errors, expected = tensor.errors, tensor.expected
        where = f"{tensor.label} of shape {_shape(tensor)}, first at {list(errors.first_non_finite or ())}"
        if errors.golden_non_finite:
            yield Finding(
                "PAR002",
                "golden-not-finite",
                f"the reference itself is not finite in FP64: {errors.golden_non_finite} elements of {where}; "
                "nothing can be judged there, so check the weights and inputs",
            )
        elif errors.nans + errors.infs and expected.nans + expected.infs:
            yield Finding(
                "PAR003",
                "precision-overflows",
                f"{errors.nans} NaN and {errors.infs} Inf in {where}; a faithful {precision.name} computation of the "
                f"reference has {expected.nans} NaN and {expected.infs} Inf there too, so the range of "
                f"{precision.name} is too small for these values, whoever computes them",
            )
        elif errors.nans + errors.infs:
            yield Finding(
                "PAR001",
                "not-finite",
                f"{errors.nans} NaN and {errors.infs} Inf in {where}, where a faithful {precision.name} computation "
                "of the reference is finite",
            )


def _unreached(unreached: Sequence[str]) -> Iterator[Finding]:
    for name in unreached:
        yield Finding(
            "PAR004",
            "no-gradient",
            f"the backward pass reached no gradient for TE's {name}; is it used in the forward pass, and does it "
            "require a gradient?",
        )


def _shape(tensor: TensorResult) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
