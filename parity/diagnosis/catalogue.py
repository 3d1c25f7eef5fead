"""The catalogue: every known mistake that could have been made with a given reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from parity.diagnosis.activations import activation_hypotheses
from parity.diagnosis.calls import Trace, traced
from parity.diagnosis.hypothesis import Hypothesis
from parity.diagnosis.norms import norm_hypotheses
from parity.execute import outputs_of
from parity.prepare import Prepared, cast


def subtle_hypotheses(prepared: Prepared) -> tuple[Hypothesis, ...]:
    """The mistakes that change what the reference computes by so little that an error's norm may not show it.

    Each is tried with all operations of its kind at once. Inside ``hypothesis.context()`` one pass of
    ``prepared.reference`` computes what the hypothesis says, in any dtype, gradients included.
    """
    trace = trace_of(prepared)
    return tuple(one for one in function_hypotheses(trace, prepared) if one.subtle and one.everywhere)


def function_hypotheses(trace: Trace, prepared: Prepared) -> Iterator[Hypothesis]:
    """Every mistake that changes what the reference computes."""
    yield from norm_hypotheses(trace, prepared.reference, _dtype(prepared))
    yield from activation_hypotheses(trace, prepared.reference)


def trace_of(prepared: Prepared) -> Trace:
    """Every call of the reference's forward pass, in FP64."""
    prepared.reference.double()
    inputs = cast(prepared.inputs, torch.float64)
    return traced(prepared.reference, lambda: outputs_of(prepared.reference, prepared.call, inputs))


def _dtype(prepared: Prepared) -> torch.dtype:
    """In which the port holds weights and activations."""
    return next((tensor.dtype for tensor in prepared.candidate_weights.values()), torch.float32)
