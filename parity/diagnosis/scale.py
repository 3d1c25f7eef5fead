"""Outputs that are right but for one factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity.diagnosis.codes import finding
from parity.diagnosis.failure import Failure, few_outputs
from parity.diagnosis.hypothesis import Hypothesis, ModuleCall
from parity.errors import measure
from parity.result import Finding, TensorResult
from parity.tolerance import Tolerance, margin

_SAME_FACTOR = 0.02
"""By how much the factors of tensors that are scaled together may differ, beside what rounding moves each by."""

_MOST = 1e6  # a factor beyond is no scale but another magnitude altogether


def scaled_outputs(module: nn.Module, factor: float) -> Hypothesis:
    """That all outputs are multiplied by one number, for a search for two mistakes; alone it needs no search."""

    def around(call: ModuleCall) -> ModuleCall:
        def scaled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            returned = call(module, *args, **kwargs)
            return tree_map_only(Tensor, lambda x: x * factor if x.is_floating_point() else x, returned)

        return scaled

    return Hypothesis(
        "output-scale",
        f"outputs times {factor:.4g}",
        f"leave the outputs as large as the reference's; they are {readable(factor)} times that",
        module,
        around=around,
        value=factor,
        tuned=partial(scaled_outputs, module),
    )


def output_scale_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if every failed output is the right one times one factor; of a single number nothing can be said."""
    for result in failure.outputs:
        if not result.passed:
            factor = factor_of(failure, result)
            if factor is None or failure.golden[result.kind, result.name].numel() < 2:
                return
            yield finding(
                "output-scale",
                f"{result.label} is {readable(factor)} times what it should be, and right but for that; look for a "
                "scale that is applied twice or not at all",
            )


def whole_scale_findings(failure: Failure) -> Iterator[Finding]:
    """A finding if outputs that are few, and every gradient with them, are the right ones times one factor.

    A factor alone would explain a single number; the gradients must share it.
    """
    failed = [result for result in failure.results if not result.passed and result.finite]
    outputs = [result for result in failed if result.kind == "output"]
    if not few_outputs(failure) or len(outputs) < len(failure.outputs) or len(failed) == len(outputs):
        return
    factor = factor_of(failure, outputs[0])
    if factor is None or shared_factor(failure, failed) is None:
        return
    hidden = [one for one in failure.results if one.passed and abs(factor - 1.0) > one.tolerance_relative_l2]
    if any(bool(failure.golden[one.kind, one.name].any()) for one in hidden):
        return
    yield finding(
        "loss-scale",
        f"{', '.join(one.label for one in outputs)} and every gradient are {readable(factor)} times what they should "
        "be, and right but for that; look for a sum in the place of a mean, or for a number of tokens, sequences, "
        "microbatches or ranks by which the loss is divided on one side alone",
    )


def factor_of(failure: Failure, result: TensorResult) -> float | None:
    """By what a tensor is multiplied; None if it is not the right one but for a factor."""
    key = result.kind, result.name
    right, candidate = failure.golden[key], failure.candidate[key].double()
    square = right.square().sum().item()
    factor = (candidate * right).sum().item() / square if square else math.nan
    if not math.isfinite(factor) or abs(factor) > _MOST or abs(factor - 1.0) <= result.tolerance_relative_l2:
        return None
    if factor == 0.0:
        return factor if not bool(candidate.any()) else None
    errors = measure(candidate / factor, right, failure.precision.dtype)
    bound = Tolerance(result.tolerance_relative_l2, result.tolerance_max_abs)
    return factor if margin(errors, bound) <= 1.0 else None


def shared_factor(failure: Failure, failed: Sequence[TensorResult]) -> float | None:
    """By what all of the tensors are multiplied, as the most exact of them has it; None if one of them is not.

    Rounding moves a tensor's factor by no more than the relative error that is expected of it.
    """
    factors = [factor_of(failure, result) for result in failed]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(failed):
        return None
    expected = [result.expected.relative_l2 for result in failed]
    shared = known[expected.index(min(expected))]
    are_same = (
        abs(factor - shared) <= (_SAME_FACTOR + error) * abs(shared)
        for factor, error in zip(known, expected, strict=True)
    )
    return shared if all(are_same) else None


def readable(factor: float) -> str:
    """``1/128`` for what is one over a whole number, else four digits, or as many as tell it from 1."""
    inverse = 1.0 / factor if factor else 0.0
    if abs(inverse) > 1.1 and abs(inverse - round(inverse)) < 1e-3 * abs(inverse):
        return f"1/{round(inverse)}"
    from_one = abs(factor - 1.0)
    return f"{factor:.{max(4, 2 - math.floor(math.log10(from_one))) if from_one else 1}g}"
