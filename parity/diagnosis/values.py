"""Findings about values that cannot be judged: NaN, infinities, gradients that never came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parity.passes import Tensors
from parity.precision import Precision
from parity.result import Finding, TensorResult


def non_finite(failed: Sequence[TensorResult], precision: Precision) -> Iterator[Finding]:
    """What is known of values that are not finite: whose fault they are."""
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
        elif not tensor.finite:
            yield Finding(
                "PAR003",
                "precision-overflows",
                f"a faithful {precision.name} computation of the reference has {expected.nans} NaN and {expected.infs} "
                f"Inf in {tensor.label}, where the TE module is finite, so the range of {precision.name} is too small "
                "for these values: nothing tells what rounding costs there",
            )


def unreached_parameters(unreached: Sequence[str]) -> Iterator[Finding]:
    """TE parameters, by name, that the backward pass did not reach."""
    for name in unreached:
        yield Finding(
            "PAR004",
            "no-gradient",
            f"the backward pass reached no gradient for TE's {name}; is it used in the forward pass, and does it "
            "require a gradient?",
        )


def unread_inputs(failed: Sequence[TensorResult], candidate: Tensors) -> Iterator[Finding]:
    """Inputs to which nothing flows back, though it does in the reference."""
    for tensor in failed:
        if tensor.kind == "input gradient" and not candidate[tensor.kind, tensor.name].any():
            yield Finding(
                "PAR004",
                "no-gradient",
                f"no gradient flows back to the input {tensor.name}: the candidate computes without it, or detaches "
                "it; is it passed on to TE's module, as encoder_output say, and not another in its place?",
            )


def _shape(tensor: TensorResult) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
